"""Whether a model's tiers make a hierarchy: listed from fast to slow, and none smaller than a faster one. Pure.

A block goes to every tier at once, and is read from the first that has it. So a slower tier serves what a faster one
had to let go, which a smaller one has let go before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import ModelReason
from kvstrata.objects.quantities import readable
from kvstrata.plan.conditions import Finding, false, true

_MEMORY = (Medium.HBM, Medium.CPU)


def tiers_ordered(tiers: Sequence[CacheTier]) -> Finding:
    """Return condition TiersOrdered for `tiers` in the order of spec.tiers. It is a warning: pods work all the same."""
    kind = ConditionType.TIERS_ORDERED
    for faster, slower in combinations(tiers, 2):
        if slower.spec.medium in _MEMORY and _rank(slower) < _rank(faster):
            return false(
                kind,
                ModelReason.NOT_FAST_TO_SLOW,
                f"CacheTier {slower.name} ({slower.spec.medium}) is listed behind {faster.name}"
                f" ({faster.spec.medium}), and serves before it all the same: list it first",
            )
    for faster, slower in combinations(sorted(tiers, key=_rank), 2):
        larger, smaller = faster.spec.capacity_bytes, slower.spec.capacity_bytes
        if larger is not None and smaller is not None and _comparable(faster, slower) and smaller < larger:
            return false(
                kind,
                ModelReason.LOWER_TIER_SMALLER,
                f"CacheTier {slower.name} holds {readable(smaller)}{_where(slower)} and the faster {faster.name}"
                f" {readable(larger)}{_where(faster)}: it has mostly let go of what {faster.name} has no room for",
            )
    return true(
        kind, ModelReason.TIERS_ORDERED, "tiers are listed from fast to slow, and none is smaller than a faster"
    )


def _rank(tier: CacheTier) -> int:
    """Return in which order media serve; NVMe and Redis in the order of the spec."""
    return _MEMORY.index(tier.spec.medium) if tier.spec.medium in _MEMORY else len(_MEMORY)


def _comparable(faster: CacheTier, slower: CacheTier) -> bool:
    """Whether sizes tell who holds more.

    All pods share Redis, and what they hold for themselves overlaps: so it is certain only that it should hold what one
    pod does, and of files behind Redis nothing is.
    """
    return faster.spec.per_pod or not slower.spec.per_pod


def _where(tier: CacheTier) -> str:
    return " in each pod" if tier.spec.per_pod else ""
