"""Guarantees on tiers with budgets: whether they fit, and whether pods enforce them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier, CacheTierStatus, Medium
from kvstrata.api.common import Budget, Classification
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import PolicyReason, TierReason
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.policy.bundle import Bundle
from kvstrata.model.pods import Pod
from kvstrata.model.world import World
from kvstrata.objects.quantities import readable
from kvstrata.objects.sizing import stored_bytes
from kvstrata.plan.actions import Decision
from kvstrata.plan.budgets.admission import waiting_for
from kvstrata.plan.conditions import Finding, false, true, unknown


def guaranteed_bytes(world: World, tier: CacheTier) -> int:
    """Return the guaranteed bytes of a tier in committed bundles: the maximum of one pod, or the sum for Redis."""
    using = {
        name: committed
        for name, committed in world.bundles.items()
        if name in world.models and tier.name in world.models[name].spec.tier_names
    }
    versions = tuple((name, committed.resource_version) for name, committed in sorted(using.items()))

    def add_up() -> int:
        promised = [_promised(committed.bundle, tier.name) for committed in using.values()]
        if tier.spec.per_pod:
            return max((sum(by_scope.values()) for by_scope in promised), default=0)
        # Models share the tier, and tenants' scopes are the same in each.
        together: dict[str, int] = {}
        for by_scope in promised:
            for keyspace, amount in by_scope.items():
                together[keyspace] = max(amount, together.get(keyspace, 0))
        return sum(together.values())

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


def capacity_committed(world: World, tier: CacheTier) -> Finding:
    """Return whether a tier has room for all guarantees, committed and waiting. Committed ones exceed it only briefly,
    after its capacity was lowered."""
    kind = ConditionType.CAPACITY_COMMITTED
    room, promised = stored_bytes(tier.spec), guaranteed_bytes(world, tier)
    per_place, remedy = ("of each pod", "capacityPerPod") if tier.spec.per_pod else ("of it", "capacity")
    if promised > room:
        return false(
            kind,
            TierReason.GUARANTEES_EXCEED_CAPACITY,
            f"pods enforce {readable(promised)} of guarantees, and {readable(room)} {per_place} can be guaranteed; the "
            f"eldest keep theirs as far as they fit; until pods acknowledge, {_consequence(tier)}",
        )
    count, size = waiting_for(world, tier.name)
    if count:
        return false(
            kind,
            TierReason.GUARANTEES_WAITING,
            f"{count} {'object waits' if count == 1 else 'objects wait'} for {readable(size)} more of guarantees than "
            f"fit into the {readable(room)} {per_place} that blocks may take, see their condition Admitted; admitted "
            f"guarantees fit: raise {remedy} or eviction.highWatermarkPercent, or lower guarantees",
        )
    return true(
        kind,
        TierReason.GUARANTEES_FIT,
        f"all guarantees fit into the {readable(room)} {per_place} that blocks may take",
    )


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
    return [pod for model in models if tier.name in model.spec.tier_names for pod in world.serving_pods(model.name)]


def silent_pods(world: World, tier: CacheTier, models: Iterable[CachedModel]) -> list[Pod]:
    return [pod for pod in serving_with(world, tier, models) if not keeps_budgets(_answer_of(world, pod.uid), tier)]


def within_budget(
    world: World,
    budgets: Sequence[Budget],
    models: Iterable[CachedModel],
    wrong: Decision | None = None,
    levels: Sequence[Classification] = (),
) -> Finding:
    """Return the condition WithinBudget of an object that declares `budgets` on tiers that pods use.

    `wrong` is the error of its spec. `levels` are the classifications in a shared scope, empty for budgets that
    are not shared. It is True only if every serving pod reports enforcement.
    """
    kind = ConditionType.WITHIN_BUDGET
    if wrong:
        return false(kind, wrong.reason, wrong.message)
    known = [
        (budget, world.tiers[budget.tier]) for budget in budgets if budget.tier in world.tiers and budget.is_bounded
    ]
    closed = [tier.name for _, tier in known if not all(map(tier.spec.admits, levels))]
    if closed:
        return false(
            kind,
            PolicyReason.CLASSIFICATION_NOT_ALLOWED,
            f"the budget on CacheTier {', '.join(closed)} is not used: the classification keeps data off it, see "
            "condition TiersAdmitted",
        )
    concerned = list(models)
    silent: dict[Medium, set[str]] = {medium: set() for medium in Medium}
    for _, tier in known:
        silent[tier.spec.medium] |= {pod.name for pod in silent_pods(world, tier, concerned)}
    if silent[Medium.CPU]:
        return unknown(
            kind,
            PolicyReason.MEMORY_NOT_GOVERNED,
            not_reporting(silent[Medium.CPU], "keep their memory within budgets"),
        )
    if silent[Medium.NVME]:
        return unknown(
            kind,
            PolicyReason.BUDGETS_NOT_ENFORCED,
            not_reporting(silent[Medium.NVME], "keep their files within budgets"),
        )
    if silent[Medium.REDIS]:
        return unknown(
            kind,
            PolicyReason.BUDGETS_NOT_ENFORCED,
            not_reporting(silent[Medium.REDIS], "divide the capacity of Redis tiers"),
        )
    cut = sorted(
        {tier.name: tier for budget, tier in known if budget.guaranteed_bytes and overcommitted(tier.status)}.items()
    )
    if cut:
        return false(
            kind,
            PolicyReason.GUARANTEES_EXCEED_CAPACITY,
            f"all guarantees on CacheTier {', '.join(name for name, _ in cut)} together are more than it can keep: "
            f"{_consequence(cut[0][1])}",
        )
    return true(kind, PolicyReason.BUDGETS_ENFORCED, "every serving pod keeps within the budgets that it acknowledged")


def not_reporting(pods: set[str], what: str) -> str:
    return f"{len(pods)} pods do not report that they {what}: {', '.join(sorted(pods)[:3])}"


def _consequence(tier: CacheTier) -> str:
    if tier.spec.per_pod:
        return "every guarantee is cut by the same share"
    return "the server refuses blocks for want of memory, also some that are guaranteed"


def _answer_of(world: World, uid: str) -> PodState | None:
    verified = world.states.get(uid)
    return verified.state if verified is not None else None


def overcommitted(status: CacheTierStatus) -> bool:
    """Whether a tier's status reports that pods hold more guarantees than fit."""
    reported = status.condition(ConditionType.CAPACITY_COMMITTED)
    return reported is not None and reported.reason == TierReason.GUARANTEES_EXCEED_CAPACITY
