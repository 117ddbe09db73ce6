"""A tier of files on a node's own disk, under the pod's policy.

One process owns one directory, so the whole index is in memory: lookups touch no disk, and limits hold at every
instant. See docs/how-to/files.md.
"""
