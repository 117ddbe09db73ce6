"""The bundle of one CachedModel: commits a new revision when its compiled policy changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedomain import DOMAIN_NAME
from kvstrata.contract.policy.bundle import (
    MAX_SHARD_BYTES,
    Bundle,
    Entry,
    Root,
    Rules,
    ShardRef,
    encode_shard,
    shard_of,
    split_into_shards,
)
from kvstrata.contract.policy.pools import MAX_POOLS, PoolRef, PoolShard
from kvstrata.contract.policy.shard_slots import SLOTS
from kvstrata.contract.wire import digest_bytes
from kvstrata.model.pods import CommittedBundle, keys_in
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.actions import CommitBundle, Plan
from kvstrata.plan.bundle import restore
from kvstrata.plan.bundle.compile import desired_entries, rules_of
from kvstrata.plan.ownership import foreign_of
from kvstrata.plan.pools.shards import desired_pools, empty_leftovers, leftovers

NO_PLAN = Plan()
TIDY_AFTER_S = 60.0


def plan_bundle(world: World, name: str) -> Plan:
    """Return the commit that updates the bundle of model `name`, or an empty plan. Nothing is committed while the API
    server may have been restored with invalidated data, or a foreign Secret has a name of the bundle."""
    model = world.models.get(name)
    if model is None or model.metadata.deleting or world.domain_key is None or not world.domain_id:
        return NO_PLAN
    if any(secret.startswith(names.bundle_root(name)) for _, secret in foreign_of(world, model)):
        return NO_PLAN
    if restore.holds_back(world):
        return Plan(enqueue=(Key("CacheDomain", world.namespace, DOMAIN_NAME),))
    committed = world.bundles.get(name)
    current = committed.bundle if committed and committed.bundle.root.model_uid == model.uid else None
    entries = desired_entries(world, model, current)
    rules = rules_of(world, model)
    pools = desired_pools(world, model, current.pools if current else {})
    least = restore.least_revision(world)
    if committed and committed.bundle.root.revision <= least:
        # The bundle came back with a restore, or predates the domain key: drop all of it.
        before = committed.bundle.keyspaces
        entries = tuple(entry for entry in entries if entry.keyspace not in before)
        pools = {pool: shard for pool, shard in pools.items() if before.isdisjoint(v.keyspace for v in shard.versions)}
    elif (
        committed
        and current
        and _unchanged(current, entries)
        and _are_placed(committed, pools)
        and current.root.rules == rules
        and current.root.domain == world.domain_id
    ):
        return _tidy(world, model, committed)
    revision = 1 + max(committed.bundle.root.revision if committed else 0, model.status.bundle_revision or 0, least)
    dated = _dated(entries, current, revision)
    commit = _commit(world, model, committed, current, dated, rules, pools, revision)
    followers = _tiers_with_budgets(world, model)
    return Plan(actions=(commit,), enqueue=followers, wake_after_s=TIDY_AFTER_S if commit.pool_shards else None)


def _tidy(world: World, model: CachedModel, committed: CommittedBundle) -> Plan:
    """Return the order to empty slots that no reader needs; check again while a pool's may become free."""
    emptied = empty_leftovers(world, model, committed)
    if emptied is not None:
        return Plan(actions=(emptied,))
    return Plan(wake_after_s=TIDY_AFTER_S) if leftovers(world, model, committed) else NO_PLAN


def _tiers_with_budgets(world: World, model: CachedModel) -> tuple[Key, ...]:
    return tuple(Key("CacheTier", world.namespace, name) for name in model.spec.tier_names if name in world.tiers)


def _unchanged(current: Bundle, entries: tuple[Entry, ...]) -> bool:
    return len(current.entries) == len(entries) and not _differing(current.entries, entries)


def _differing(known: Mapping[str, Entry], entries: Iterable[Entry]) -> set[str]:
    return {entry.tenant for entry in entries if known.get(entry.tenant) is not entry}


def _dated(entries: tuple[Entry, ...], current: Bundle | None, revision: int) -> tuple[Entry, ...]:
    known = current.entries if current else {}
    return tuple([entry if known.get(entry.tenant) is entry else replace(entry, since=revision) for entry in entries])


def _shards(
    committed: CommittedBundle | None, entries: tuple[Entry, ...]
) -> tuple[tuple[ShardRef, ...], dict[int, bytes]]:
    refs = committed.bundle.root.shards if committed else ()
    if committed is None or not refs or not all(ref.digest for ref in refs):
        return _rewritten(refs, split_into_shards(entries, minimum_count=len(refs)))
    known = committed.bundle.entries
    changed = _differing(known, entries) | (known.keys() - {entry.tenant for entry in entries})
    touched = {shard_of(tenant, len(refs)) for tenant in changed}
    groups: dict[int, list[Entry]] = {index: [] for index in touched}
    for entry in entries:
        index = shard_of(entry.tenant, len(refs))
        if index in touched:
            groups[index].append(entry)
    encoded = {index: encode_shard(group) for index, group in groups.items()}
    if any(len(data) > MAX_SHARD_BYTES for data in encoded.values()):
        return _rewritten(refs, split_into_shards(entries, minimum_count=2 * len(refs)))
    moved = tuple(
        ShardRef(ref.index, ref.other_slot, digest_bytes(encoded[ref.index])) if ref.index in encoded else ref
        for ref in refs
    )
    return moved, encoded


def _rewritten(refs: tuple[ShardRef, ...], encoded: tuple[bytes, ...]) -> tuple[tuple[ShardRef, ...], dict[int, bytes]]:
    moved: list[ShardRef] = []
    changed: dict[int, bytes] = {}
    for index, data in enumerate(encoded):
        digest = digest_bytes(data)
        old = refs[index] if index < len(refs) else None
        if old and old.digest == digest:
            moved.append(old)
            continue
        moved.append(ShardRef(index, old.other_slot if old else "a", digest))
        changed[index] = data
    return tuple(moved), changed


def _commit(
    world: World,
    model: CachedModel,
    committed: CommittedBundle | None,
    current: Bundle | None,
    entries: tuple[Entry, ...],
    rules: Rules,
    pools: Mapping[str, PoolShard],
    revision: int,
) -> CommitBundle:
    refs, changed = _shards(committed, entries)
    placed = _place(committed, current.pools if current else {}, pools, revision)
    by_tenant = {entry.tenant: entry for entry in entries}
    rules_since = current.root.rules_since if current and current.root.rules == rules else revision
    root = Root(
        domain=world.domain_id or "",
        model=model.name,
        model_uid=model.uid,
        revision=revision,
        # A deleted Lease restarts its count; the bundle's term keeps growing.
        term=max(world.term, committed.bundle.root.term if committed else 0, restore.least_term(world)),
        rules=rules,
        shards=refs,
        rules_since=rules_since,
        pools=placed.refs,
    )
    return CommitBundle(
        model=model.name,
        root=root,
        entries=by_tenant,
        shards=changed,
        resource_version=committed.resource_version if committed else None,
        owner=model.owner_reference(),
        compiled=_compiled(world, committed, entries, revision),
        keyless=_keyless(world, committed, keys_in(by_tenant, pools), revision),
        pools=pools,
        pool_shards=placed.changed,
        pool_indexes=placed.indexes,
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    refs: tuple[PoolRef, ...]
    changed: dict[int, bytes] = field(repr=False)  # they hold data keys
    indexes: dict[str, int]


def _place(
    committed: CommittedBundle | None, known: Mapping[str, PoolShard], pools: Mapping[str, PoolShard], revision: int
) -> _Placed:
    """Place the shards of `pools` in the bundle of `revision`; `known` are those that pods may have. A pool keeps its
    index for life; a freed index is reused only when no other is free."""
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
    return _Placed(tuple(placed[index] for index in sorted(placed)), changed, indexes)


def _are_placed(committed: CommittedBundle, pools: Mapping[str, PoolShard]) -> bool:
    known, refs = committed.bundle.pools, committed.bundle.root.pools
    same = len(known) == len(pools) == len(refs) and all(known.get(name) is shard for name, shard in pools.items())
    return same and all(ref.digest for ref in refs)


def _compiled(
    world: World, committed: CommittedBundle | None, entries: tuple[Entry, ...], revision: int
) -> dict[str, tuple[int, int]]:
    """Return the revision since which the bundle reflects each policy's generation.

    A removed entry leaves no `since`, and may be removed long after an edit of its policy: when a rival goes, a tier
    appears, or a model loses a label. So every policy of that tenant counts from this revision.
    """
    before = committed.compiled if committed else {}
    gone = (committed.bundle.entries.keys() if committed else set()) - {entry.tenant for entry in entries}
    known = {}
    for policy in world.policies.values():
        uid, generation = policy.metadata.uid, policy.metadata.generation
        old = before.get(uid)
        stands = old is not None and old[0] == generation and not (gone and policy.spec.tenant in gone)
        known[uid] = old if old and stands else (generation, revision)
    return known


def _keyless(
    world: World, committed: CommittedBundle | None, held: frozenset[bytes | str], revision: int
) -> dict[str, int]:
    """Return the revision since which a bundle lacks the data key of an epoch, for keys that are not `held`."""
    if not world.data_keys:
        return {}
    before = committed.keyless if committed else {}
    return {epoch: before.get(epoch, revision) for epoch, secret in world.data_keys.items() if secret not in held}
