"""Problems of a TenantCachePolicy, and of budgets of any scope, that schema and CEL cannot see.

`BLOCKING` rules keep the last enforced policy in force; `ISOLATING` ones let the policy act, with the tenant isolated.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.common import Budget
from kvstrata.api.reasons import PolicyReason, SharedReason
from kvstrata.api.tenantcachepolicy import Isolation, TenantCachePolicy
from kvstrata.api.tenantgroup import Sharing, TenantGroup
from kvstrata.model.world import World
from kvstrata.objects.quantities import readable
from kvstrata.objects.sizing import stored_bytes
from kvstrata.plan.actions import Decision
from kvstrata.plan.rules import absent, absent_tier, age_of


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
    return budget_problem(world, policy.spec.budgets, "spec.budgets", policy)


def budget_problem(
    world: World, budgets: Sequence[Budget], field: str, policy: TenantCachePolicy | None = None
) -> Decision | None:
    """Return the first problem of budgets that `field` declares; those of a `policy` must admit its classification."""
    if missing := absent_tier(world, (budget.tier for budget in budgets), field):
        return missing
    for budget in budgets:
        tier = world.tiers[budget.tier]
        found = _misfit(budget, tier) or (_not_admitted(tier, policy) if policy is not None else None)
        if found:
            return found
    return None


def _misfit(budget: Budget, tier: CacheTier) -> Decision | None:
    """A budget may not exceed its tier's capacity or retention."""
    room_bytes = stored_bytes(tier.spec)
    if budget.guaranteed_bytes > room_bytes:
        return Decision(
            SharedReason.GUARANTEE_EXCEEDS_CAPACITY,
            f"guaranteed {budget.guaranteed} on CacheTier {tier.name} is more than the {readable(room_bytes)} of its "
            "capacity that blocks may take: lower it",
        )
    longest_s = tier.spec.max_retention_s
    if longest_s is not None and budget.retention_s is not None and budget.retention_s > longest_s:
        return Decision(
            SharedReason.RETENTION_EXCEEDS_TIER,
            f"retention {budget.retention} on CacheTier {tier.name} is longer than its maxRetention "
            f"{tier.spec.max_retention}: shorten it",
        )
    return None


def _not_admitted(tier: CacheTier, policy: TenantCachePolicy) -> Decision | None:
    level = policy.spec.effective_classification
    if tier.spec.admits(level):
        return None
    unsaid = "" if policy.spec.classification else ", as which data counts while spec.classification is absent"
    return Decision(
        SharedReason.CLASSIFICATION_NOT_ALLOWED,
        f"CacheTier {tier.name} does not allow data of classification {level}{unsaid}: pods keep it off; choose "
        "another tier in spec.budgets",
    )


def models_exist(world: World, policy: TenantCachePolicy) -> Decision | None:
    """Named models must exist; a selector may select none."""
    chosen = policy.spec.models
    for name in (chosen.names if chosen else None) or ():
        if name not in world.models:
            remedy = "create it or correct spec.models"
            return absent(world, SharedReason.MODEL_NOT_FOUND, f"CachedModel {name}", remedy)
    return None


def group_exists(world: World, policy: TenantCachePolicy) -> Decision | None:
    if policy.spec.isolation is not Isolation.GROUP or policy.spec.group_name in world.groups:
        return None
    remedy = "create it or correct spec.groupRef; until then the tenant is isolated"
    return absent(world, PolicyReason.GROUP_NOT_FOUND, f"TenantGroup {policy.spec.group_name}", remedy)


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
    return (policy.metadata.deleting, *age_of(policy))


def member_policies(world: World, group: TenantGroup) -> tuple[TenantCachePolicy, ...]:
    """Return the policies of members: to share blocks each must name the group, to read pools it need not."""
    members = set(group.spec.members)
    if group.spec.sharing is not Sharing.FULL:
        standing = (by_seniority(world, tenant)[:1] for tenant in sorted(members))
        return tuple(policy for found in standing for policy in found if not policy.metadata.deleting)
    return tuple(
        policy
        for policy in world.policies.values()
        if policy.spec.group_name == group.name and policy.spec.tenant in members and not policy.metadata.deleting
    )
