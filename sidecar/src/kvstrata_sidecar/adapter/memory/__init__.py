"""LMCache's own memory (L1) under the pod's policy: who may keep how much in it, for how long, and how it is erased.

    --server-module '{"module_path": "kvstrata_sidecar.adapter.memory.module", "config": {…}}'

LMCache stores and finds blocks in its memory without asking anybody. What it does offer is a listener, and `delete`.
So this package follows every block (`index`), decides which have to go (`choice`: those of keyspaces outside of the
policy, too old ones, those above a scope's limit, and, when the memory fills up, the oldest of whoever is above his
guarantee), and deletes them from a thread of its own (`governor`). Eviction is ours alone: LMCache runs with `noop`.

Whatever LMCache frees, for whatever reason, is overwritten before it can be handed out again (`scrub`). Therefore free
memory holds zeros, and purging a keyspace is deleting its blocks: no list of where its bytes once were is needed.

`module` is LMCache's side, `pool` what is used of its memory manager, `pin` the check that LMCache is what we know.
"""
