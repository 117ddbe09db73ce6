"""A tier of files on a node's own disk, under the pod's policy.

One process owns one directory, so everything that is known about it (what is there, whose it is, how old, how much) is
in memory: lookups touch no disk, and limits hold at every instant. See docs/guides/nvme.md.
"""
