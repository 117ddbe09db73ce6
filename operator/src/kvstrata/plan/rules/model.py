"""Problems of a CachedModel that schema and CEL cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import ModelReason
from kvstrata.model.world import World
from kvstrata.objects.quantities import readable
from kvstrata.plan.actions import Decision
from kvstrata.plan.conditions import Finding, false, true


def tiers_exist(world: World, model: CachedModel) -> Decision | None:
    missing = [name for name in model.spec.tier_names if name not in world.tiers]
    if not missing:
        return None
    known = ", ".join(sorted(world.tiers)) or "none"
    return Decision(
        ModelReason.TIER_NOT_FOUND,
        f"CacheTier {missing[0]} does not exist in namespace {world.namespace} (there: {known}): create it or correct "
        "spec.tiers",
    )


def tiers_fit_a_pod(world: World, model: CachedModel) -> Decision | None:
    names = [name for name in model.spec.tier_names if world.tiers[name].spec.medium is Medium.CPU]
    if len(names) <= 1:
        return None
    return Decision(
        ModelReason.TIERS_CONFLICT,
        f"CacheTiers {' and '.join(names)} are all of medium CPU, and a pod has one such tier: leave one in spec.tiers",
    )


def warms_memory_up_from_tiers(world: World, model: CachedModel) -> Decision | None:
    """Warmup needs a memory tier and a source tier."""
    media = {world.tiers[name].spec.medium for name in model.spec.tier_names}
    if model.spec.cache_server.warmup is None or (Medium.CPU in media and media & {Medium.NVME, Medium.REDIS}):
        return None
    return Decision(
        ModelReason.WARMUP_NEEDS_TIERS,
        "cacheServer.warmup loads a CPU tier from an NVMe or Redis tier: list one of each in spec.tiers, or remove it",
    )


RULES = (
    tiers_exist,
    tiers_fit_a_pod,
    warms_memory_up_from_tiers,
)


def tiers_ordered(tiers: Sequence[CacheTier]) -> Finding:
    """Return the warning TiersOrdered for `tiers` in the order of spec.tiers; pods work regardless."""
    kind = ConditionType.TIERS_ORDERED
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
        if _comparable(faster, slower) and smaller < larger:
            return false(
                kind,
                ModelReason.LOWER_TIER_SMALLER,
                f"CacheTier {slower.name} holds {readable(smaller)}{_where(slower)} and the faster {faster.name}"
                f" {readable(larger)}{_where(faster)}: it has mostly evicted the blocks that {faster.name} has no "
                f"room for",
            )
    return true(
        kind, ModelReason.TIERS_ORDERED, "tiers are listed from fast to slow, and none is smaller than a faster"
    )


def _rank(tier: CacheTier) -> int:
    """Return the serving order of media: CPU, then NVMe and Redis in the order of the spec."""
    return 0 if tier.spec.medium is Medium.CPU else 1


def _comparable(faster: CacheTier, slower: CacheTier) -> bool:
    """Whether sizes show which tier holds more. Pods share Redis and their own tiers overlap, so Redis must only hold
    as much as one pod; file tiers behind Redis are not comparable."""
    return faster.spec.per_pod or not slower.spec.per_pod


def _where(tier: CacheTier) -> str:
    return " in each pod" if tier.spec.per_pod else ""
