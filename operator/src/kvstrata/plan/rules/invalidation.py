"""Scopes of a CacheInvalidation, and problems of it that schema and CEL cannot see."""

from __future__ import annotations

from kvstrata.api.cacheinvalidation import MAX_SCOPES, CacheInvalidation, InvalidationScope, SharedScopes
from kvstrata.api.reasons import InvalidationReason, SharedReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.keyspace import PUBLIC_SCOPE, Scope, ScopeKind
from kvstrata.contract.receipt.vocabulary import Mode
from kvstrata.model.world import World
from kvstrata.objects.labels import ERASES
from kvstrata.plan.actions import Decision
from kvstrata.plan.rules import absent
from kvstrata.plan.scopes import former_scopes, group_scope, held, pool_scope, scope_in_force, tenant_scope

MAX_ERASED_SCOPES = 2_048
"""Scopes of one erasure: its record, with keys, chunk names and reports, is a Secret of 1 MiB."""


def leaves_nothing_of_a_prefix(world: World, invalidation: CacheInvalidation) -> Decision | None:
    """The keyspaces of a prefix stay in use: copies left on a node would be found again."""
    folders = _kept_on_nodes(world)
    if invalidation.spec.scope.prefix is None or not folders:
        return None
    return Decision(
        InvalidationReason.PREFIX_NOT_ERASABLE,
        f"CacheTier {folders[0]} keeps files of former pods on nodes, where a prefix would be found again: create one "
        "that names the tenants or the model, whose scopes are invalidated as a whole; nothing was done",
    )


def is_of_a_policy_that_is_deleted(world: World, invalidation: CacheInvalidation) -> Decision | None:
    """An invalidation ordered by a policy's deletion applies to that policy only."""
    if ERASES not in invalidation.metadata.annotations or erased_policy(world, invalidation) is not None:
        return None
    return Decision(
        InvalidationReason.POLICY_GONE,
        f"the TenantCachePolicy of tenant {invalidation.spec.scope.tenant or ''} that annotation {ERASES} names by its "
        f"uid is not being deleted in namespace {world.namespace}: nothing was done; without the annotation an "
        "invalidation is about the tenant's present policy",
    )


def names_something_that_exists(world: World, invalidation: CacheInvalidation) -> Decision | None:
    """A name that matches nothing is a mistake, not a success."""
    scope = invalidation.spec.scope
    unknown = [tenant for tenant in scope.named_tenants if not world.policies_of_tenant.get(tenant)]
    if unknown:
        return Decision(
            InvalidationReason.TENANT_NOT_FOUND,
            f"no TenantCachePolicy of namespace {world.namespace} speaks for tenant {unknown[0]}: nothing of it is "
            "cached under a policy; correct the name",
        )
    if scope.group is not None and scope.group not in world.groups:
        return absent(world, InvalidationReason.GROUP_NOT_FOUND, f"TenantGroup {scope.group}", "correct the name")
    if scope.pool is not None and scope.pool not in world.pools:
        return absent(world, SharedReason.POOL_NOT_FOUND, f"PrefixPool {scope.pool}", "correct the name")
    model = _model(scope)
    if model is not None and model not in world.models:
        remedy = "correct the name; of a model that was deleted, name the tenants that used it"
        return absent(world, SharedReason.MODEL_NOT_FOUND, f"CachedModel {model}", remedy)
    return None


def handles_shared_scopes(world: World, invalidation: CacheInvalidation) -> Decision | None:
    """Other tenants read a sharing tenant's blocks: the user must choose between their hits and its traces."""
    named = invalidation.spec.scope.named_tenants
    shared = shared_by(world, *_policies(world, invalidation)) if named else ()
    if not shared or invalidation.spec.shared_scopes is not None:
        return None
    return Decision(
        InvalidationReason.SHARED_SCOPE_CHOICE_REQUIRED,
        f"tenant {', '.join(named[:3])} shares or shared scope {', '.join(map(str, shared))}: create one with "
        "sharedScopes Roll (invalidate it for everyone) or Exclude (leave it, named as residue)",
    )


def is_no_more_than_can_be_written_down(world: World, invalidation: CacheInvalidation) -> Decision | None:
    """Every old epoch is recorded before any roll: in a status, and for an erasure in a Secret."""
    eager = invalidation.spec.mode is Mode.EAGER
    most = MAX_ERASED_SCOPES if eager else MAX_SCOPES
    scopes = scopes_to_roll(world, invalidation)
    pools = (world.pools[scope.name] for scope in scopes if scope.kind is ScopeKind.POOL)
    found = len(scopes) + sum(pool.status.next is not None for pool in pools)
    if found <= most:
        return None
    return Decision(
        InvalidationReason.TOO_MANY_SCOPES,
        f"{invalidation.spec.scope.summary} comes to {found:,} scopes, and one {'eager ' if eager else ''}invalidation "
        f"takes {most:,}: nothing was done; name models, groups, pools or tenants",
    )


RULES = (
    leaves_nothing_of_a_prefix,
    is_of_a_policy_that_is_deleted,
    names_something_that_exists,
    handles_shared_scopes,
    is_no_more_than_can_be_written_down,
)


def scopes_to_roll(world: World, invalidation: CacheInvalidation) -> tuple[Scope, ...]:
    """Return the scopes to roll, sorted and unique; for a prefix those to pause."""
    scope, choice = invalidation.spec.scope, invalidation.spec.shared_scopes
    if scope.group is not None:
        return (group_scope(scope.group),)
    if scope.pool is not None:
        return tuple(_pools(world) & {pool_scope(scope.pool)})
    policies = _policies(world, invalidation)
    chosen = {tenant_scope(policy) for policy in policies if _has_own_scope(world, policy)}
    if scope.all:
        chosen |= {PUBLIC_SCOPE, *map(group_scope, world.groups), *_pools(world)}
    elif choice is SharedScopes.ROLL or (choice is None and not scope.named_tenants):
        chosen |= {*shared_by(world, *policies)}
    if scope.model is not None:
        chosen |= _pools(world, scope.model)
    return tuple(sorted(chosen))


def erased_policy(world: World, invalidation: CacheInvalidation) -> TenantCachePolicy | None:
    uid = invalidation.metadata.annotations.get(ERASES, "")
    policy = world.policies.get(world.policy_names.get(uid, ""))
    if policy is None or policy.uid != uid or not policy.metadata.deleting:
        return None
    return policy if policy.spec.tenant == invalidation.spec.scope.tenant else None


def scopes_to_leave(world: World, invalidation: CacheInvalidation) -> tuple[Scope, ...]:
    """Return excluded scopes with possible data of the order's tenants: by choice of the user, and for a prefix the
    pools of its model, which have their own content."""
    prefix = invalidation.spec.scope.prefix
    left = _pools(world, prefix.model_ref.name) if prefix is not None else set()
    if invalidation.spec.shared_scopes is SharedScopes.EXCLUDE:
        left |= {*shared_by(world, *_policies(world, invalidation))}
    return tuple(sorted(left))


def shared_by(world: World, *policies: TenantCachePolicy) -> tuple[Scope, ...]:
    """Return the shared scopes that a tenant with these policies is in or has left, and may have written to."""
    scopes = {scope_in_force(world, policy) for policy in policies}
    scopes |= {Scope(left.kind, left.name) for policy in policies for left in former_scopes(world, policy)}
    return tuple(sorted(scope for scope in scopes if scope.kind is not ScopeKind.TENANT))


def _kept_on_nodes(world: World) -> list[str]:
    listed = {name for model in world.models.values() for name in model.tier_names}
    return sorted(name for name in listed if (tier := world.tiers.get(name)) is not None and tier.spec.outlives_pods)


def _has_own_scope(world: World, policy: TenantCachePolicy) -> bool:
    own = tenant_scope(policy)
    return scope_in_force(world, policy) == own or held(policy.status.scope, own) is not None


def _pools(world: World, model: str | None = None) -> set[Scope]:
    """Return the scopes of pools, of `model` or all; one without an epoch has computed nothing."""
    return {
        pool_scope(name)
        for name, pool in world.pools.items()
        if pool.status.scope is not None and model in (None, pool.spec.model_ref.name)
    }


def _model(scope: InvalidationScope) -> str | None:
    return scope.prefix.model_ref.name if scope.prefix is not None else scope.model


def _policies(world: World, invalidation: CacheInvalidation) -> list[TenantCachePolicy]:
    """Return the policies of the tenants that an invalidation is about."""
    scope = invalidation.spec.scope
    if ERASES in invalidation.metadata.annotations:
        policy = erased_policy(world, invalidation)
        return [policy] if policy is not None else []
    if scope.named_tenants:
        names = (name for tenant in scope.named_tenants for name in world.policies_of_tenant.get(tenant, ()))
        return [world.policies[name] for name in names]
    if (name := _model(scope)) is None:
        return [*world.policies.values()]
    model, committed = world.models[name], world.bundles.get(name)
    served = {entry.policy for entry in committed.bundle.entries.values()} if committed else set()
    return [
        policy
        for policy in world.policies.values()
        if policy.uid in served or policy.spec.covers(model.name, model.metadata.labels)
    ]
