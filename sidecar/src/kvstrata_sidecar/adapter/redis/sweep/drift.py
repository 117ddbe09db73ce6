"""Tells leases that were lost from grants that are under way: what a ledger charges for and what its buckets have.

A writer that dies in the middle of a grant, or a server that falls back to an older copy, leaves a bucket's lease and
what the ledger charges for it apart by an amount that stays. Whoever is in the middle of a grant does so for a moment.
So a bucket that differs is looked at again a little later, however busy the scope is: the same difference is a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from kvstrata_sidecar.adapter.redis.budget.scope_state import ScopeView

LOOK_AGAIN_S = 2.0
"""Longer than a grant takes, but for a writer that stands still; then a rebuild makes what it does next void."""


class LeaseDrift:
    """Remembers which scopes' leases differed when they were last looked at. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._differed: dict[str, tuple[float, tuple[int, ...]]] = {}

    def found(self, keyspace: str, scope: ScopeView) -> bool:
        """Whether a bucket's lease differs from what is charged for it as it did at the look before."""
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
        """Return the scopes that are to be looked at again now."""
        now_s = self._clock()
        return [keyspace for keyspace, (at_s, _) in self._differed.items() if at_s <= now_s]

    def retain(self, keyspaces: Set[str]) -> None:
        """Forget all other scopes."""
        for gone in self._differed.keys() - keyspaces:
            del self._differed[gone]
