"""Which plan belongs to which kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects.context import BuildContext
from kvstrata.plan.actions import Plan
from kvstrata.plan.bundle.commit import plan_bundle
from kvstrata.plan.kinds.domain import plan_domain
from kvstrata.plan.kinds.group import plan_group
from kvstrata.plan.kinds.invalidation import plan_invalidation
from kvstrata.plan.kinds.model import plan_model
from kvstrata.plan.kinds.policy import plan_policy
from kvstrata.plan.kinds.pool import plan_pool
from kvstrata.plan.kinds.tier import plan_tier
from kvstrata.plan.kinds.unreadable import plan_unreadable

Planner = Callable[[World, BuildContext, str, datetime], Plan]

PLANNERS: Mapping[str, Planner] = {
    "CacheDomain": lambda world, _ctx, _name, now: plan_domain(world, now),
    "CacheTier": plan_tier,
    "CachedModel": plan_model,
    "TenantCachePolicy": lambda world, _ctx, name, now: plan_policy(world, name, now),
    "TenantGroup": lambda world, _ctx, name, now: plan_group(world, name, now),
    "PrefixPool": lambda world, _ctx, name, now: plan_pool(world, name, now),
    "CacheInvalidation": lambda world, _ctx, name, now: plan_invalidation(world, name, now),
    BUNDLE: lambda world, _ctx, name, _now: plan_bundle(world, name),
}


def plan(world: World, ctx: BuildContext, key: Key, now: datetime) -> Plan:
    """Return the plan for `key`. Pure: the same world and time give the same plan."""
    if key in world.unreadable:
        return plan_unreadable(world, key, now)
    return PLANNERS[key.kind](world, ctx, key.name, now)
