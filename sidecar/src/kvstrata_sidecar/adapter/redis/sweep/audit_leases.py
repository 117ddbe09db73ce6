"""Finds differences between a ledger's charges and its buckets' leases.

A writer that dies during a lease, or a server that falls back to an older copy, leaves a constant difference; a lease
under way differs for a moment only. So the same difference at a second look a little later is a loss.
"""

from __future__ import annotations

from kvstrata_sidecar.adapter.redis.client.commands import Transport
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.sweep.sweeper import Deadline, SweeperConnection

LOOK_AGAIN_S = 2.0
"""Longer than a lease takes; a rebuild voids the lease of a writer that stalls longer."""


class AuditLeases:
    """A job that remembers by how much scopes' leases differed at the last look."""

    def __init__(self, deps: TierDeps) -> None:
        self._deps = deps
        self._differed: dict[str, tuple[float, tuple[int, ...]]] = {}

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:  # noqa: ARG002
        now_s = self._deps.clock()
        for keyspace, noted in [*self._differed.items()]:
            if noted[0] > now_s or connection.attempt(keyspace, self.compare):
                continue
            if self._differed.get(keyspace) is noted:  # the policy does not allow the tier for it any more
                del self._differed[keyspace]
        return False

    def compare(self, transport: Transport, keyspace: str) -> None:
        """Rebuild a ledger that differs from a bucket by as much as at the look before."""
        ledger = self._deps.ledgers.of(transport, keyspace)
        scope = ledger.view()
        _, before = self._differed.pop(keyspace, (0.0, ()))
        if scope.ledger.lost:
            return
        differs = tuple(one.lease - charged for one, charged in zip(scope.buckets, scope.ledger.by_bucket, strict=True))
        if any(now != 0 and now == then for now, then in zip(differs, before, strict=False)):
            self._deps.count("drift_leases", 1, keyspace)
            # A bucket with more than its charge may have brought the scope above its limit.
            self._deps.inbox.urge(keyspace)
            ledger.rebuild(scope.ledger.version)
        elif any(differs):
            self._differed[keyspace] = (self._deps.clock() + LOOK_AGAIN_S, differs)
