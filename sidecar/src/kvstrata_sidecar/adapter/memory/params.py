"""Parameters of the server module: `config` of LMCache's `--server-module`. It holds no secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata_sidecar.adapter.params import AdapterParams

DEFAULT_HIGH_WATERMARK_PERCENT = 90


@dataclass(frozen=True, slots=True)
class MemoryParams:
    """The pod's parameters, as for every adapter, and the CPU tier. `tier` is the CacheTier whose budgets apply to the
    server's memory, None without a CPU tier. Blocks are evicted above `high_watermark_percent` of the memory."""

    pod: AdapterParams
    tier: str | None
    high_watermark_percent: int = DEFAULT_HIGH_WATERMARK_PERCENT

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> MemoryParams:
        """Raises ValueError for anything missing, unknown or out of bounds."""
        if "tier" not in raw:
            raise ValueError("MemoryParams: missing ['tier']; null is a model without a CPU tier")
        values = dict(raw)
        tier = values.pop("tier")
        percent = values.pop("high_watermark_percent", DEFAULT_HIGH_WATERMARK_PERCENT)
        if tier is not None and (not isinstance(tier, str) or not tier):
            raise ValueError(f"tier must be a CacheTier's name or null, not {tier!r}")
        if not isinstance(percent, int) or isinstance(percent, bool) or not 10 <= percent <= 100:
            raise ValueError(f"high_watermark_percent must be an integer from 10 to 100, not {percent!r}")
        return cls(AdapterParams.from_json({**values, "tier": None}), tier, percent)
