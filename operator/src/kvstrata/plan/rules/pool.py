"""Problems of a PrefixPool that schema and CEL cannot see."""

from __future__ import annotations

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.reasons import PoolReason, SharedReason
from kvstrata.contract.messages.prefix import refused_argument
from kvstrata.contract.policy.pools import MAX_POOLS
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision
from kvstrata.plan.rules import absent, absent_tier, age_of


def model_exists(world: World, pool: PrefixPool) -> Decision | None:
    name = pool.spec.model_ref.name
    if name in world.models:
        return None
    remedy = "create it, or another pool with the right spec.modelRef"
    return absent(world, SharedReason.MODEL_NOT_FOUND, f"CachedModel {name}", remedy)


def tiers_exist(world: World, pool: PrefixPool) -> Decision | None:
    return absent_tier(world, (tier.name for tier in pool.spec.tiers), "spec.tiers")


def tiers_are_the_models(world: World, pool: PrefixPool) -> Decision | None:
    model = world.models[pool.spec.model_ref.name]
    for tier in pool.spec.tiers:
        if tier.name not in model.tier_names:
            return Decision(
                PoolReason.TIER_NOT_IN_MODEL,
                f"CacheTier {tier.name} is not listed by CachedModel {model.name}: add it there or correct spec.tiers",
            )
    if not tiers_of(world, pool):
        return Decision(
            PoolReason.TIER_NOT_IN_MODEL,
            f"CachedModel {model.name} has no tier that could hold a pool: add one to its spec.tiers",
        )
    return None


def tiers_admit_pools(world: World, pool: PrefixPool) -> Decision | None:
    """Pools have no classification, so restricted tiers admit none."""
    for name in tiers_of(world, pool):
        if world.tiers[name].spec.allowed_classifications is not None:
            return Decision(
                PoolReason.TIER_NOT_ALLOWED,
                f"CacheTier {name} takes data of some classifications only, and pools have none: choose another tier "
                "in spec.tiers",
            )
    return None


def has_room_in_the_bundle(world: World, pool: PrefixPool) -> Decision | None:
    """A bundle has a maximum of pools; the oldest have priority."""
    model = world.models[pool.spec.model_ref.name]
    if any(one.uid == pool.uid for one in pools_of(world, model)):
        return None
    return Decision(
        PoolReason.TOO_MANY_POOLS,
        f"CachedModel {model.name} has {MAX_POOLS} pools that are older, and pods read no more: delete one, or put "
        "several prefixes into one pool",
    )


def template_arguments_can_be_sent(world: World, pool: PrefixPool) -> Decision | None:
    """A prefix that no caller can send has no reader."""
    for prefix in pool.spec.prefixes:
        refused = refused_argument(prefix.chat_template_kwargs or {})
        if refused is not None:
            return Decision(
                PoolReason.TEMPLATE_ARGUMENTS_REFUSED,
                f"prefix {prefix.name}: callers may not send {refused[:64]!r} in chat_template_kwargs, only simple "
                "values for names that the template itself defines",
            )
    return None


def tiers_of(world: World, pool: PrefixPool) -> tuple[str, ...]:
    """Return the tiers that hold the pool: those in its spec, else the slowest of its model."""
    if pool.spec.tiers:
        return tuple(tier.name for tier in pool.spec.tiers)
    model = world.models.get(pool.spec.model_ref.name)
    listed = model.tier_names if model is not None else ()
    return tuple([name for name in listed if name in world.tiers][-1:])


def is_usable(world: World, model: CachedModel, tier: str) -> bool:
    found = world.tiers.get(tier)
    return found is not None and tier in model.tier_names and found.spec.allowed_classifications is None


RULES = (
    model_exists,
    tiers_exist,
    tiers_are_the_models,
    tiers_admit_pools,
    template_arguments_can_be_sent,
    has_room_in_the_bundle,
)


def pools_of(world: World, model: CachedModel) -> tuple[PrefixPool, ...]:
    """Return the pools of a model that fit into its bundle, oldest first."""
    own = [p for p in world.pools.values() if p.spec.model_ref.name == model.name and not p.metadata.deleting]
    return tuple(sorted(own, key=age_of)[:MAX_POOLS])
