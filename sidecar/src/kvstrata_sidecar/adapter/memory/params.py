"""Parameters of the server module: `config` of LMCache's `--server-module`. It holds no secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata_sidecar.adapter.params import AdapterParams

DEFAULT_HIGH_WATERMARK_PERCENT = 90


@dataclass(frozen=True, slots=True)
class Warmup:
    """Bytes loaded into a starting server's memory, and the time for it from the engine's registration."""

    bytes: int
    timeout_s: int

    @classmethod
    def from_json(cls, raw: object) -> Warmup:
        """Raises ValueError for anything but two positive integers."""
        if not isinstance(raw, dict) or raw.keys() != {"bytes", "timeout_s"}:
            raise ValueError(f"warmup must have bytes and timeout_s, and not be {raw!r}")
        if any(type(value) is not int or value < 1 for value in raw.values()):
            raise ValueError(f"warmup must be two positive integers, not {raw!r}")
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class MemoryParams:
    """The pod's parameters, as for every adapter, and the CPU tier. `tier` is the CacheTier whose budgets apply to the
    server's memory, None without a CPU tier. Blocks are evicted above `high_watermark_percent` of the memory. `warmup`
    requires a CPU tier."""

    pod: AdapterParams
    tier: str | None
    high_watermark_percent: int = DEFAULT_HIGH_WATERMARK_PERCENT
    warmup: Warmup | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> MemoryParams:
        """Raises ValueError for anything missing, unknown or out of bounds."""
        if "tier" not in raw:
            raise ValueError("MemoryParams: missing ['tier']; null is a model without a CPU tier")
        values = dict(raw)
        tier = values.pop("tier")
        warmup = values.pop("warmup", None)
        percent = values.pop("high_watermark_percent", DEFAULT_HIGH_WATERMARK_PERCENT)
        if tier is not None and (not isinstance(tier, str) or not tier):
            raise ValueError(f"tier must be a CacheTier's name or null, not {tier!r}")
        if not isinstance(percent, int) or isinstance(percent, bool) or not 10 <= percent <= 100:
            raise ValueError(f"high_watermark_percent must be an integer from 10 to 100, not {percent!r}")
        if warmup is not None and tier is None:
            raise ValueError("warmup needs a CPU tier: without one nothing stays in memory")
        parsed = None if warmup is None else Warmup.from_json(warmup)
        return cls(AdapterParams.from_json({**values, "tier": None}), tier, percent, parsed)
