"""Metrics pages of engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping

COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"
"""Prompt tokens that the engine itself computed, over all requests that have ended."""


def samples(page: str) -> dict[str, float]:
    """Return the sum of each metric over its labels."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return how much each metric grew."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def computed_tokens(grown: Mapping[str, float]) -> int:
    """Return how many prompt tokens an engine computed meanwhile."""
    return int(grown.get(COMPUTED, 0))
