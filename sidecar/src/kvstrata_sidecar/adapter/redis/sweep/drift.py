"""Distinguishes lost leases from grants under way: compares a ledger's charges with its buckets' leases.

A writer that dies during a grant, or a server that falls back to an older copy, leaves a constant difference; a grant
under way differs for a moment only. So the same difference at a second look a little later is a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from kvstrata_sidecar.adapter.redis.budget.scope_state import ScopeView

LOOK_AGAIN_S = 2.0
"""Longer than a grant takes; a rebuild voids the grant of a writer that stalls longer."""


class LeaseDrift:
    """Remembers by how much scopes' leases differed at the last look. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._differed: dict[str, tuple[float, tuple[int, ...]]] = {}

    def found(self, keyspace: str, scope: ScopeView) -> bool:
        """Whether a bucket's lease differs from its charge by as much as at the look before."""
        _, before = self._differed.pop(keyspace, (0.0, ()))
        if scope.ledger.version == 0 or scope.ledger.void:
            return False
        differs = tuple(
            bucket.lease - charged for bucket, charged in zip(scope.buckets, scope.ledger.by_bucket, strict=True)
        )
        if any(now != 0 and now == then for now, then in zip(differs, before, strict=False)):
            return True
        if any(differs):
            self._differed[keyspace] = (self._clock() + LOOK_AGAIN_S, differs)
        return False

    def due(self) -> list[str]:
        """Return the scopes to look at again now."""
        now_s = self._clock()
        return [keyspace for keyspace, (at_s, _) in self._differed.items() if at_s <= now_s]

    def retain(self, keyspaces: Set[str]) -> None:
        for gone in self._differed.keys() - keyspaces:
            del self._differed[gone]
