"""Pools in a model's bundle: which versions its pods know of, where their shards go, and which slots are to be emptied.

A version is there from the moment at which its manifest is known, so that it can be warmed, and has readers once the
pool's status says that it is published. Both are written into status first: what a status does not say is never
committed, and what is committed can be compiled anew from the status and the shards that there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import Medium
from kvstrata.api.common import ScopeStatus
from kvstrata.api.prefixpool import NextContent, PrefixPool, PrefixPoolStatus
from kvstrata.contract.policy.bundle import TierBudget
from kvstrata.contract.policy.pools import MAX_BEFORE_READY_S, MAX_POOLS, PoolRef, PoolShard, PoolState, PoolVersion
from kvstrata.contract.policy.shard_slots import SLOTS
from kvstrata.contract.wire import digest_bytes
from kvstrata.model.erasure.evidence import keys_kept, unreachable_at
from kvstrata.model.pods import CommittedBundle
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.actions import EmptySecrets
from kvstrata.plan.budgets.admission import held_bytes, key_of
from kvstrata.plan.keys.data_keys import keys_of, seals
from kvstrata.plan.pools.rendering import rendered_manifest
from kvstrata.plan.rules import first
from kvstrata.plan.rules import pool as chain
from kvstrata.plan.rules.pool import pools_of
from kvstrata.plan.scopes import Epoch, held, pool_scope

POOL_RETENTION_S = 7 * 86_400
"""How long a pool's blocks live at most: those of a pool that is gone must end by themselves, wherever they are."""

Slot = PrefixPoolStatus | NextContent
"""A part of a pool's status that tells of one content."""


def contents(pool: PrefixPool) -> tuple[Slot, ...]:
    """Return the parts of a pool's status that tell of a content, the one that readers are to ask first in front."""
    found: list[Slot] = [pool.status] if pool.status.scope is not None else []
    if pool.status.next is not None:
        found.insert(0 if pool.status.next.published else len(found), pool.status.next)
    return tuple(found)


def desired_pools(world: World, model: CachedModel, known: Mapping[str, PoolShard]) -> dict[str, PoolShard]:
    """Return the pools that a bundle should have, by name; one that is as it was is the same object.

    A version whose manifest nobody knows any more is left out until its prefixes are rendered again.
    """
    shards: dict[str, PoolShard] = {}
    for pool in pools_of(world, model):
        before = known.get(pool.name)
        shares = _guaranteed(world, pool)
        made = (
            _version(world, model, pool, slot, before, shares.get(at, {})) for at, slot in enumerate(contents(pool))
        )
        versions = tuple(version for version in made if version is not None)
        if versions:
            shard = PoolShard(pool.name, pool.uid, versions)
            shards[pool.name] = before if before is not None and before == shard else shard
    return shards


def committed_version(
    world: World, model: CachedModel, pool: PrefixPool, slot: Slot
) -> tuple[PoolRef, PoolVersion] | None:
    """Return the version of a content in the bundle that pods were told of, and where that is."""
    committed = world.bundles.get(model.name)
    if committed is None or pool.name not in committed.pool_indexes:
        return None
    shard, index = committed.bundle.pools.get(pool.name), committed.pool_indexes[pool.name]
    ref = next((one for one in committed.bundle.root.pools if one.index == index and one.digest), None)
    keyspace = keyspace_of(world, pool, slot)
    versions = shard.versions if shard is not None and shard.uid == pool.uid else ()
    version = next((one for one in versions if one.keyspace == keyspace), None)
    return (ref, version) if ref is not None and version is not None else None


def keyspace_of(world: World, pool: PrefixPool, slot: Slot) -> str | None:
    """Return the keyspace of one content of a pool."""
    epoch = _epoch(world, pool, slot)
    return epoch.keyspace(world.domain_key) if epoch is not None and world.domain_key is not None else None


def _epoch(world: World, pool: PrefixPool, slot: Slot) -> Epoch | None:
    scope = pool_scope(pool.name)
    told: ScopeStatus | None = held(slot.scope, scope)
    return Epoch(scope, told.epoch, told.rolls, Key(pool.INFO.kind, world.namespace, pool.name)) if told else None


def _version(
    world: World,
    model: CachedModel,
    pool: PrefixPool,
    slot: Slot,
    before: PoolShard | None,
    guaranteed: Mapping[str, int],
) -> PoolVersion | None:
    epoch, keyspace = _epoch(world, pool, slot), keyspace_of(world, pool, slot)
    hashes = known_manifest(world, pool, slot.manifest_digest, before)
    if epoch is None or keyspace is None or hashes is None:
        return None
    own = next((one for one in before.versions if one.keyspace == keyspace), None) if before is not None else None
    tiers = _tiers(world, model, pool, own)
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


def known_manifest(world: World, pool: PrefixPool, digest: str | None, before: PoolShard | None) -> bytes | None:
    """Return the chunks' hashes of that digest, from the pool's shard or from what pods made of its content now."""
    if digest is None:
        return None
    for version in before.versions if before is not None else ():
        if version.manifest == digest:
            return version.hashes
    return rendered_manifest(world, pool, digest)


def _tiers(world: World, model: CachedModel, pool: PrefixPool, own: PoolVersion | None) -> tuple[str, ...]:
    """Return the tiers that hold a version: while the spec is wrong those of before, as far as they still may."""
    if first(chain.RULES, world, pool) is None:
        return chain.tiers_of(world, pool)
    return tuple(name for name in (own.tiers if own is not None else ()) if chain.is_usable(world, model, name))


def _guaranteed(world: World, pool: PrefixPool) -> dict[int, dict[str, int]]:
    """Return what is guaranteed to each published content of a pinned pool, by its place among `contents`.

    It is as much as was measured when it was warm, as far as that was admitted; the one that is asked first
    comes first.
    """
    if not pool.spec.is_pinned:
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
) -> tuple[TierBudget, ...]:
    """Return what a version may keep where, and for how long; `sizes` is what is guaranteed to it.

    There is no limit: nothing but its chunks is stored under a pool, so it bounds itself.
    """
    budgets = []
    for name in sorted(model.spec.tier_names):
        tier = world.tiers.get(name)
        if tier is None or tier.spec.medium is Medium.HBM:
            continue
        if not chain.is_usable(world, model, name):
            budgets.append(TierBudget.denying(name, POOL_RETENTION_S))
            continue
        bounds = [POOL_RETENTION_S, *([tier.spec.max_retention_s] if tier.spec.max_retention_s is not None else [])]
        guaranteed = sizes.get(name, 0) if name in tiers else 0
        budgets.append(TierBudget(name, guaranteed_bytes=guaranteed or None, retention_s=min(bounds)))
    return tuple(budgets)


def _before_ready_s(world: World, pool: PrefixPool, tiers: tuple[str, ...]) -> int:
    """Return how long a new pod waits for the pool's chunks in its own memory; 0 where they are not kept there."""
    warmup = pool.spec.effective_warmup
    in_pods = any(name in world.tiers and world.tiers[name].spec.medium is Medium.CPU for name in tiers)
    return min(warmup.timeout_s, MAX_BEFORE_READY_S) if warmup.is_before_ready and in_pods else 0


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the shards of pools will be, the bytes of those that are not there yet, and each pool's index."""

    refs: tuple[PoolRef, ...]
    changed: dict[int, bytes] = field(repr=False)  # they hold data keys
    indexes: dict[str, int]


def place(
    committed: CommittedBundle | None, known: Mapping[str, PoolShard], pools: Mapping[str, PoolShard], revision: int
) -> Placed:
    """Return where the shards of `pools` go in the bundle of `revision`; `known` are those that pods may have.

    A pool keeps its index for life, and an index that was given up waits until no other is free.
    """
    refs = {ref.index: ref for ref in committed.bundle.root.pools} if committed is not None else {}
    before = committed.pool_indexes if committed is not None else {}
    indexes = {name: before[name] for name in pools if name in before}
    placed: dict[int, PoolRef] = {}
    changed: dict[int, bytes] = {}
    for name, shard in pools.items():
        if name not in indexes:
            taken = set(indexes.values())
            unused = (index for index in range(MAX_POOLS) if index not in taken and index not in refs)
            indexes[name] = next(unused, next(index for index in range(MAX_POOLS) if index not in taken))
        index = indexes[name]
        old = refs.get(index)
        if old is not None and old.digest and known.get(name) is shard:
            placed[index] = old
            continue
        changed[index] = shard.encode()
        placed[index] = PoolRef(
            index, old.other_slot if old is not None else SLOTS[0], digest_bytes(changed[index]), revision
        )
    return Placed(tuple(placed[index] for index in sorted(placed)), changed, indexes)


def are_placed(committed: CommittedBundle, pools: Mapping[str, PoolShard]) -> bool:
    """Whether a bundle has these very pools, each in a shard that can be read."""
    known, refs = committed.bundle.pools, committed.bundle.root.pools
    same = len(known) == len(pools) == len(refs) and all(known.get(name) is shard for name, shard in pools.items())
    return same and all(ref.digest for ref in refs)


def changed_pools(before: Mapping[str, PoolShard], after: Mapping[str, PoolShard]) -> frozenset[str]:
    """Return the pools of which a commit says something else than the one before."""
    return frozenset(name for name in {*before, *after} if before.get(name) is not after.get(name))


def leftovers(world: World, model: CachedModel, committed: CommittedBundle) -> dict[str, str]:
    """Return the slots that no reader needs and that still hold something: names of Secrets and their versions.

    They hold data keys, and hashes by which a text can be guessed, of what was replaced or deleted.
    """
    named = {names.pool_shard(model.name, ref.index, ref.slot) for ref in committed.bundle.root.pools}
    return {
        name: world.secrets[name].resource_version
        for name in _slots(model)
        if name not in named and name in world.secrets and world.secrets[name].keys
    }


def empty_leftovers(world: World, model: CachedModel, committed: CommittedBundle) -> EmptySecrets | None:
    """Return the order to empty what no reader needs, once every live pod has the newest root; None before.

    What an erasure wants emptied goes as soon as no pod reuses anything of it: a reader that comes too late for a slot
    reads the root again.
    """
    found = leftovers(world, model, committed)
    revision = committed.bundle.root.revision
    if any(world.acked_revision(pod) < revision for pod in world.live_pods(model.name)):
        found = {}
    found |= spent_slots(world, model, committed)
    return EmptySecrets(model.name, found, model.owner_reference()) if found else None


def spent_slots(world: World, model: CachedModel, committed: CommittedBundle) -> dict[str, str]:
    """Return the free slots of tenants' shards that still hold something while an erasure waits for keys to go.

    A bundle writes what changed into the other slot of a shard: what it said before stays there until the next change,
    data keys too.
    """
    going = [now.record.erasure for now in world.erasures.values()]
    if not any(keys_kept(erasure) and unreachable_at(erasure) for erasure in going):
        return {}
    free = (names.bundle_shard(model.name, ref.index, ref.other_slot) for ref in committed.bundle.root.shards)
    return {
        name: world.secrets[name].resource_version
        for name in free
        if name in world.secrets and world.secrets[name].keys
    }


def _slots(model: CachedModel) -> Iterator[str]:
    return (names.pool_shard(model.name, index, slot) for index in range(MAX_POOLS) for slot in SLOTS)
