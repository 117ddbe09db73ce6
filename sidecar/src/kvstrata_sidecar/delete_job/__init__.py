"""Deletes keyspaces from a shared tier: the program of a deletion Job, `python -m kvstrata_sidecar.delete_job ORDER`.

The operator starts it for an eager CacheInvalidation (`delete`), and for blocks of a replaced cache identity
(`reclaim`).
"""
