"""What is promised of the memory of pods, their CPU tiers: whether it fits, and whether pods keep to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.common import TierBudget
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import PolicyReason, TierReason
from kvstrata.contract.ack import PodState
from kvstrata.contract.bundle import Bundle
from kvstrata.model.world import World
from kvstrata.objects.quantities import MIB, binary

from .chains.budgets import reservable_bytes
from .conditions import Finding, false, true, unknown


def guaranteed_bytes(world: World, tier: CacheTier) -> int:
    """Return how much of the tier is guaranteed in each pod: what the bundle says that promises most."""
    return max(
        (
            _promised_bytes(committed.bundle, tier.name)
            for name, committed in world.bundles.items()
            if name in world.models and tier.name in world.models[name].spec.tier_names
        ),
        default=0,
    )


def _promised_bytes(bundle: Bundle, tier: str) -> int:
    by_scope = {
        entry.keyspace: budget.guaranteed_bytes or 0
        for entry in bundle.entries.values()
        if not entry.suspended
        for budget in entry.budgets
        if budget.tier == tier
    }
    return sum(by_scope.values())


def capacity_committed(world: World, tier: CacheTier) -> Finding:
    """Return whether a pod's memory has room for all guarantees that it was told of.

    Nobody is refused for what others were promised, because who came first does not survive a restore or a new
    cluster; the cache servers cut all guarantees by the same share instead, and each policy says so.
    """
    room, promised = reservable_bytes(tier.spec) or 0, guaranteed_bytes(world, tier)
    if promised > room:
        return false(
            ConditionType.CAPACITY_COMMITTED,
            TierReason.GUARANTEES_EXCEED_CAPACITY,
            f"{_shown(promised)} are guaranteed and {_shown(room)} of each pod can be: every guarantee is cut by the "
            "same share; raise capacityPerPod or eviction.highWatermarkPercent, or lower guarantees",
        )
    return true(
        ConditionType.CAPACITY_COMMITTED,
        TierReason.GUARANTEES_FIT,
        f"all guarantees fit into the {_shown(room)} of each pod below its high watermark",
    )


def keeps_budgets(state: PodState | None, tier: str) -> bool:
    """Whether a pod says that its memory is under this tier's budgets; one without a cache server holds nothing."""
    return state is not None and (
        not state.cache_boot
        or any(told.name == tier and told.medium == Medium.CPU and told.breaker == "closed" for told in state.tiers)
    )


def within_budget(world: World, budgets: Sequence[TierBudget], models: Iterable[CachedModel], nothing: str) -> Finding:
    """Return the condition WithinBudget of whoever declares `budgets` for `models`; `nothing` says that there are none.

    It is True only if every serving pod says of itself that it enforces what is declared. What is declared for media
    without such a word is nobody's knowledge.
    """
    known = [(budget, world.tiers[budget.name]) for budget in budgets if budget.name in world.tiers]
    untold = sorted({budget.name for budget, tier in known if _untold(budget, tier.spec.medium)})
    if untold:
        return unknown(
            ConditionType.WITHIN_BUDGET,
            PolicyReason.BUDGETS_NOT_ENFORCED,
            f"budgets on CacheTier {', '.join(untold)} are declared; this version reports them for CPU tiers only",
        )
    in_memory = [(budget, tier) for budget, tier in known if tier.spec.medium is Medium.CPU and _bounds(budget)]
    if not in_memory:
        return true(ConditionType.WITHIN_BUDGET, PolicyReason.NO_BUDGET, nothing)
    concerned = list(models)
    silent: list[str] = []
    serving = 0
    for _, tier in in_memory:
        for model in concerned:
            if tier.name in model.spec.tier_names:
                pods = world.serving_pods(model.name)
                serving += len(pods)
                silent += [pod.name for pod in pods if not keeps_budgets(_said(world, pod.uid), tier.name)]
    if not serving:
        return unknown(
            ConditionType.WITHIN_BUDGET,
            PolicyReason.NO_LIVE_PODS,
            "no pod serves a model with these tiers, so nothing is stored there",
        )
    if silent:
        named = sorted(set(silent))
        return unknown(
            ConditionType.WITHIN_BUDGET,
            PolicyReason.MEMORY_NOT_GOVERNED,
            f"{len(named)} pods do not say that they keep their memory within budgets: {', '.join(named[:3])}",
        )
    cut = sorted(tier.name for budget, tier in in_memory if budget.guaranteed_bytes and _overcommitted(tier))
    if cut:
        return false(
            ConditionType.WITHIN_BUDGET,
            PolicyReason.GUARANTEES_EXCEED_CAPACITY,
            f"all guarantees on CacheTier {', '.join(cut)} together are more than it can keep: each is cut by the same "
            "share",
        )
    return true(
        ConditionType.WITHIN_BUDGET,
        PolicyReason.BUDGETS_ENFORCED,
        "every serving pod keeps its memory within the budgets that it acknowledged",
    )


def _untold(budget: TierBudget, medium: Medium) -> bool:
    amounts = budget.limit is not None or budget.guaranteed is not None
    if medium is Medium.REDIS:
        return amounts
    return medium is not Medium.CPU and _bounds(budget)


def _bounds(budget: TierBudget) -> bool:
    return budget.limit is not None or budget.guaranteed is not None or budget.retention is not None


def _shown(size_bytes: int) -> str:
    """Return a size for readers: whole mebibytes, where it has any."""
    return binary(size_bytes // MIB * MIB or size_bytes)


def _said(world: World, uid: str) -> PodState | None:
    verified = world.states.get(uid)
    return verified.state if verified is not None else None


def _overcommitted(tier: CacheTier) -> bool:
    told = tier.status.condition(ConditionType.CAPACITY_COMMITTED)
    return told is not None and told.reason == TierReason.GUARANTEES_EXCEED_CAPACITY
