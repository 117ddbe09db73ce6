"""vLLM's own prefix cache, in the engine's API server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


def reset_of(app: Any) -> Callable[[bool], Awaitable[Any]] | None:
    """Return the function that empties the engine's prefix cache, and with True recomputes running requests; None if
    this vLLM has none. It raises TypeError if its parameters are others."""
    reset = getattr(getattr(app.state, "engine_client", None), "reset_prefix_cache", None)
    return None if reset is None else lambda preempt: reset(reset_running_requests=preempt)
