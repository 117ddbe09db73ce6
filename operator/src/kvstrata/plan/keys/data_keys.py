"""Data keys: which epochs have one, how entries reference it, and when it may be dropped.

Every epoch in use gets a key as soon as a tier requires encryption, and keeps it for life, so that blocks are found
again. A key is dropped when no status names its epoch, no bundle has it, and every pod with an older bundle has
acknowledged a revision without it or is gone for certain. After a restore of the API server all are redrawn, because
dropped ones are back. Until a key exists, encrypting tiers refuse the keyspace and the policy is not enforced.

Bundles name keys that a KMS wraps (`plan.keys.custody`). The scope of a lost key gets a new epoch, because a second key
for the same epoch would be taken for the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedomain import CacheDomain, Restored
from kvstrata.api.status import ScopeStatus
from kvstrata.contract.policy.data_key import MAX_GENERATION, BundledKey, DataKey, KeyReference
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.contract.receipt.vocabulary import KeyCustody
from kvstrata.model.world import World
from kvstrata.objects import labels, names
from kvstrata.plan.actions import Action, EnsureSecret, KeepInKms, Material, Plan, bundle_keys
from kvstrata.plan.keys.custody import active_custody
from kvstrata.plan.ownership import foreign_of
from kvstrata.plan.witnesses import account_for, witnesses_now

LOOK_AGAIN_S = 60.0
"""When to check unused keys again: vanished pods count as gone only after some time."""

HOLDERS = frozenset({"CacheDomain", "PrefixPool", "TenantCachePolicy", "TenantGroup"})


def encrypts(world: World) -> bool:
    return any(tier.spec.encryption_required for tier in world.tiers.values())


def keys_of(world: World, epoch: ScopeStatus) -> tuple[BundledKey, ...]:
    """Return the data keys of an epoch; empty while not drawn or not needed."""
    kept = world.data_keys.get(epoch.epoch) if encrypts(world) else None
    if not kept:
        return ()
    generation = epoch.rolls % (MAX_GENERATION + 1)
    if isinstance(kept, str):
        return (KeyReference(generation, kept),)
    return (DataKey(generation, kept),) if not _came_back(world, names.data_keys_secret(epoch.epoch)) else ()


def is_lost(world: World, epoch: str | None) -> bool:
    """Whether a scope needs a new epoch, because this one's key is lost."""
    return epoch in world.keys_lost and encrypts(world)


def seals(world: World, model: CachedModel) -> bool:
    """Whether the pods of a model encrypt, and get keys."""
    return any(world.tiers[name].spec.encryption_required for name in model.tier_names if name in world.tiers)


def plan_data_keys(world: World, domain: CacheDomain, now: datetime) -> Plan:
    if not (world.data_keys or encrypts(world)):
        return Plan()
    unused = world.data_keys.keys() - epochs_in_use(world)
    back = {name for name in map(names.data_keys_secret, world.data_keys) if _came_back(world, name)}
    lasting = epochs_with_a_future(world) - world.keys_lost if encrypts(world) else ()
    wanted = {epoch for epoch in lasting if epoch not in world.data_keys or names.data_keys_secret(epoch) in back}
    spent = _droppable(world, unused, now)
    actions: tuple[Action, ...]
    if active_custody(domain) is KeyCustody.KMS:
        actions = (KeepInKms(tuple(sorted(wanted)), tuple(sorted(spent))),) if wanted or spent else ()
    else:
        lacking, gone, owner = by_secret(wanted), by_secret(spent), domain.owner_reference()
        drawn_for = domain.status.restored.id if domain.status.restored is not None else ""
        foreign = {secret for _, secret in foreign_of(world, domain)}
        actions = tuple(
            keys_order(name, owner, lacking.get(name, ()), gone.get(name, ()), drawn_for)
            for name in sorted({*lacking, *gone, *back})
            if name not in foreign
        )
    return Plan(
        actions=actions,
        enqueue=bundle_keys(world) if wanted else (),
        wake_after_s=LOOK_AGAIN_S if unused else None,
    )


def keys_order(
    name: str, owner: Mapping[str, Any], epochs: Iterable[str] = (), spent: Iterable[str] = (), drawn_for: str = ""
) -> EnsureSecret:
    """Return the order to draw and drop keys of a Secret. `owner` is the CacheDomain's owner reference."""
    own, drawn, dropped = labels.of_domain("data-keys"), tuple(sorted(epochs)), tuple(sorted(spent))
    return EnsureSecret(name, Material.DATA_KEYS, own, owner, epochs=drawn, spent=dropped, drawn_for=drawn_for)


def by_secret(epochs: Iterable[str]) -> dict[str, set[str]]:
    grouped: dict[str, set[str]] = defaultdict(set)
    for epoch in epochs:
        grouped[names.data_keys_secret(epoch)].add(epoch)
    return grouped


def last_restore(world: World) -> Restored | None:
    """Return the last detected restore of the API server from a backup."""
    return world.domain.status.restored if world.domain is not None else None


def _came_back(world: World, name: str) -> bool:
    restored, secret = last_restore(world), world.secrets.get(name)
    return restored is not None and secret is not None and secret.drawn_for != restored.id


def epochs_in_use(world: World) -> set[str]:
    return {scope.epoch for scope in scopes_in_use(world)}


def scopes_in_use(world: World) -> Iterator[ScopeStatus]:
    """Yield the scopes in statuses."""
    scopes = chain(
        (policy.status.scope for policy in world.policies.values()),
        (group.status.scope for group in world.groups.values()),
        (domain.status.scope for domain in world.domains.values()),
        (pool.status.scope for pool in world.pools.values()),
        (pool.status.next.scope for pool in world.pools.values() if pool.status.next is not None),
    )
    return (scope for scope in scopes if scope is not None)


def epochs_with_a_future(world: World) -> set[str]:
    """Return the epochs in use that get a key: those of policies under deletion do not, their erasure removes it."""
    scopes = [policy.status.scope for policy in world.policies.values() if policy.metadata.deleting]
    ending = {scope.epoch for scope in scopes if scope is not None and scope.kind is ScopeKind.TENANT}
    return epochs_in_use(world) - ending


def _droppable(world: World, unused: Iterable[str], now: datetime) -> tuple[str, ...]:
    """Return the unused epochs with a key that no pod can need. Whether a status names one is known only if all are
    readable and none may still arrive."""
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
