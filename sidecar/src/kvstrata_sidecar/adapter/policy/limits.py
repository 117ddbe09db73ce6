"""Bounds of scopes in tiers: the policy's budgets as tiers enforce them. Pure.

Memory and files enforce `Bounds`, a shared tier `SharedBounds`. A new field of a budget becomes a field of both here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.cache_view import CacheView


@dataclass(frozen=True, slots=True)
class Bounds:
    """A scope's bounds in one tier, in bytes and seconds; None for unbounded. If `denied`, the limit is 0."""

    limit_bytes: int | None = None
    guaranteed_bytes: int = 0
    retention_s: int | None = None
    denied: bool = False

    @property
    def retention_ms(self) -> int | None:
        return None if self.retention_s is None else 1000 * self.retention_s

    def shared(self, capacity_bytes: int | None) -> SharedBounds | None:
        """Return the bounds in a shared tier; `capacity_bytes` is the capacity that its scopes divide, if any."""
        if capacity_bytes is None:
            return None if self.limit_bytes is None else SharedBounds(self.limit_bytes)
        limit_bytes = capacity_bytes if self.limit_bytes is None else min(capacity_bytes, self.limit_bytes)
        return SharedBounds(limit_bytes, self.guaranteed_bytes, capacity_bytes)


@dataclass(frozen=True, slots=True)
class SharedBounds:
    """Limit of a scope in a shared tier; if the tier's capacity is divided, also its guarantee and the capacity."""

    limit_bytes: int
    guaranteed_bytes: int = 0
    capacity_bytes: int | None = None

    @property
    def divided(self) -> bool:
        """Whether the tier has to grant the scope capacity."""
        return self.capacity_bytes is not None

    @property
    def kept_bytes(self) -> int:
        """Bytes that are never taken back from the scope."""
        return min(self.guaranteed_bytes, self.limit_bytes)


def bounds_in(budgets: Iterable[EnforcedBudget], tier: str) -> Bounds:
    """Return the bounds that a scope's `budgets` set in `tier`."""
    for budget in budgets:
        if budget.tier == tier:
            return Bounds(budget.limit_bytes, budget.guaranteed_bytes or 0, budget.retention_s, budget.denied)
    return Bounds()


def bounds_of(view: CacheView | None, tier: str | None) -> dict[str, Bounds]:
    """Return the bounds of every keyspace in `view`; others may keep nothing. `tier` is None for the memory of a model
    without a CPU tier: it is a passage to other tiers, without limits and guarantees, and the shortest retention of its
    tiers applies."""
    if view is None:
        return {}
    if tier is not None:
        return {keyspace: bounds_in(budgets, tier) for keyspace, budgets in view.keyspaces.items()}
    return {keyspace: Bounds(retention_s=_shortest_s(budgets)) for keyspace, budgets in view.keyspaces.items()}


def scaled_guarantees(bounds: Mapping[str, Bounds], room_bytes: float) -> dict[str, float]:
    """Return the part of each guarantee that fits into `room_bytes`, without keyspaces that have none. The operator
    admits guarantees up to the room. If they exceed it nevertheless, each is cut by the same share: otherwise a memory
    full of guarantees could never take a block again."""
    promised_bytes = sum(bound.guaranteed_bytes for bound in bounds.values())
    share = min(1.0, room_bytes / promised_bytes) if promised_bytes else 1.0
    return {
        keyspace: bound.guaranteed_bytes * share for keyspace, bound in bounds.items() if bound.guaranteed_bytes > 0
    }


def _shortest_s(budgets: Iterable[EnforcedBudget]) -> int | None:
    return min((budget.retention_s for budget in budgets if budget.retention_s is not None), default=None)
