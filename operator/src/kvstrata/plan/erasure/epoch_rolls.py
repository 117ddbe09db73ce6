"""New epochs for scopes: written into the status that holds them, if it still has the old one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.cacheinvalidation import RolledScope
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.api.tenantgroup import TenantGroup
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.model.world import World
from kvstrata.plan.actions import StatusWrite, key_of
from kvstrata.plan.redis.backend import with_stores
from kvstrata.plan.rules.policy import by_seniority
from kvstrata.plan.scopes import fresh_epoch, held, pool_scope

Holder = CacheDomain | PrefixPool | TenantCachePolicy | TenantGroup


def epoch_writes(world: World, intents: Iterable[RolledScope]) -> Iterator[StatusWrite]:
    """Yield the writes for scopes that still have an old epoch. A deleted policy is in no bundle and keeps its epoch,
    by which its own erasure finds its data."""
    listed = tuple(intents)
    for rolled in listed:
        scope = Scope(ScopeKind(rolled.kind), rolled.name)
        if scope.kind is ScopeKind.POOL:
            continue
        holder = holder_of(world, scope)
        if holder is None or rolled.new_epoch is None or leaves(holder):
            continue
        if (status := holder.status.scope) is None or status.epoch != rolled.old_epoch:
            continue
        epoch = with_stores(world, fresh_epoch(world, scope, status, rolled.new_epoch))
        # Usage under the old epoch does not apply to the new one.
        yield StatusWrite(key_of(holder), holder.metadata.resource_version, {"scope": epoch, "usage": None})
    yield from _pool_rolls(world, listed)


def leaves(holder: Holder | None) -> bool:
    """Whether the holder is a deleted policy: its scope ends and gets no new epoch."""
    return isinstance(holder, TenantCachePolicy) and holder.metadata.deleting


def _pool_rolls(world: World, intents: Iterable[RolledScope]) -> Iterator[StatusWrite]:
    """Yield the writes for pools that still have an old epoch, current or next. The new epoch has no computed content,
    so it is not published."""
    gone: dict[str, dict[str, str]] = {}
    for intent in intents:
        if ScopeKind(intent.kind) is ScopeKind.POOL and intent.old_epoch and intent.new_epoch:
            gone.setdefault(intent.name, {})[intent.old_epoch] = intent.new_epoch
    for name, epochs in sorted(gone.items()):
        pool = world.pools.get(name)
        if pool is None or not pool.status.epochs & epochs.keys():
            continue
        now, following = pool.status.scope, pool.status.next
        fields: dict[str, Any] = {}
        if following is not None and following.scope.epoch in epochs:
            fields["next"] = None
        if now is not None and now.epoch in epochs:
            newest = now if following is None or following.scope.rolls < now.rolls else following.scope
            scope = with_stores(world, fresh_epoch(world, pool_scope(name), newest, epochs[now.epoch]))
            fields |= {"scope": scope, "published": None, "warmedAt": None, "usage": None}
        yield StatusWrite(key_of(pool), pool.metadata.resource_version, fields)


def models_with(world: World, intents: Collection[RolledScope]) -> frozenset[str] | None:
    """Return the models with pods that may ever have had the old epochs; None for all, as for the Public scope, and if
    the holder has neither the old nor the new epoch any more."""
    found: set[str] = set()
    for intent in intents:
        models: Collection[str] | None = None
        epochs = (intent.old_epoch, intent.new_epoch)
        match next((one for one, epoch in _holders(world, Scope(intent.kind, intent.name)) if epoch in epochs), None):
            case TenantCachePolicy() as policy:
                models = policy.status.models
            case TenantGroup() as group:
                models = group.status.scope.models if group.status.scope is not None else None
            case PrefixPool() as pool:
                models = (pool.spec.model_ref.name,)
        if models is None:
            return None
        found.update(models)
    return frozenset(found) if intents else None


def holder_of(world: World, scope: Scope) -> Holder | None:
    """Return the object whose status has the epoch of a scope; None before one is drawn."""
    return next((one for one, _ in _holders(world, scope)), None)


def _holders(world: World, scope: Scope) -> Iterator[tuple[Holder, str]]:
    """Yield objects whose status has an epoch of a scope, and the epoch; several are policies, the senior one first."""
    holders: Iterable[Holder | None]
    match scope.kind:
        case ScopeKind.GROUP:
            holders = (world.groups.get(scope.name),)
        case ScopeKind.PUBLIC:
            holders = (world.domain,)
        case ScopeKind.POOL:
            holders = (world.pools.get(scope.name),)
        case _:
            # Of two policies for one tenant only the older one's epoch is in bundles.
            holders = by_seniority(world, scope.name)
    for one in holders:
        if one is not None and (drawn := held(one.status.scope, scope)) is not None:
            yield one, drawn.epoch
