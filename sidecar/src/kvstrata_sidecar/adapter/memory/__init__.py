"""LMCache's own memory (L1) under the pod's policy: budgets, retention and erasure.

    --server-module '{"module_path": "kvstrata_sidecar.adapter.memory.module", "config": {…}}'

LMCache has no hook for admission, only a listener and `delete`. So this package queues its events (`events`), keeps the
index of blocks that it shares with files (`index`), and evicts from a thread of its own (`evictor`): blocks of
keyspaces outside of the policy, expired ones, those above a scope's limit, and, when the memory fills up, the oldest of
scopes above their guarantee. LMCache runs with the `noop` eviction policy. `tier` puts it together.

Memory that LMCache frees is overwritten before reuse (`upstream/pool.py`). Free memory therefore holds zeros, and
deleting a keyspace's blocks erases it.
"""
