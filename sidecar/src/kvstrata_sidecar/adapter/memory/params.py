"""What the server module is started with: `config` of LMCache's `--server-module`. It holds no secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata_sidecar.adapter.params import EVICTIONS, AdapterParams

DEFAULT_HIGH_WATERMARK_PERCENT = 90


@dataclass(frozen=True, slots=True)
class MemoryParams:
    """The pod's part, the same as every adapter's, and the CPU tier.

    `tier` is the name of the CacheTier whose budgets hold for the server's memory, None for a model without a CPU
    tier. `high_watermark_percent` of the memory may be used; above it room is made. `eviction` is the order in which a
    scope's blocks go, `LRU` or `ARC`.
    """

    pod: AdapterParams
    tier: str | None
    high_watermark_percent: int = DEFAULT_HIGH_WATERMARK_PERCENT
    eviction: str = "LRU"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> MemoryParams:
        """Read the wire form. Raises ValueError for anything missing, unknown or out of bounds."""
        if "tier" not in raw:
            raise ValueError("MemoryParams: missing ['tier']; null is a model without a CPU tier")
        values = dict(raw)
        tier = values.pop("tier")
        eviction = values.pop("eviction", "LRU")
        percent = values.pop("high_watermark_percent", DEFAULT_HIGH_WATERMARK_PERCENT)
        if tier is not None and (not isinstance(tier, str) or not tier):
            raise ValueError(f"tier must be a CacheTier's name or null, not {tier!r}")
        if not isinstance(percent, int) or isinstance(percent, bool) or not 10 <= percent <= 100:
            raise ValueError(f"high_watermark_percent must be an integer from 10 to 100, not {percent!r}")
        if eviction not in EVICTIONS:
            raise ValueError(f"eviction must be LRU or ARC, not {eviction!r}")
        return cls(AdapterParams.from_json({**values, "tier": None}), tier, percent, eviction)
