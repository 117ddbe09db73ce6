"""The gate: the only way to an engine, and the place where a caller becomes a keyspace.

Requests take one path: `http1` reads a whole request, `proxy` authenticates it (`auth`), rewrites its body from an
allow-list (`strictjson`, `bodies`), asks `grants` for the keyspace and relays the answer of the engine (`upstream`).
Policy takes another: `bundles` reads the bundle from the API server (`kubeapi`), `enforcement` puts a revision in
force, drains what it removed and has the adapter acknowledge it (`link`), and `control` tells the operator.
"""
