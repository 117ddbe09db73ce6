"""LMCache's own memory (L1) under the pod's policy: budgets, retention and erasure.

    --server-module '{"module_path": "kvstrata_sidecar.adapter.memory.module", "config": {…}}'

LMCache has no hook for admission, only a listener and `delete`. So this package follows every block (`events`, into
`index/scope_index`), chooses victims (`index/victims`: blocks of keyspaces outside of the policy, expired ones, those
above a scope's limit, and, when the memory fills up, the oldest of scopes above their guarantee), and deletes them from
a thread of its own (`evictor`). LMCache runs with the `noop` eviction policy.

Memory that LMCache frees is overwritten before reuse (`scrub`). Free memory therefore holds zeros, and deleting a
keyspace's blocks erases it.
"""
