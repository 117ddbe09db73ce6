"""Data keys: which epochs have one, what entries say of it, and when one may go.

A key is drawn for every epoch in use as soon as a tier requires encryption, in Secrets of the domain. It lives as long
as its epoch, also while no tier requires it: a tier that requires it again finds its blocks again. From the moment at
which it is dropped nobody can read what it encrypted, so that is done last: when no status names its epoch, no bundle
has its key, and every pod that may hold an older bundle has acknowledged a revision without it, or is gone for certain.

After a restore of the API server all of them are drawn anew, because those that were dropped since the backup are back.
They are replaced at once: what they encrypted is unreachable by the domain's new key, which is there before.

An entry never waits for its key: until it is there, tiers that require encryption refuse the keyspace, and its policy
is not called enforced.

Where a KMS wraps keys (`plan.keys.custody`) bundles name them. A key that the KMS cannot unwrap any more is lost: the
scope whose status names its epoch gets another epoch, as for an invalidation, because a second key for the same epoch
would be taken for the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.cachetier import CacheTier
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.data_key import MAX_GENERATION, BundledKey, DataKey, KeyReference
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.contract.receipt.vocabulary import KeyCustody
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects import labels, names
from kvstrata.plan.actions import EnsureSecret, KeepInKms, Material, Plan
from kvstrata.plan.keys.custody import in_force
from kvstrata.plan.scopes import Epoch
from kvstrata.plan.witnesses import account_for, witnesses_now

LOOK_AGAIN_S = 60.0
"""When to look again at keys that may not go yet: pods that vanished count as gone by time alone."""

HOLDERS = frozenset({"CacheDomain", "PrefixPool", "TenantCachePolicy", "TenantGroup"})
"""Kinds whose status names epochs."""


def encrypts(world: World) -> bool:
    """Whether a tier of the domain is to hold ciphertext."""
    return any(map(_encrypts, world.tiers.values()))


def keys_of(world: World, epoch: Epoch) -> tuple[BundledKey, ...]:
    """Return the data keys of a scope in its epoch; none while they are not drawn, or not needed."""
    kept = world.data_keys.get(epoch.value) if encrypts(world) else None
    if not kept:
        return ()
    generation = epoch.rolls % (MAX_GENERATION + 1)
    if isinstance(kept, str):
        return (KeyReference(generation, kept),)
    return (DataKey(generation, kept),) if not _came_back(world, names.data_keys_secret(epoch.value)) else ()


def is_lost(world: World, epoch: str | None) -> bool:
    """Whether a scope needs another epoch, because the key of this one is lost."""
    return epoch in world.keys_lost and encrypts(world)


def as_held(world: World, model: CachedModel, entry: Entry) -> Entry:
    """Return a policy's entry as the bundle of `model` has it: pods that encrypt nothing get no keys."""
    return entry if not entry.keys or seals(world, model) else replace(entry, keys=())


def seals(world: World, model: CachedModel) -> bool:
    """Whether a tier of the model is to hold ciphertext."""
    return any(_encrypts(world.tiers[name]) for name in model.spec.tier_names if name in world.tiers)


def plan_data_keys(world: World, domain: CacheDomain, now: datetime) -> Plan:
    """Return what is to be done about the domain's Secrets of data keys."""
    if not (world.data_keys or encrypts(world)):
        return Plan()
    used = epochs_in_use(world)
    if in_force(domain) is not KeyCustody.SECRET:
        return _plan_in_kms(world, used, now)
    back = {name for name in map(names.data_keys_secret, world.data_keys) if _came_back(world, name)}
    gone = world.keys_lost | _ending(world)
    wanted = {epoch for epoch in used - gone if epoch not in world.data_keys or names.data_keys_secret(epoch) in back}
    lacking = _by_secret(wanted) if encrypts(world) else {}
    unused = world.data_keys.keys() - used
    spent = _by_secret(_droppable(world, unused, now))
    orders = tuple(
        EnsureSecret(
            name=name,
            material=Material.DATA_KEYS,
            labels=labels.of_domain("data-keys"),
            owner=domain.owner_reference(),
            epochs=tuple(sorted(lacking.get(name, ()))),
            spent=tuple(sorted(spent.get(name, ()))),
            drawn_for=domain.status.restored.id if domain.status.restored is not None else "",
        )
        for name in sorted({*lacking, *spent, *back})
        if ("Secret", name) not in world.foreign
    )
    return Plan(
        actions=orders,
        enqueue=tuple(Key(BUNDLE, world.namespace, name) for name in world.models) if lacking else (),
        wake_after_s=LOOK_AGAIN_S if unused else None,
    )


def _plan_in_kms(world: World, used: set[str], now: datetime) -> Plan:
    unused = world.data_keys.keys() - used
    gone = world.keys_lost | _ending(world)
    wanted = used - world.data_keys.keys() - gone if encrypts(world) else set()
    spent = _droppable(world, unused, now)
    return Plan(
        actions=(KeepInKms(tuple(sorted(wanted)), tuple(sorted(spent))),) if wanted or spent else (),
        enqueue=tuple(Key(BUNDLE, world.namespace, name) for name in world.models) if wanted else (),
        wake_after_s=LOOK_AGAIN_S if unused else None,
    )


def _came_back(world: World, name: str) -> bool:
    """Whether a Secret of data keys is older than the last restore of the API server."""
    restored = world.domain.status.restored if world.domain is not None else None
    secret = world.secrets.get(name)
    return restored is not None and secret is not None and secret.drawn_for != restored.id


def _encrypts(tier: CacheTier) -> bool:
    return tier.spec.encryption_required


def _by_secret(epochs: Iterable[str]) -> dict[str, set[str]]:
    grouped: dict[str, set[str]] = defaultdict(set)
    for epoch in epochs:
        grouped[names.data_keys_secret(epoch)].add(epoch)
    return grouped


def epochs_in_use(world: World) -> set[str]:
    """Return the epochs that statuses name."""
    scopes = [
        *(policy.status.scope for policy in world.policies.values()),
        *(group.status.scope for group in world.groups.values()),
        *(domain.status.scope for domain in world.domains.values()),
    ]
    of_pools = [epoch for pool in world.pools.values() for epoch in pool.status.epochs]
    return {*(scope.epoch for scope in scopes if scope is not None), *of_pools}


def epochs_with_a_future(world: World) -> set[str]:
    """Return the epochs that statuses name and that go on: those whose key is drawn if there is none."""
    return epochs_in_use(world) - _ending(world)


def _ending(world: World) -> set[str]:
    """Return the epochs of policies that are being deleted: whoever erases them removes their keys for good."""
    scopes = [policy.status.scope for policy in world.policies.values() if policy.metadata.deleting]
    return {scope.epoch for scope in scopes if scope is not None and scope.kind == ScopeKind.TENANT}


def _droppable(world: World, unused: Iterable[str], now: datetime) -> tuple[str, ...]:
    """Return those of the epochs that no status names whose key nobody can need any more.

    That no status names one is known only if all of them can be read and none can be news to come.
    """
    left = [epoch for epoch in unused if epoch in world.judged_epochs]
    whole = all(committed.whole for committed in world.bundles.values())
    if not left or not whole or any(key.kind in HOLDERS for key in world.unreadable):
        return ()
    held = frozenset().union(*(committed.data_keys for committed in world.bundles.values()))
    witnesses = witnesses_now(world, now)
    settled: dict[tuple[int, ...], bool] = {}
    found = []
    for epoch in left:
        if world.data_keys[epoch] in held:
            continue
        revisions = {name: committed.keyless_since(epoch) for name, committed in world.bundles.items()}
        which = tuple(revisions.values())
        if which not in settled:
            settled[which] = not account_for(world, witnesses, revisions, now).open
        if settled[which]:
            found.append(epoch)
    return tuple(found)
