"""Scopes and epochs: which blocks a tenant may reuse, and since when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstrata.api.common import ScopeStatus
from kvstrata.api.tenantcachepolicy import FormerScope, Isolation, TenantCachePolicy
from kvstrata.api.tenantgroup import Sharing
from kvstrata.contract.policy.keyspace import PUBLIC_SCOPE, Scope, ScopeKind, derive_keyspace, epoch_from_random
from kvstrata.model.refs import Key
from kvstrata.model.world import World


@dataclass(frozen=True, slots=True)
class Epoch:
    scope: Scope
    value: str
    rolls: int
    holder: Key

    def keyspace(self, domain_key: bytes) -> str:
        return derive_keyspace(domain_key, self.scope, self.value)

    def to_status(self) -> dict[str, Any]:
        return {"kind": str(self.scope.kind), "name": self.scope.name, "epoch": self.value, "rolls": self.rolls}


def tenant_scope(policy: TenantCachePolicy) -> Scope:
    return Scope(ScopeKind.TENANT, policy.spec.tenant)


def group_scope(name: str) -> Scope:
    return Scope(ScopeKind.GROUP, name)


def pool_scope(name: str) -> Scope:
    """Return the scope of a PrefixPool; only its warming writes to it."""
    return Scope(ScopeKind.POOL, name)


def is_member(world: World, policy: TenantCachePolicy, name: str | None) -> bool:
    group = world.groups.get(name or "")
    return (
        group is not None
        and not group.metadata.deleting
        and group.spec.effective_sharing is Sharing.FULL
        and policy.spec.tenant in group.spec.members
    )


def scope_in_force(world: World, policy: TenantCachePolicy) -> Scope:
    """Return the scope of the policy's tenant now. Sharing needs both sides' consent: a policy that names a group
    without its tenant stays isolated."""
    match policy.spec.isolation:
        case Isolation.PUBLIC:
            return PUBLIC_SCOPE
        case Isolation.GROUP if policy.spec.group_name and is_member(world, policy, policy.spec.group_name):
            return group_scope(policy.spec.group_name)
        case _:
            return tenant_scope(policy)


def current_epoch(world: World, policy: TenantCachePolicy) -> Epoch | None:
    """Return the epoch of the scope in force, or None while it is not drawn."""
    return epoch_of(world, policy, scope_in_force(world, policy))


def epoch_of(world: World, policy: TenantCachePolicy, scope: Scope) -> Epoch | None:
    """Return the epoch of a scope that the policy was in, or None if its tenant may no longer use it."""
    if scope.kind is ScopeKind.GROUP and not is_member(world, policy, scope.name):
        return None
    holder, status = _holder(world, policy, scope)
    epoch = held(status, scope)
    return Epoch(scope, epoch.epoch, epoch.rolls, holder) if epoch else None


def shared_epoch(world: World, scope: Scope) -> ScopeStatus | None:
    """Return a shared scope's status, regardless of access; None for a scope that is gone."""
    match scope.kind:
        case ScopeKind.GROUP:
            group = world.groups.get(scope.name)
            return held(group.status.scope, scope) if group else None
        case ScopeKind.PUBLIC:
            return held(world.domain.status.scope, scope) if world.domain else None
        case _:
            return None


def former_scopes(world: World, policy: TenantCachePolicy) -> tuple[FormerScope, ...]:
    """Return the shared scopes that the tenant has left and may have written to, while their epoch is in use."""
    shown = policy.status.scope
    left = [*policy.status.former_scopes]
    if shown is not None:
        left.append(FormerScope(kind=shown.kind, name=shown.name, epoch=shown.epoch))
    now = scope_in_force(world, policy)
    alive: dict[tuple[str, str], FormerScope] = {}
    for former in left:
        scope = Scope(ScopeKind(former.kind), former.name)
        current = shared_epoch(world, scope)
        if scope != now and current is not None and current.epoch == former.epoch:
            alive[str(scope.kind), scope.name] = former
    return tuple(former for _, former in sorted(alive.items()))


def held(status: ScopeStatus | None, scope: Scope) -> ScopeStatus | None:
    """Return `status` if it is about `scope`, else None."""
    if status and (str(status.kind), status.name) == (str(scope.kind), scope.name):
        return status
    return None


def fresh_epoch(world: World, scope: Scope, holder: Key, previous: ScopeStatus | None) -> Epoch:
    return Epoch(scope, epoch_from_random(world.entropy[:16]), previous.rolls + 1 if previous else 0, holder)


def _holder(world: World, policy: TenantCachePolicy, scope: Scope) -> tuple[Key, ScopeStatus | None]:
    match scope.kind:
        case ScopeKind.GROUP:
            group = world.groups[scope.name]
            return Key("TenantGroup", world.namespace, group.name), group.status.scope
        case ScopeKind.PUBLIC:
            domain = world.domain
            return Key("CacheDomain", world.namespace, "default"), domain.status.scope if domain else None
        case _:
            return Key("TenantCachePolicy", world.namespace, policy.name), policy.status.scope
