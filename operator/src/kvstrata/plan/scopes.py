"""Scopes and epochs: which blocks a tenant may reuse, and since when."""

from __future__ import annotations

from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.status import ScopeStatus
from kvstrata.api.tenantcachepolicy import FormerScope, Isolation, TenantCachePolicy
from kvstrata.api.tenantgroup import Sharing, TenantGroup
from kvstrata.contract.policy.keyspace import PUBLIC_SCOPE, Scope, ScopeKind, derive_keyspace, epoch_from_random
from kvstrata.model.world import World


def tenant_scope(policy: TenantCachePolicy) -> Scope:
    return Scope(ScopeKind.TENANT, policy.spec.tenant)


def group_scope(name: str) -> Scope:
    return Scope(ScopeKind.GROUP, name)


def pool_scope(name: str) -> Scope:
    """Return the scope of a PrefixPool; only its warming writes to it."""
    return Scope(ScopeKind.POOL, name)


def is_member(world: World, policy: TenantCachePolicy, name: str | None) -> bool:
    group = world.groups.get(name or "")
    if group is None or group.metadata.deleting:
        return False
    return group.spec.sharing is Sharing.FULL and policy.spec.tenant in group.spec.members


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


def epoch_of(world: World, policy: TenantCachePolicy, scope: Scope) -> ScopeStatus | None:
    """Return the epoch of a scope that the policy was in; None if not drawn, or if its tenant may no longer use it."""
    if scope.kind is ScopeKind.TENANT:
        return held(policy.status.scope, scope)
    if scope.kind is ScopeKind.GROUP and not is_member(world, policy, scope.name):
        return None
    return shared_epoch(world, scope)


def shared_epoch(world: World, scope: Scope) -> ScopeStatus | None:
    """Return a shared scope's epoch, regardless of access; None for a scope that is gone."""
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
    alive: dict[Scope, FormerScope] = {}
    for former in left:
        scope = Scope(former.kind, former.name)
        current = shared_epoch(world, scope)
        if scope != now and current is not None and current.epoch == former.epoch:
            alive[scope] = former
    return tuple(former for _, former in sorted(alive.items()))


def held(status: ScopeStatus | None, scope: Scope) -> ScopeStatus | None:
    """Return `status` if it is about `scope`, else None."""
    return status if status is not None and Scope(status.kind, status.name) == scope else None


def keyspace_of(domain_key: bytes | None, epoch: ScopeStatus | None) -> str | None:
    """Return the keyspace of a scope's epoch; None while it or the domain's key is not drawn."""
    if not domain_key or epoch is None:
        return None
    return derive_keyspace(domain_key, Scope(epoch.kind, epoch.name), epoch.epoch)


def generation_due(holder: TenantCachePolicy | TenantGroup | PrefixPool) -> bool:
    """Whether cacheGeneration was changed since it was last acted on."""
    acted_on = holder.status.cache_generation
    return acted_on is not None and acted_on != holder.spec.cache_generation


def fresh_epoch(world: World, scope: Scope, previous: ScopeStatus | None, drawn: str = "") -> ScopeStatus:
    """Return a scope with the epoch `drawn`, by default a new one, and without stores. No pod has a new epoch of a
    group yet; one `drawn` by an invalidation also represents the epoch that it replaces."""
    epoch, rolls = drawn or epoch_from_random(world.entropy[:16]), previous.rolls + 1 if previous else 0
    models = previous.models if drawn and previous else () if scope.kind is ScopeKind.GROUP else None
    return ScopeStatus(kind=scope.kind, name=scope.name, epoch=epoch, rolls=rolls, models=models)
