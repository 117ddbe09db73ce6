"""Deletes keyspaces from a shared tier: the program of a deletion Job, `python -m kvstrata_sidecar.delete_job ORDER`.

What it does, and what makes it safe to kill anywhere, is in `deletion`. The operator starts
it for an eager CacheInvalidation. What is of a replaced cache identity it deletes by `reclaim`.
"""
