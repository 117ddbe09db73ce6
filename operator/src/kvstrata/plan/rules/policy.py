"""Problems of a TenantCachePolicy that schema and CEL cannot see.

`BLOCKING` rules keep the last enforced policy in force; `ISOLATING` ones let the policy act, with the tenant isolated.
"""

from __future__ import annotations

from kvstrata.api.reasons import PolicyReason
from kvstrata.api.tenantcachepolicy import Isolation, TenantCachePolicy
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision
from kvstrata.plan.rules import budgets


def only_policy_of_its_tenant(world: World, policy: TenantCachePolicy) -> Decision | None:
    """Of two policies for one tenant the older applies, unless it is under deletion."""
    if policy.spec.tenant not in world.contested:
        return None
    winner = by_seniority(world, policy.spec.tenant)[0]
    if seniority(winner) >= seniority(policy):
        return None
    return Decision(
        PolicyReason.TENANT_CONFLICT,
        f"TenantCachePolicy {winner.name} is older and already speaks for tenant {policy.spec.tenant}: "
        "delete one of the two",
    )


def budgets_fit_their_tiers(world: World, policy: TenantCachePolicy) -> Decision | None:
    return budgets.problem(world, policy.spec.tiers, "spec.tiers", policy)


def models_exist(world: World, policy: TenantCachePolicy) -> Decision | None:
    """Named models must exist; a selector may select none."""
    chosen = policy.spec.models
    for name in (chosen.names if chosen else None) or ():
        if name not in world.models:
            return Decision(
                PolicyReason.MODEL_NOT_FOUND,
                f"CachedModel {name} does not exist in namespace {world.namespace}: create it or correct spec.models",
            )
    return None


def group_exists(world: World, policy: TenantCachePolicy) -> Decision | None:
    if policy.spec.isolation is not Isolation.GROUP or policy.spec.group_name in world.groups:
        return None
    return Decision(
        PolicyReason.GROUP_NOT_FOUND,
        f"TenantGroup {policy.spec.group_name} does not exist in namespace {world.namespace}: create it or correct "
        "spec.groupRef; until then the tenant is isolated",
    )


def group_lists_the_tenant(world: World, policy: TenantCachePolicy) -> Decision | None:
    """The right to edit a policy is not the right to join a group: the group must list the tenant."""
    group = world.groups.get(policy.spec.group_name or "")
    if policy.spec.isolation is not Isolation.GROUP or group is None or policy.spec.tenant in group.spec.members:
        return None
    return Decision(
        PolicyReason.NOT_A_MEMBER,
        f"TenantGroup {group.name} does not list tenant {policy.spec.tenant}: add it to spec.members of the group; "
        "until then the tenant is isolated",
    )


BLOCKING = (only_policy_of_its_tenant, budgets_fit_their_tiers, models_exist)
ISOLATING = (group_exists, group_lists_the_tenant)


def by_seniority(world: World, tenant: str) -> list[TenantCachePolicy]:
    """Return the policies for a tenant, the applicable one first and those under deletion last."""
    return sorted((world.policies[name] for name in world.policies_of_tenant.get(tenant, ())), key=seniority)


def seniority(policy: TenantCachePolicy) -> tuple[bool, float, str]:
    created = policy.metadata.creation_timestamp
    return (policy.metadata.deleting, created.timestamp() if created else 0.0, policy.uid)
