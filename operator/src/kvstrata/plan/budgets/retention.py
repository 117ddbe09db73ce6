"""Shortest retention that the tenants of a shared scope set.

Blocks of a shared scope do not show their tenant, so each tenant's retention applies to all of them. A tenant that
joins can shorten the life of blocks, and lengthen none.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.api.tenantcachepolicy import Isolation, TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.model.world import World
from kvstrata.plan.budgets.classification import shared_scopes


def retentions_in(world: World, policy: TenantCachePolicy, scope: Scope) -> Mapping[str, int]:
    """Return the shortest retention in seconds by tier that policies in `scope` set for shared blocks. Includes the
    policy's own while its group does not admit it."""
    if scope.kind is ScopeKind.TENANT:
        return _shared_by(policy)
    return shared_retentions(world).get(scope, {})


def shared_retentions(world: World) -> Mapping[Scope, Mapping[str, int]]:
    """Return the shortest retention in seconds of each shared scope, by tier."""

    def find() -> Mapping[Scope, Mapping[str, int]]:
        found: dict[Scope, dict[str, int]] = {}
        for policy in world.policies.values():
            own = _shared_by(policy)
            for scope in shared_scopes(world, policy) if own else ():
                shortest = found.setdefault(scope, {})
                shortest |= {tier: min(most_s, shortest.get(tier, most_s)) for tier, most_s in own.items()}
        return found

    return world.memo.get(shared_retentions, world.namespace, (world.entropy,), find)


def retention_sharers(world: World, *policies: TenantCachePolicy) -> frozenset[str]:
    """Return the policies in shared scopes where a policy's change may change the retention. `policies` are its old and
    new version."""
    versions = [(_shared_by(policy), shared_scopes(world, policy)) for policy in policies]
    if not any(own for own, _ in versions) or versions[1:] == versions[:1]:
        return frozenset()
    touched = frozenset[Scope]().union(*(scopes for own, scopes in versions if own))
    return frozenset(
        name for name, policy in world.policies.items() if not touched.isdisjoint(shared_scopes(world, policy))
    )


def _shared_by(policy: TenantCachePolicy) -> dict[str, int]:
    if policy.spec.isolation is Isolation.ISOLATED or policy.metadata.deleting:
        return {}
    return {budget.tier: budget.retention_s for budget in policy.spec.budgets if budget.retention_s is not None}
