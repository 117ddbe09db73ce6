"""Guarantees on tiers with budgets: whether they fit, and whether pods enforce them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier, CacheTierStatus, Medium
from kvstrata.api.common import Budget, Classification
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import SharedReason, TierReason
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.policy.bundle import Bundle
from kvstrata.model.pods import Pod
from kvstrata.model.world import World
from kvstrata.objects.quantities import readable
from kvstrata.objects.sizing import stored_bytes
from kvstrata.plan.actions import Decision
from kvstrata.plan.budgets.admission import waiting_for
from kvstrata.plan.budgets.usage import above_limit, highest
from kvstrata.plan.conditions import Finding, false, true, unknown


def guaranteed_bytes(world: World, tier: CacheTier) -> int:
    """Return the guaranteed bytes of a tier in committed bundles: the maximum of one pod, or the sum for Redis."""
    using = {
        name: committed
        for name, committed in world.bundles.items()
        if name in world.models and tier.name in world.models[name].tier_names
    }
    versions = tuple((name, committed.resource_version) for name, committed in sorted(using.items()))

    def add_up() -> int:
        promised = [_promised(committed.bundle, tier.name) for committed in using.values()]
        if tier.spec.per_pod:
            return max((sum(by_scope.values()) for by_scope in promised), default=0)
        # Models share the tier, and tenants' scopes are the same in each.
        return sum(highest(promised).values())

    return world.memo.get(guaranteed_bytes, tier.name, (tier.spec.per_pod, versions), add_up)


def _promised(bundle: Bundle, tier: str) -> Mapping[str, int]:
    versions = (version for shard in bundle.pools.values() for version in shard.versions)
    scopes = chain(
        ((entry.keyspace, entry.budgets) for entry in bundle.entries.values() if not entry.suspended),
        ((version.keyspace, version.budgets) for version in versions),
    )
    return {
        keyspace: budget.guaranteed_bytes or 0
        for keyspace, budgets in scopes
        for budget in budgets
        if budget.tier == tier
    }


def capacity_committed(world: World, tier: CacheTier) -> Finding | None:
    """Return whether a tier has room for all guarantees, committed and waiting. Committed ones exceed it only briefly,
    after its capacity was lowered."""
    kind = ConditionType.CAPACITY_COMMITTED
    room, promised = stored_bytes(tier.spec), guaranteed_bytes(world, tier)
    count, size = waiting_for(world, tier.name)
    if not (promised or count):
        return None
    per_place, remedy = ("of each pod", "capacityPerPod") if tier.spec.per_pod else ("of it", "capacity")
    if promised > room:
        return false(
            kind,
            SharedReason.GUARANTEES_EXCEED_CAPACITY,
            f"pods enforce {readable(promised)} of guarantees, and {readable(room)} {per_place} can be guaranteed; the "
            f"eldest keep theirs as far as they fit; until pods acknowledge, {_consequence(tier)}",
        )
    if count:
        return false(
            kind,
            TierReason.GUARANTEES_WAITING,
            f"{count} {'object waits' if count == 1 else 'objects wait'} for {readable(size)} more of guarantees than "
            f"fit into the {readable(room)} {per_place} that blocks may take, see their condition Admitted; admitted "
            f"guarantees fit: raise {remedy} or eviction.highWatermarkPercent, or lower guarantees",
        )
    message = f"all guarantees fit into the {readable(room)} {per_place} that blocks may take"
    return true(kind, TierReason.GUARANTEES_FIT, message)


def keeps_budgets(state: PodState | None, tier: CacheTier) -> bool:
    """Whether a pod reports that it enforces this tier's budgets; one without a cache server stores nothing. For NVMe
    and Redis a reported capacity counts: an adapter of the previous version reports none."""
    if state is None or not state.cache_boot:
        return state is not None
    reported = next((one for one in state.tiers if one.name == tier.name and one.medium == tier.spec.medium), None)
    if reported is None:
        return False
    return reported.breaker == "closed" if tier.spec.medium is Medium.CPU else reported.capacity_bytes > 0


def serving_with(world: World, tier: CacheTier, models: Iterable[CachedModel]) -> list[Pod]:
    return [pod for model in models if tier.name in model.tier_names for pod in world.serving_pods(model.name)]


def silent_pods(world: World, tier: CacheTier, models: Iterable[CachedModel]) -> list[Pod]:
    answers = ((pod, world.states.get(pod.uid)) for pod in serving_with(world, tier, models))
    return [pod for pod, found in answers if not keeps_budgets(found.state if found is not None else None, tier)]


_KEEPING = {
    Medium.CPU: (SharedReason.MEMORY_NOT_GOVERNED, "keep their memory within budgets"),
    Medium.NVME: (SharedReason.BUDGETS_NOT_ENFORCED, "keep their files within budgets"),
    Medium.REDIS: (SharedReason.BUDGETS_NOT_ENFORCED, "divide the capacity of Redis tiers"),
}
"""By medium: the reason while pods do not report that they enforce budgets, and the missing report."""


def within_budget(
    world: World,
    budgets: Sequence[Budget],
    models: Iterable[CachedModel],
    wrong: Decision | None = None,
    levels: Sequence[Classification] = (),
    keyspace: str | None = None,
) -> Finding | None:
    """Return the condition WithinBudget of an object that declares `budgets`; None unless a pod of `models` uses a tier
    with one.

    `wrong` is the error of its spec. `levels` are the classifications in a shared scope, empty for budgets that
    are not shared. `keyspace` is the scope's, None while it has none. It is True only if every serving pod reports
    enforcement and none reports more bytes than a limit allows.
    """
    kind, concerned = ConditionType.WITHIN_BUDGET, list(models)
    known = [
        (budget, world.tiers[budget.tier]) for budget in budgets if budget.tier in world.tiers and budget.is_bounded
    ]
    if not any(serving_with(world, tier, concerned) for _, tier in known):
        return None
    if wrong:
        return false(kind, *wrong)
    closed = [tier.name for _, tier in known if not all(map(tier.spec.admits, levels))]
    if closed:
        message = (
            f"the budget on CacheTier {', '.join(closed)} is not used: the classification keeps data off it, see "
            "condition TiersAdmitted"
        )
        return false(kind, SharedReason.CLASSIFICATION_NOT_ALLOWED, message)
    exceeded = above_limit(world, keyspace, (budget for budget, _ in known), [model.name for model in concerned])
    if exceeded:
        name, used_bytes, limit_bytes = exceeded[0]
        where = " in one pod" if world.tiers[name].spec.per_pod else ""
        others = f", and {len(exceeded) - 1} more tiers" if len(exceeded) > 1 else ""
        message = (
            f"CacheTier {name}: {readable(used_bytes)} used{where}, limit "
            f"{readable(limit_bytes)}{others}; pods evict the rest as soon as no request reads it"
        )
        return false(kind, SharedReason.USED_ABOVE_LIMIT, message)
    for medium, (reason, what) in _KEEPING.items():
        tiers = (tier for _, tier in known if tier.spec.medium is medium)
        silent = {pod.name for tier in tiers for pod in silent_pods(world, tier, concerned)}
        if silent:
            return unknown(kind, reason, not_reporting(silent, what))
    cut = {tier.name: tier for budget, tier in known if budget.guaranteed_bytes and overcommitted(tier.status)}
    if cut:
        names = sorted(cut)
        message = f"all guarantees on CacheTier {', '.join(names)} together are more than it can keep"
        return false(kind, SharedReason.GUARANTEES_EXCEED_CAPACITY, f"{message}: {_consequence(cut[names[0]])}")
    return true(kind, SharedReason.BUDGETS_ENFORCED, "every serving pod keeps within the budgets that it acknowledged")


def not_reporting(pods: set[str], what: str) -> str:
    return f"{len(pods)} pods do not report that they {what}: {', '.join(sorted(pods)[:3])}"


def _consequence(tier: CacheTier) -> str:
    if tier.spec.per_pod:
        return "every guarantee is cut by the same share"
    return "the server refuses blocks for want of memory, also some that are guaranteed"


def overcommitted(status: CacheTierStatus) -> bool:
    """Whether a tier's status reports that pods hold more guarantees than fit."""
    reported = status.condition(ConditionType.CAPACITY_COMMITTED)
    return reported is not None and reported.reason == SharedReason.GUARANTEES_EXCEED_CAPACITY
