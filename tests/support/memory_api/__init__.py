"""An API server in memory: server-side apply, field ownership, subresources, finalizers and garbage collection.

`objects` is the server, `ownership` who owns which field, `fieldsets` and `merging` the arithmetic of both, `schemas`
what decides how a list or a map merges. `tests/apiserver/test_memory_api.py` plays the same requests against a real
API server and compares, so that this one cannot drift.
"""
