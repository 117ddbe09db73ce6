"""An API server in memory: server-side apply, field ownership, subresources, finalizers and garbage collection.

`objects` is the server, `ownership` holds the owners of fields, `fieldsets` and `merging` the arithmetic of both,
`schemas` the rules by which a list or a map merges. `tests/apiserver/test_memory_api.py` plays the same requests
against a real API server and compares, so that this one cannot drift.
"""
