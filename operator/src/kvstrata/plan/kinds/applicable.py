"""Which conditions an object has: a condition applies while there is something that it judges.

Planners judge all conditions of a kind; one that does not apply is left out of the status. `api/conditions.py` has the
same table in words, for the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.cachedmodel import CachedModel, ReuseMode
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.common import Budget
from kvstrata.api.conditions import ConditionType
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.tenantcachepolicy import DeletionPolicy, TenantCachePolicy
from kvstrata.api.tenantgroup import TenantGroup
from kvstrata.model.world import World
from kvstrata.plan.budgets.admission import waiting_for
from kvstrata.plan.budgets.capacity import guaranteed_bytes, serving_with
from kvstrata.plan.bundle.compile import selects
from kvstrata.plan.bundle.enforcement import holds
from kvstrata.plan.conditions import Finding
from kvstrata.plan.isolation import failure_stands
from kvstrata.plan.kinds.pool_publish import guarantees_of
from kvstrata.plan.redis.backend import in_force, is_external
from kvstrata.plan.rules import first
from kvstrata.plan.rules import tier as tier_chain
from kvstrata.plan.rules.policy import member_policies

Applies = Callable[[World, Any], bool]


def applicable(world: World, resource: Resource, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings whose conditions apply to `resource` now."""
    table = APPLIES[resource.INFO.kind]
    return tuple(one for one in findings if one.type not in table or table[one.type](world, resource))


def _serve(world: World, models: Iterable[str]) -> bool:
    return any(world.serving_pods(name) for name in models)


def _selected(world: World, policy: TenantCachePolicy) -> list[CachedModel]:
    return [model for model in world.models.values() if selects(policy, model)]


def _policy_acts(world: World, policy: TenantCachePolicy) -> bool:
    """Whether a pod has, or has to have, an entry of the policy; a wrong spec leaves the last valid one in force."""
    holding = (name for name, committed in world.bundles.items() if holds(committed.bundle, policy))
    return _serve(world, (*(model.name for model in _selected(world, policy)), *holding))


def _have_pods(world: World, budgets: Sequence[Budget], models: Iterable[CachedModel]) -> bool:
    """Whether a pod uses a tier for which `budgets` sets something."""
    concerned = list(models)
    bounded = (world.tiers.get(budget.tier) for budget in budgets if budget.is_bounded)
    return any(serving_with(world, tier, concerned) for tier in bounded if tier is not None)


def _pods_use(world: World, tier: CacheTier) -> bool:
    is_usable = in_force(tier) is not None and not first(tier_chain.RULES, world, tier)
    return is_usable and bool(serving_with(world, tier, world.models.values()))


def _is_redis_or_used(world: World, tier: CacheTier) -> bool:
    return tier.spec.medium is Medium.REDIS or _pods_use(world, tier)


def _is_spread(_: World, tier: CacheTier) -> bool:
    """Whether slots are, or were until now, spread over several primaries."""
    return tier.spec.has_several_primaries or (tier.status.shards or 0) > 1


def _is_replicated(_: World, tier: CacheTier) -> bool:
    return tier.spec.managed is not None and tier.spec.managed.effective_replicas_per_shard > 0


def _has_guarantees(world: World, tier: CacheTier) -> bool:
    if in_force(tier) is None or first(tier_chain.RULES, world, tier):
        return False
    return guaranteed_bytes(world, tier) > 0 or waiting_for(world, tier.name)[0] > 0


def _stores_at_rest(world: World, tier: CacheTier) -> bool:
    if tier.spec.medium not in (Medium.REDIS, Medium.NVME):
        return False
    return not tier.spec.encryption_required or _pods_use(world, tier)


def _pods_remove_in_time(world: World, tier: CacheTier) -> bool:
    """Redis expires blocks by itself, so there is nothing to judge."""
    return tier.spec.max_retention is not None and tier.spec.medium is not Medium.REDIS and _pods_use(world, tier)


def _is_probed(world: World, model: CachedModel) -> bool:
    probed = model.spec.is_probed and model.spec.reuse_mode is not ReuseMode.DISABLED
    return failure_stands(model) or (probed and _serve(world, [model.name]))


def _pool_has_pods(world: World, pool: PrefixPool) -> bool:
    return _serve(world, [pool.spec.model_ref.name])


def _models_of(world: World, pool: PrefixPool) -> list[CachedModel]:
    model = world.models.get(pool.spec.model_ref.name)
    return [model] if model is not None else []


def _group_acts(world: World, group: TenantGroup) -> bool:
    return bool(member_policies(world, group)) and _serve(world, world.models)


APPLIES: Mapping[str, Mapping[str, Applies]] = {
    "CacheDomain": {
        ConditionType.ENFORCED: lambda world, _: _serve(world, world.models),
        ConditionType.WITHIN_BUDGET: lambda world, domain: _have_pods(
            world, domain.spec.public_budgets, world.models.values()
        ),
    },
    "CacheTier": {
        ConditionType.BACKEND_REACHABLE: _is_redis_or_used,
        ConditionType.SERVERS_SUITABLE: lambda _, tier: is_external(tier),
        ConditionType.SLOTS_COVERED: _is_spread,
        ConditionType.REPLICATION_HEALTHY: _is_replicated,
        ConditionType.CAPACITY_COMMITTED: _has_guarantees,
        ConditionType.ENCRYPTED: _stores_at_rest,
        ConditionType.HAS_ROOM: _is_redis_or_used,
        ConditionType.EVICTS_WHEN_FULL: lambda world, tier: tier.spec.medium is Medium.REDIS and _pods_use(world, tier),
        ConditionType.RETENTION_KEPT: _pods_remove_in_time,
    },
    "CachedModel": {
        ConditionType.TIERS_BOUND: lambda _, model: bool(model.spec.tiers),
        ConditionType.TIERS_ORDERED: lambda _, model: len(model.spec.tiers) > 1,
        ConditionType.POLICY_ENFORCED: lambda world, model: _serve(world, [model.name]),
        ConditionType.ISOLATION_VERIFIED: _is_probed,
    },
    "TenantCachePolicy": {
        ConditionType.ENFORCED: _policy_acts,
        ConditionType.WITHIN_BUDGET: lambda world, policy: _have_pods(
            world, policy.spec.budgets, _selected(world, policy)
        ),
        ConditionType.POOLS_RESOLVED: lambda _, policy: bool(policy.spec.pool_names),
        ConditionType.ERASES_ON_DELETION: lambda _, policy: (
            policy.spec.effective_deletion_policy is DeletionPolicy.ERASE
        ),
    },
    "TenantGroup": {
        ConditionType.ENFORCED: _group_acts,
        ConditionType.WITHIN_BUDGET: lambda world, group: _have_pods(world, group.spec.budgets, world.models.values()),
    },
    "PrefixPool": {
        ConditionType.WARM: _pool_has_pods,
        ConditionType.PUBLISHED: _pool_has_pods,
        ConditionType.WITHIN_BUDGET: lambda world, pool: _have_pods(
            world, guarantees_of(pool), _models_of(world, pool)
        ),
    },
}
"""The conditions that do not always apply, by kind."""
