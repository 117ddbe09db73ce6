"""`gate`: cost of the gate beside Envoy with a key check and a Lua rewrite, and beside LiteLLM's proxy."""

from bench.gate.compare import measure

__all__ = ["measure"]
