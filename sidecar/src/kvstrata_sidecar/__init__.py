"""The data plane of kvstrata: the gate before the engine, and the policy adapter inside the cache server."""
