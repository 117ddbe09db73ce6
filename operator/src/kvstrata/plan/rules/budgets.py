"""Problems of budgets of a policy, a group or the public scope."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.common import TierBudget
from kvstrata.api.reasons import PolicyReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.model.world import World
from kvstrata.objects.quantities import readable
from kvstrata.objects.sizing import stored_bytes
from kvstrata.plan.actions import Decision


def problem(
    world: World, budgets: Sequence[TierBudget], field: str, policy: TenantCachePolicy | None = None
) -> Decision | None:
    """Return what is wrong with budgets that `field` declares; those of a `policy` must admit its classification."""
    for budget in budgets:
        if budget.name not in world.tiers:
            known = ", ".join(sorted(world.tiers)) or "none"
            return Decision(
                PolicyReason.TIER_NOT_FOUND,
                f"CacheTier {budget.name} does not exist in namespace {world.namespace} (there: {known}): "
                f"create it or correct {field}",
            )
    for budget in budgets:
        tier = world.tiers[budget.name]
        found = _misfit(budget, tier, field) or (_not_admitted(tier, policy) if policy is not None else None)
        if found:
            return found
    return None


def _misfit(budget: TierBudget, tier: CacheTier, field: str) -> Decision | None:
    """A budget may not promise what its tier cannot hold or keep."""
    if tier.spec.medium is Medium.HBM and (budget.limit is not None or budget.guaranteed is not None):
        return Decision(
            PolicyReason.BUDGET_NOT_SUPPORTED,
            f"CacheTier {tier.name} is HBM, where the engine knows no budgets: leave only retention in {field}",
        )
    room_bytes = stored_bytes(tier.spec)
    if room_bytes is not None and budget.guaranteed_bytes > room_bytes:
        return Decision(
            PolicyReason.GUARANTEE_EXCEEDS_CAPACITY,
            f"guaranteed {budget.guaranteed} on CacheTier {tier.name} is more than the {readable(room_bytes)} of its "
            "capacity that blocks may take: lower it",
        )
    longest_s = tier.spec.max_retention_s
    if longest_s is not None and budget.retention_s is not None and budget.retention_s > longest_s:
        return Decision(
            PolicyReason.RETENTION_EXCEEDS_TIER,
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
        PolicyReason.CLASSIFICATION_NOT_ALLOWED,
        f"CacheTier {tier.name} does not allow data of classification {level}{unsaid}: pods keep it off; choose "
        "another tier in spec.tiers",
    )
