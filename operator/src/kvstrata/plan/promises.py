"""What a tier promises of the blocks that it holds, and what of that is so: its conditions besides being reachable."""

from __future__ import annotations

from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.model.facts import Pod
from kvstrata.model.world import World

from .conditions import Finding, false, true, unknown
from .memory import capacity_committed
from .types import Decision


def promises(world: World, tier: CacheTier, stalled: Decision | None = None) -> tuple[Finding, ...]:
    """Return the conditions of a tier that tell what holds of its blocks; no pod uses a stalled one."""
    return (_encrypted(world, tier, stalled), _committed(world, tier, stalled), *_eviction(tier), *_retention(tier))


def _encrypted(world: World, tier: CacheTier, stalled: Decision | None) -> Finding:
    """Return whether what is stored is ciphertext, by the word of every serving pod of the models that list the tier.

    A pod that requires it stores nothing else, so its word counts at whichever revision it is. One that says nothing
    of it may run an adapter of the version before.
    """
    kind = ConditionType.ENCRYPTED
    if tier.spec.medium not in (Medium.REDIS, Medium.NVME):
        return false(kind, TierReason.NOT_AT_REST, "memory of a pod is not encrypted")
    if not tier.spec.encryption_required:
        return false(kind, TierReason.ENCRYPTION_DISABLED, "spec.encryption is Disabled")
    if stalled:
        return unknown(kind, stalled.reason, "no pod uses the tier while it is stalled")
    pods = _serving(world, tier)
    if not pods:
        return unknown(kind, TierReason.NO_LIVE_PODS, "no pod serves a model with this tier, so nobody stores on it")
    lacking = sorted(pod.name for pod in pods if not _has_keys(world, pod, tier.name))
    if lacking:
        return false(
            kind,
            TierReason.AWAITING_KEYS,
            f"{len(lacking)} of {len(pods)} pods have not said that they encrypt and have a key for each keyspace of "
            f"their policy, without which they use the tier for none: {', '.join(lacking[:3])}",
        )
    return true(kind, TierReason.KEYS_HELD, f"{len(pods)} pods encrypt all that they store")


def _serving(world: World, tier: CacheTier) -> list[Pod]:
    return [
        pod
        for model in world.models.values()
        if tier.name in model.spec.tier_names
        for pod in world.serving_pods(model.name)
    ]


def _has_keys(world: World, pod: Pod, tier: str) -> bool:
    told = world.states.get(pod.uid)
    return (
        told is not None
        and told.state.acked > 0
        and any(one.name == tier and one.encrypted and one.keyless == 0 for one in told.state.tiers)
    )


def _committed(world: World, tier: CacheTier, stalled: Decision | None) -> Finding:
    if tier.spec.medium is Medium.CPU and not stalled:
        return capacity_committed(world, tier)
    return unknown(
        ConditionType.CAPACITY_COMMITTED,
        TierReason.BUDGETS_NOT_ENFORCED,
        "this version tells so of CPU tiers that are in use only",
    )


def _eviction(tier: CacheTier) -> tuple[Finding, ...]:
    """Return whether a full Redis tier makes room; in pods the cache server evicts."""
    redis = tier.spec.redis
    if tier.spec.medium is not Medium.REDIS or redis is None:
        return ()
    if redis.managed is not None:
        return (
            false(
                ConditionType.EVICTS_WHEN_FULL,
                TierReason.EVICTION_NOT_RECONCILED,
                "a full tier refuses new blocks until old ones expire: this version does not evict from Redis",
            ),
        )
    return (
        unknown(
            ConditionType.EVICTS_WHEN_FULL,
            TierReason.EVICTION_NOT_RECONCILED,
            "what a full server does is up to its own maxmemory-policy: this version does not evict from Redis",
        ),
    )


def _retention(tier: CacheTier) -> tuple[Finding, ...]:
    if tier.spec.max_retention is None:
        return ()
    if tier.spec.medium is Medium.REDIS:
        sentence = f"each block expires {tier.spec.max_retention} after it was stored, or sooner"
        return (true(ConditionType.RETENTION_KEPT, TierReason.EXPIRES_BY_ITSELF, sentence),)
    return (
        false(
            ConditionType.RETENTION_KEPT,
            TierReason.RETENTION_NOT_RECONCILED,
            "spec.maxRetention is kept in pods for the tenants only whose policies name this tier: other blocks stay "
            "until they are evicted or their pod ends"
            if tier.spec.medium is Medium.CPU
            else "spec.maxRetention is not kept on this medium by this version: blocks stay until they are evicted or "
            "their pod ends",
        ),
    )
