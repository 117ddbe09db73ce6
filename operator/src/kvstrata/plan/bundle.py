"""The bundle of one CachedModel: when its compiled policy changed, commit a new revision."""

from __future__ import annotations

from dataclasses import replace

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.contract.bundle import Bundle, Entry, Root, ShardRef, split_into_shards
from kvstrata.contract.canonical import digest_bytes
from kvstrata.model.facts import CommittedBundle
from kvstrata.model.world import World

from .compile import compile_policy, rules_of, selects, still_allowed
from .types import CommitBundle, Plan

NO_PLAN = Plan()


def plan_bundle(world: World, name: str) -> Plan:
    """Return the commit that brings the bundle of model `name` up to date, or an empty plan.

    Nothing is committed while an epoch that an entry needs is still to be drawn for the first time: the policy
    that draws it asks again.
    """
    model = world.models.get(name)
    if model is None or model.metadata.deleting or world.domain_key is None or not world.domain_id:
        return NO_PLAN
    committed = world.bundles.get(name)
    current = committed.bundle if committed and committed.bundle.root.model_uid == model.uid else None
    entries = desired_entries(world, model, current)
    rules = rules_of(world, model)
    if (
        current
        and _unchanged(current, entries)
        and current.root.rules == rules
        and current.root.domain == world.domain_id
    ):
        return NO_PLAN
    revision = 1 + max(committed.bundle.root.revision if committed else 0, model.status.bundle_revision or 0)
    dated = tuple(_dated(entry, current, revision) for entry in entries)
    return Plan(actions=(_commit(world, model, committed, current, dated, revision),))


def desired_entries(world: World, model: CachedModel, current: Bundle | None) -> tuple[Entry, ...]:
    """Return the entries that the model's bundle should have, by tenant.

    A policy that is blocked keeps the entry that it has: while a new spec is invalid, the last enforced one stands.
    """
    entries: dict[str, Entry] = {}
    kept_by_policy = {entry.policy: entry for entry in current.entries.values()} if current else {}
    for policy in world.policies.values():
        if policy.metadata.deleting:
            continue
        compiled = compile_policy(world, policy)
        kept = kept_by_policy.get(policy.uid)
        if compiled.blocked:
            entry = still_allowed(world, policy, kept) if kept else None
        else:
            entry = (compiled.entry or kept) if selects(policy, model) else None
        if entry is None:
            continue
        rival = entries.get(entry.tenant)
        if rival is None or compiled.entry is not None:
            entries[entry.tenant] = entry
    return tuple(entries[tenant] for tenant in sorted(entries))


def _unchanged(current: Bundle, entries: tuple[Entry, ...]) -> bool:
    return len(current.entries) == len(entries) and all(
        _same(current.entries.get(entry.tenant), entry) for entry in entries
    )


def _same(old: Entry | None, new: Entry) -> bool:
    return old is not None and replace(old, since=0) == replace(new, since=0)


def _dated(entry: Entry, current: Bundle | None, revision: int) -> Entry:
    old = current.entries.get(entry.tenant) if current else None
    return replace(entry, since=old.since if old and _same(old, entry) else revision)


def _commit(
    world: World,
    model: CachedModel,
    committed: CommittedBundle | None,
    current: Bundle | None,
    entries: tuple[Entry, ...],
    revision: int,
) -> CommitBundle:
    old_shards = committed.bundle.root.shards if committed else ()
    encoded = split_into_shards(entries, minimum_count=len(old_shards))
    refs: list[ShardRef] = []
    changed: dict[int, bytes] = {}
    for index, data in enumerate(encoded):
        digest = digest_bytes(data)
        old = old_shards[index] if index < len(old_shards) else None
        if old and old.digest == digest:
            refs.append(old)
            continue
        refs.append(ShardRef(index, old.other_slot if old else "a", digest))
        changed[index] = data
    rules = rules_of(world, model)
    rules_since = current.root.rules_since if current and current.root.rules == rules else revision
    root = Root(
        domain=world.domain_id or "",
        model=model.name,
        model_uid=model.uid,
        revision=revision,
        # A Lease that was deleted starts its count again; the bundle's own term keeps growing all the same.
        term=max(world.term, committed.bundle.root.term if committed else 0),
        rules=rules,
        shards=tuple(refs),
        rules_since=rules_since,
    )
    return CommitBundle(
        model=model.name,
        root=root,
        entries={entry.tenant: entry for entry in entries},
        shards=changed,
        resource_version=committed.resource_version if committed else None,
        owner=model.owner_reference(),
    )
