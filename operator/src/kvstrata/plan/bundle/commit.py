"""The bundle of one CachedModel: commits a new revision when its compiled policy changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from datetime import datetime
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedomain import DOMAIN_NAME
from kvstrata.contract.policy.bundle import (
    MAX_SHARD_BYTES,
    Bundle,
    Entry,
    Root,
    ShardRef,
    encode_shard,
    shard_of,
    split_into_shards,
)
from kvstrata.contract.policy.pools import MAX_POOLS, PoolRef, PoolShard
from kvstrata.contract.policy.shard_slots import SLOTS
from kvstrata.contract.wire import digest_bytes
from kvstrata.model.pods import CommittedBundle, keys_in
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.actions import CommitBundle, Plan
from kvstrata.plan.bundle import restore
from kvstrata.plan.bundle.compile import access_of, desired_entries, rules_of, tiers_of
from kvstrata.plan.keys.data_keys import last_restore
from kvstrata.plan.ownership import foreign_of, secrets_to_take_back
from kvstrata.plan.pools.shards import desired_pools, empty_leftovers, leftovers
from kvstrata.plan.witnesses import longest_fence

TIDY_AFTER_S = 60.0


def plan_bundle(world: World, name: str, now: datetime) -> Plan:
    """Return the commit that updates the bundle of model `name`, or an empty plan. Nothing is committed while the API
    server may have been restored with invalidated data, or a foreign Secret has a name of the bundle."""
    model = world.models.get(name)
    if model is None or model.metadata.deleting or world.domain_key is None or not world.domain_id:
        return Plan()
    if any(secret.startswith(names.bundle_root(name)) for _, secret in foreign_of(world, model)):
        return Plan()
    if back := secrets_to_take_back(world, model, bundle=True):
        return Plan(actions=back, enqueue=(Key(BUNDLE, world.namespace, name),))
    if restore.holds_back(world):
        return Plan(enqueue=(Key("CacheDomain", world.namespace, DOMAIN_NAME),))
    committed = world.bundles.get(name)
    current = committed.bundle if committed and committed.bundle.root.model_uid == model.uid else None
    entries = desired_entries(world, model, current)
    pools = desired_pools(world, model, current.pools if current else {})
    restored, last = last_restore(world), committed.bundle.root if committed else None
    least = restored.revision if restored else 0
    rules = rules_of(world, model)
    head = Root(
        domain=world.domain_id,
        model=name,
        model_uid=model.uid,
        revision=1 + max(last.revision if last else 0, model.status.bundle_revision or 0, least),
        # A deleted Lease restarts its count; the bundle's term keeps growing.
        term=max(world.term, last.term if last else 0, restored.term if restored else 0),
        rules=rules,
        shards=(),
        tiers=tiers_of(world, model),
        access=access_of(world, model, current),
    )
    if committed and committed.bundle.root.revision <= least:
        # The bundle came back with a restore, or predates the domain key: drop all of it.
        before = committed.bundle.keyspaces
        entries = tuple(entry for entry in entries if entry.keyspace not in before)
        pools = {pool: shard for pool, shard in pools.items() if before.isdisjoint(v.keyspace for v in shard.versions)}
    elif (
        committed
        and current
        and len(current.entries) == len(entries)
        and not _differing(current.entries, entries)
        and _are_placed(committed, pools)
        and _content(current.root) == _content(head)
    ):
        return _tidy(world, model, committed)
    fence_s, end_s = longest_fence(world, name, rules, now)
    head = replace(head, fence_s=fence_s, end_s=end_s)
    commit = _commit(world, model, committed, current, head, entries, pools)
    followers = tuple(Key("CacheTier", world.namespace, tier) for tier in model.tier_names if tier in world.tiers)
    return Plan(actions=(commit,), enqueue=followers, wake_after_s=TIDY_AFTER_S if commit.pool_shards else None)


def _tidy(world: World, model: CachedModel, committed: CommittedBundle) -> Plan:
    """Return the order to empty slots that no reader needs; check again while a pool's may become free."""
    emptied = empty_leftovers(world, model, committed)
    if emptied is not None:
        return Plan(actions=(emptied,))
    return Plan(wake_after_s=TIDY_AFTER_S if leftovers(world, model, committed) else None)


def _content(root: Root) -> tuple[Any, ...]:
    return root.domain, root.rules, root.tiers, root.access


def _differing(known: Mapping[str, Entry], entries: Iterable[Entry]) -> set[str]:
    return {entry.tenant for entry in entries if known.get(entry.tenant) is not entry}


def _shards(
    committed: CommittedBundle | None, entries: Sequence[Entry]
) -> tuple[tuple[ShardRef, ...], dict[int, bytes]]:
    """Return the references of tenants' shards, and the changed shards by index."""
    refs = committed.bundle.root.shards if committed else ()
    if committed is None or not refs or not all(ref.digest for ref in refs):
        encoded = dict(enumerate(split_into_shards(entries, minimum_count=len(refs))))
    else:
        known = committed.bundle.entries
        tenants = _differing(known, entries) | (known.keys() - {entry.tenant for entry in entries})
        touched = {shard_of(tenant, len(refs)) for tenant in tenants}
        groups: dict[int, list[Entry]] = {index: [] for index in touched}
        for entry in entries:
            if (index := shard_of(entry.tenant, len(refs))) in touched:
                groups[index].append(entry)
        encoded = {index: encode_shard(group) for index, group in groups.items()}
        if any(len(data) > MAX_SHARD_BYTES for data in encoded.values()):
            encoded = dict(enumerate(split_into_shards(entries, minimum_count=2 * len(refs))))
    placed, changed = dict(enumerate(refs)), dict[int, bytes]()
    for index, data in encoded.items():
        digest, old = digest_bytes(data), placed.get(index)
        if old is None or old.digest != digest:
            placed[index] = ShardRef(index, old.other_slot if old else SLOTS[0], digest)
            changed[index] = data
    return tuple(placed[index] for index in sorted(placed)), changed


def _commit(
    world: World,
    model: CachedModel,
    committed: CommittedBundle | None,
    current: Bundle | None,
    head: Root,
    entries: tuple[Entry, ...],
    pools: Mapping[str, PoolShard],
) -> CommitBundle:
    """Return the commit of `head` with these entries and pools, of which changed ones get its revision."""
    known, revision = current.entries if current else {}, head.revision
    dated = [one if known.get(one.tenant) is one else replace(one, since=revision) for one in entries]
    refs, changed = _shards(committed, dated)
    pool_refs, pool_shards, indexes = _place(committed, current.pools if current else {}, pools, revision)
    by_tenant = {entry.tenant: entry for entry in dated}
    rules_since = current.root.rules_since if current and current.root.rules == head.rules else revision
    return CommitBundle(
        model=model.name,
        root=replace(head, shards=refs, rules_since=rules_since, pools=pool_refs),
        entries=by_tenant,
        shards=changed,
        resource_version=committed.resource_version if committed else None,
        owner=model.owner_reference(),
        compiled=_compiled(world, committed, by_tenant.keys(), revision),
        keyless=_keyless(world, committed, keys_in(by_tenant, pools), revision),
        pools=pools,
        pool_shards=pool_shards,
        pool_indexes=indexes,
    )


def _place(
    committed: CommittedBundle | None, known: Mapping[str, PoolShard], pools: Mapping[str, PoolShard], revision: int
) -> tuple[tuple[PoolRef, ...], dict[int, bytes], dict[str, int]]:
    """Return the references of the shards of `pools` in the bundle of `revision`, the changed shards by index, and the
    pools' indexes; `known` are those that pods may have. A pool keeps its index for life; a freed index is reused only
    when no other is free."""
    refs = {ref.index: ref for ref in committed.bundle.root.pools} if committed is not None else {}
    before = committed.pool_indexes if committed is not None else {}
    indexes = {name: before[name] for name in pools if name in before}
    placed: dict[int, PoolRef] = {}
    changed: dict[int, bytes] = {}
    for name, shard in pools.items():
        if name not in indexes:
            free = [index for index in range(MAX_POOLS) if index not in indexes.values()]
            indexes[name] = next((index for index in free if index not in refs), free[0])
        index = indexes[name]
        old = refs.get(index)
        if old is not None and old.digest and known.get(name) is shard:
            placed[index] = old
            continue
        changed[index] = shard.encode()
        slot = old.other_slot if old is not None else SLOTS[0]
        placed[index] = PoolRef(index, slot, digest_bytes(changed[index]), revision)
    return tuple(placed[index] for index in sorted(placed)), changed, indexes


def _are_placed(committed: CommittedBundle, pools: Mapping[str, PoolShard]) -> bool:
    known, refs = committed.bundle.pools, committed.bundle.root.pools
    same = len(known) == len(pools) == len(refs) and all(known.get(name) is shard for name, shard in pools.items())
    return same and all(ref.digest for ref in refs)


def _compiled(
    world: World, committed: CommittedBundle | None, tenants: Set[str], revision: int
) -> dict[str, tuple[int, int]]:
    """Return the revision since which the bundle reflects each policy's generation.

    A removed entry leaves no `since`, and may be removed long after an edit of its policy: when a rival goes, a tier
    appears, or a model loses a label. So every policy of that tenant counts from this revision.
    """
    before = committed.compiled if committed else {}
    gone = committed.bundle.entries.keys() - tenants if committed else set()
    known = {}
    for policy in world.policies.values():
        old = before.get(policy.uid)
        stands = old is not None and old[0] == policy.generation and policy.spec.tenant not in gone
        known[policy.uid] = old if old and stands else (policy.generation, revision)
    return known


def _keyless(
    world: World, committed: CommittedBundle | None, held: frozenset[bytes | str], revision: int
) -> dict[str, int]:
    """Return the revision since which a bundle lacks the data key of an epoch, for keys that are not `held`."""
    if not world.data_keys:
        return {}
    before = committed.keyless if committed else {}
    return {epoch: before.get(epoch, revision) for epoch, secret in world.data_keys.items() if secret not in held}
