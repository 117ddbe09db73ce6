"""Bounds of each keyspace in the CPU tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.policy.cache_view import CacheView


@dataclass(frozen=True, slots=True)
class Bounds:
    """One keyspace's bounds in bytes and seconds; None for unbounded. If `denied`, the limit is 0."""

    limit_bytes: int | None = None
    guaranteed_bytes: int = 0
    retention_s: int | None = None
    denied: bool = False


def bounds_of(view: CacheView | None, tier: str | None) -> dict[str, Bounds]:
    """Return the bounds of every keyspace in `view`; others may keep nothing.

    `tier` is the CPU tier's name, None for a model without one: its memory is a passage to other tiers, without limits
    and guarantees, and the shortest retention of its tiers applies.
    """
    if view is None:
        return {}
    return {keyspace: _bounds(budgets, tier) for keyspace, budgets in view.keyspaces.items()}


def scaled_guarantees(bounds: Mapping[str, Bounds], room_bytes: float) -> dict[str, float]:
    """Return the part of each guarantee that fits into `room_bytes`, without keyspaces that have none.

    The operator admits guarantees up to the room. If they exceed it all the same, each is cut by the same share:
    otherwise a memory full of guarantees could never take a block again.
    """
    promised_bytes = sum(bound.guaranteed_bytes for bound in bounds.values())
    share = min(1.0, room_bytes / promised_bytes) if promised_bytes else 1.0
    return {
        keyspace: bound.guaranteed_bytes * share for keyspace, bound in bounds.items() if bound.guaranteed_bytes > 0
    }


def _bounds(budgets: Iterable[EnforcedBudget], tier: str | None) -> Bounds:
    if tier is None:
        return Bounds(retention_s=min((b.retention_s for b in budgets if b.retention_s is not None), default=None))
    for budget in budgets:
        if budget.tier == tier:
            return Bounds(budget.limit_bytes, budget.guaranteed_bytes or 0, budget.retention_s, budget.denied)
    return Bounds()
