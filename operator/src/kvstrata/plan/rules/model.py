"""Problems of a CachedModel that schema and CEL cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import ModelReason, SharedReason
from kvstrata.model.world import World
from kvstrata.objects.quantities import readable
from kvstrata.plan.actions import Decision
from kvstrata.plan.conditions import Finding, false, true
from kvstrata.plan.rules import absent_tier


def tiers_exist(world: World, model: CachedModel) -> Decision | None:
    return absent_tier(world, model.tier_names, "spec.tiers")


def tiers_fit_a_pod(world: World, model: CachedModel) -> Decision | None:
    names = [name for name in model.tier_names if world.tiers[name].spec.medium is Medium.CPU]
    if len(names) <= 1:
        return None
    what = f"CacheTiers {' and '.join(names)} are all of medium CPU"
    return Decision(SharedReason.TIERS_CONFLICT, f"{what}, and a pod has one such tier: leave one in spec.tiers")


RULES = (tiers_exist, tiers_fit_a_pod)


def tiers_ordered(tiers: Sequence[CacheTier]) -> Finding | None:
    """Return the warning TiersOrdered for `tiers` in the order of spec.tiers; pods work regardless. Pods share Redis
    and their own tiers overlap, so Redis must only hold as much as one pod."""
    kind = ConditionType.TIERS_ORDERED
    if len(tiers) < 2:
        return None
    for faster, slower in combinations(tiers, 2):
        if _rank(slower) < _rank(faster):
            return false(
                kind,
                ModelReason.NOT_FAST_TO_SLOW,
                f"CacheTier {slower.name} ({slower.spec.medium}) is listed behind {faster.name}"
                f" ({faster.spec.medium}), but serves before it: list it first",
            )
    for faster, slower in combinations(sorted(tiers, key=_rank), 2):
        larger, smaller = faster.spec.capacity_bytes, slower.spec.capacity_bytes
        if smaller < larger:
            return false(
                kind,
                ModelReason.LOWER_TIER_SMALLER,
                f"CacheTier {slower.name} holds {readable(smaller)}{_where(slower)} and the faster {faster.name}"
                f" {readable(larger)}{_where(faster)}: it has mostly evicted the blocks that {faster.name} has no "
                f"room for",
            )
    ordered = "tiers are listed from fast to slow, and none is smaller than a faster"
    return true(kind, ModelReason.TIERS_ORDERED, ordered)


def _rank(tier: CacheTier) -> int:
    """Return the serving order of media. Tiers of one medium serve in the order of the spec."""
    return [Medium.CPU, Medium.NVME, Medium.REDIS].index(tier.spec.medium)


def _where(tier: CacheTier) -> str:
    return " in each pod" if tier.spec.per_pod else ""
