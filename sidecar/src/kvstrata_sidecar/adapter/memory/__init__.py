"""LMCache's own memory (L1) under the pod's policy: who may keep how much in it, for how long, and how it is erased.

    --server-module '{"module_path": "kvstrata_sidecar.adapter.memory.module", "config": {…}}'

LMCache stores and finds blocks in its memory without asking anybody. What it does offer is a listener, and `delete`.
So this package follows every block (`events`, into `index/scope_index`), decides which have to go (`index/victims`:
those of keyspaces outside of the policy, too old ones, those above a scope's limit, and, when the memory fills up, the
oldest of scopes above their guarantee), and deletes them from a thread of its own (`evictor`). Eviction is ours alone:
LMCache runs with `noop`.

Whatever LMCache frees, for whatever reason, is overwritten before it can be handed out again (`scrub`). Therefore free
memory holds zeros, and erasing a keyspace is deleting its blocks: no list of where its bytes once were is needed.

LMCache's side: `module` is what it loads, `lmcache_memory` what is used of its memory manager, `lmcache_keys` its names
of blocks, `prefetch` its loads for no request, `lmcache_version` the check that it is the LMCache we know.
"""
