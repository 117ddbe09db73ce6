"""Pools in a model's bundle: their versions, and slots to empty.

A version is included once its manifest is known, so that it can be warmed, and has readers once it is published in
status. Both are written into status first, and a bundle can be compiled again from status and shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import Medium
from kvstrata.api.prefixpool import PoolContent, PrefixPool
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.policy.pools import MAX_BEFORE_READY_S, MAX_POOLS, PoolRef, PoolShard, PoolState, PoolVersion
from kvstrata.contract.policy.shard_slots import SLOTS
from kvstrata.model.erasure.evidence import keys_kept, unreachable_at
from kvstrata.model.pods import CommittedBundle
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.actions import EmptySecrets, key_of
from kvstrata.plan.budgets.admission import held_bytes
from kvstrata.plan.keys.data_keys import keys_of, seals
from kvstrata.plan.pools.rendering import rendered_manifest
from kvstrata.plan.rules import first
from kvstrata.plan.rules import pool as chain
from kvstrata.plan.rules.pool import pools_of
from kvstrata.plan.scopes import held, keyspace_of, pool_scope

POOL_RETENTION_S = 7 * 86_400
"""Maximum lifetime of a pool's blocks: those of a deleted pool must expire everywhere."""


def contents(pool: PrefixPool) -> tuple[PoolContent, ...]:
    """Return the parts of a pool's status with content, the one that readers ask first in front."""
    found: list[PoolContent] = [pool.status] if pool.status.scope is not None else []
    if pool.status.next is not None:
        found.insert(0 if pool.status.next.published else len(found), pool.status.next)
    return tuple(found)


def newest_of(pool: PrefixPool) -> PoolContent:
    """Return the part of a pool's status with the content that is rendered and warmed."""
    return pool.status.next or pool.status


def desired_pools(world: World, model: CachedModel, known: Mapping[str, PoolShard]) -> dict[str, PoolShard]:
    """Return the desired pools of a bundle by name; an unchanged one is the same object. A version with a lost manifest
    is left out until it is rendered again."""
    shards: dict[str, PoolShard] = {}
    for pool in pools_of(world, model):
        before, shares = known.get(pool.name), _guaranteed(world, pool)
        former = before.versions if before is not None else ()
        slots = enumerate(contents(pool))
        made = [_version(world, model, pool, slot, former, shares.get(at, {})) for at, slot in slots]
        versions = tuple(version for version in made if version is not None)
        if versions:
            shard = PoolShard(pool.name, pool.uid, versions)
            shards[pool.name] = before if before is not None and before == shard else shard
    return shards


def committed_version(
    world: World, model: CachedModel, pool: PrefixPool, slot: PoolContent
) -> tuple[PoolRef, PoolVersion] | None:
    committed = world.bundles.get(model.name)
    if committed is None or pool.name not in committed.pool_indexes:
        return None
    shard, index = committed.bundle.pools.get(pool.name), committed.pool_indexes[pool.name]
    ref = next((one for one in committed.bundle.root.pools if one.index == index and one.digest), None)
    keyspace = keyspace_of_slot(world, pool, slot)
    versions = shard.versions if shard is not None and shard.uid == pool.uid else ()
    version = next((one for one in versions if one.keyspace == keyspace), None)
    return (ref, version) if ref is not None and version is not None else None


def has_replaced_versions(world: World, model: CachedModel, pool: PrefixPool) -> bool:
    """Return whether the committed bundle still has a version of the pool that its status no longer has."""
    committed = world.bundles.get(model.name)
    shard = committed.bundle.pools.get(pool.name) if committed is not None else None
    present = {keyspace_of_slot(world, pool, slot) for slot in contents(pool)}
    return shard is not None and any(version.keyspace not in present for version in shard.versions)


def keyspace_of_slot(world: World, pool: PrefixPool, slot: PoolContent) -> str | None:
    return keyspace_of(world.domain_key, held(slot.scope, pool_scope(pool.name)))


def _version(
    world: World,
    model: CachedModel,
    pool: PrefixPool,
    slot: PoolContent,
    former: tuple[PoolVersion, ...],
    guaranteed: Mapping[str, int],
) -> PoolVersion | None:
    epoch, digest = held(slot.scope, pool_scope(pool.name)), slot.manifest_digest
    keyspace = keyspace_of(world.domain_key, epoch)
    if epoch is None or keyspace is None or digest is None:
        return None
    known = next((one.hashes for one in former if one.manifest == digest), None)
    hashes = known or rendered_manifest(world, pool, digest)
    if hashes is None:
        return None
    tiers = _tiers(world, model, pool, next((one.tiers for one in former if one.keyspace == keyspace), ()))
    return PoolVersion(
        keyspace=keyspace,
        render_id=slot.render_id or "",
        state=PoolState.PUBLISHED if slot.published else PoolState.WARMING,
        hashes=hashes,
        tiers=tiers,
        budgets=_budgets(world, model, tiers, guaranteed),
        keys=keys_of(world, epoch) if seals(world, model) else (),
        before_ready_s=_before_ready_s(world, pool, tiers),
    )


def _tiers(world: World, model: CachedModel, pool: PrefixPool, former: tuple[str, ...]) -> tuple[str, ...]:
    """Return a version's tiers: while the spec is wrong the former ones, as far as still usable."""
    if first(chain.RULES, world, pool) is None:
        return chain.tiers_of(world, pool)
    return tuple(name for name in former if chain.is_usable(world, model, name))


def _guaranteed(world: World, pool: PrefixPool) -> dict[int, dict[str, int]]:
    """Return the guarantees of each published content of a pinned pool, by position in `contents`. Each gets its
    measured warm size, as far as admitted, in order."""
    if not pool.spec.pinned:
        return {}
    left: dict[str, int] = {}
    shares: dict[int, dict[str, int]] = {}
    for at, slot in enumerate(contents(pool)):
        for row in slot.tiers if slot.published else ():
            have = left.setdefault(row.name, held_bytes(world, key_of(pool), row.name))
            share = min(row.bytes, have)
            left[row.name] -= share
            shares.setdefault(at, {})[row.name] = share
    return shares


def _budgets(
    world: World, model: CachedModel, tiers: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[EnforcedBudget, ...]:
    """Return a version's budgets; `sizes` are its guarantees. There is no limit: only its own chunks are stored under a
    pool."""
    budgets = []
    for name in sorted(model.tier_names):
        tier = world.tiers.get(name)
        if tier is None:
            continue
        if not chain.is_usable(world, model, name):
            budgets.append(EnforcedBudget.denying(name, POOL_RETENTION_S))
            continue
        longest_s = tier.spec.max_retention_s
        retention_s = min(POOL_RETENTION_S, longest_s) if longest_s is not None else POOL_RETENTION_S
        guaranteed = sizes.get(name, 0) if name in tiers else 0
        budgets.append(EnforcedBudget(name, guaranteed_bytes=guaranteed or None, retention_s=retention_s))
    return tuple(budgets)


def _before_ready_s(world: World, pool: PrefixPool, tiers: tuple[str, ...]) -> int:
    """Return how long a new pod waits for the pool's chunks in its own memory; 0 if they are not kept there."""
    warmup = pool.spec.warmup
    in_pods = any(name in world.tiers and world.tiers[name].spec.medium is Medium.CPU for name in tiers)
    return min(warmup.timeout.in_seconds, MAX_BEFORE_READY_S) if warmup.before_ready and in_pods else 0


def changed_pools(before: Mapping[str, PoolShard], after: Mapping[str, PoolShard]) -> frozenset[str]:
    return frozenset(name for name in {*before, *after} if before.get(name) is not after.get(name))


def leftovers(world: World, model: CachedModel, committed: CommittedBundle) -> dict[str, str]:
    """Return the versions of unused slots with contents, by Secret name. They hold data keys and guessable hashes of
    replaced or deleted ones."""
    named = {names.pool_shard(model.name, ref.index, ref.slot) for ref in committed.bundle.root.pools}
    slots = (names.pool_shard(model.name, index, slot) for index in range(MAX_POOLS) for slot in SLOTS)
    return _filled(world, (name for name in slots if name not in named))


def empty_leftovers(world: World, model: CachedModel, committed: CommittedBundle) -> EmptySecrets | None:
    """Return the order to empty unused slots, once every live pod has the newest root; None before. For an erasure it
    is due as soon as no pod reuses anything: a reader that misses a slot reads the root again."""
    found = leftovers(world, model, committed)
    revision = committed.bundle.root.revision
    if any(world.acked_revision(pod) < revision for pod in world.live_pods(model.name)):
        found = {}
    found |= _spent_slots(world, model, committed)
    return EmptySecrets(model.name, found, model.owner_reference()) if found else None


def _spent_slots(world: World, model: CachedModel, committed: CommittedBundle) -> dict[str, str]:
    """Return the free slots of tenants' shards with contents while an erasure waits for keys to go. A change is written
    to a shard's other slot, so the former contents, with data keys, stay until the next change."""
    going = [now.record.erasure for now in world.erasures.values()]
    if not any(keys_kept(erasure) and unreachable_at(erasure) for erasure in going):
        return {}
    refs = committed.bundle.root.shards
    return _filled(world, (names.bundle_shard(model.name, ref.index, ref.other_slot) for ref in refs))


def _filled(world: World, slots: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of these Secrets that have contents."""
    found = ((name, world.secrets.get(name)) for name in slots)
    return {name: secret.resource_version for name, secret in found if secret is not None and secret.keys}
