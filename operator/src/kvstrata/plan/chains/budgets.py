"""What can be wrong with budgets, whoever has them: a policy, a group or the public scope."""

from __future__ import annotations

from collections.abc import Iterable

from kvstrata.api.cachetier import CacheTier, CacheTierSpec, Medium
from kvstrata.api.common import TierBudget
from kvstrata.api.reasons import PolicyReason
from kvstrata.model.world import World
from kvstrata.plan.types import Decision


def problem(world: World, budgets: Iterable[TierBudget], field: str) -> Decision | None:
    """Return what is wrong with the first bad budget, or None. `field` is where the budgets stand in the spec.

    The reasons are the same words on every kind.
    """
    listed = tuple(budgets)
    return missing_tier(world, listed, field) or next(
        (found for budget in listed if (found := misfit(budget, world.tiers[budget.name], field))), None
    )


def missing_tier(world: World, budgets: Iterable[TierBudget], field: str) -> Decision | None:
    """Every tier with a budget must be there."""
    for budget in budgets:
        if budget.name not in world.tiers:
            known = ", ".join(sorted(world.tiers)) or "none"
            return Decision(
                PolicyReason.TIER_NOT_FOUND,
                f"CacheTier {budget.name} does not exist in namespace {world.namespace} (there: {known}): "
                f"create it or correct {field}",
            )
    return None


def misfit(budget: TierBudget, tier: CacheTier, field: str) -> Decision | None:
    """A budget may not promise what its tier cannot hold or keep."""
    if tier.spec.medium is Medium.HBM and (budget.limit is not None or budget.guaranteed is not None):
        return Decision(
            PolicyReason.BUDGET_NOT_SUPPORTED,
            f"CacheTier {tier.name} is HBM, where the engine knows no budgets: leave only retention in {field}",
        )
    room_bytes = reservable_bytes(tier.spec)
    if room_bytes is not None and budget.guaranteed_bytes > room_bytes:
        whole = "its whole capacity"
        if tier.spec.medium is Medium.CPU:
            whole = f"{tier.spec.high_watermark_percent}% of its capacity, above which pods make room"
        return Decision(
            PolicyReason.GUARANTEE_EXCEEDS_CAPACITY,
            f"guaranteed {budget.guaranteed} on CacheTier {tier.name} is more than {whole}: lower it",
        )
    longest_s = tier.spec.max_retention_s
    if longest_s is not None and budget.retention_s is not None and budget.retention_s > longest_s:
        return Decision(
            PolicyReason.RETENTION_EXCEEDS_TIER,
            f"retention {budget.retention} on CacheTier {tier.name} is longer than its maxRetention "
            f"{tier.spec.max_retention}: shorten it",
        )
    return None


def reservable_bytes(spec: CacheTierSpec) -> int | None:
    """Return how much of a tier can be guaranteed: of a CPU tier what lies below its mark; None without a capacity."""
    if spec.capacity_bytes is None or spec.medium is not Medium.CPU:
        return spec.capacity_bytes
    return spec.capacity_bytes * spec.high_watermark_percent // 100
