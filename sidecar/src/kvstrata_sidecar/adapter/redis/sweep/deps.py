"""Dependencies shared by the jobs of one tier's sweeper."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.redis.budget.ledger import Ledgers
from kvstrata_sidecar.adapter.redis.recent import Recent
from kvstrata_sidecar.adapter.redis.revoked import RevokedSet
from kvstrata_sidecar.adapter.redis.sweep.inbox import Inbox
from kvstrata_sidecar.adapter.redis.terms import ScopeTerms


@dataclass(frozen=True, slots=True)
class SweepDeps:
    """`usage` has bytes and blocks of scopes when this process last saw them. `token` names it in claims, `jitter`
    returns a number from 0 to 1.
    """

    domain: str
    tier: TierParams
    enforcement: Enforcement
    terms: ScopeTerms
    ledgers: Ledgers
    revoked: RevokedSet
    inbox: Inbox
    usage: Recent[str, tuple[int, int]]
    token: bytes
    interval_s: float
    clock: Callable[[], float]
    jitter: Callable[[], float]

    @property
    def claim_ms(self) -> int:
        """Life of a claim that keeps other pods from the same work for an interval."""
        return int(self.interval_s * 750)

    def next_round_s(self) -> float:
        """Return when work is due that was begun now and is done once an interval."""
        return self.clock() + self.interval_s * (0.8 + 0.4 * self.jitter())

    def listed(self) -> Collection[str]:
        """Return the keyspaces of the policy in force."""
        view = self.enforcement.view
        return view.keyspaces.keys() if view is not None else ()

    def count(self, name: str, amount: int, keyspace: str = "") -> None:
        if amount:
            self.ledgers.count(name, amount, keyspace)
