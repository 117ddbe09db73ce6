"""The gate: the only way to an engine; it maps callers to keyspaces.

Requests: `http.server` reads a whole request, `proxy.service` authenticates it (`policy.api_keys`), rewrites its body
from an allow-list (`proxy.strict_json`, `proxy.bodies`), gets the keyspace from `policy.grants` and relays the engine's
answer (`http.engine_client`). Policy: `policy.bundle_watch` reads the bundle from the API server (`policy.kube_api`),
`policy.enforcement` puts a revision in force, drains removed keyspaces and has the adapter acknowledge it
(`adapter_link`), and `control` reports to the operator.
"""
