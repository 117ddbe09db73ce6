"""Counters and latencies of one tier, in total and by scope."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping

from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.prometheus_text import Histogram

MAX_SCOPES = 100
"""Scopes with counts of their own; further ones share one, which bounds the metrics page."""

OTHER = "_other"
NO_SCOPE = "_none"

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

AGE_BUCKETS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0)
"""Up to a week, for the time since a block's tokens were computed."""

HIT, EVICTION = "hit", "eviction"
"""Moments at which a block's age is observed."""

OUTSIDE = frozenset({Refusal.NO_POLICY, Refusal.MALFORMED_KEYSPACE, Refusal.UNKNOWN_KEYSPACE})
"""Reasons that name no scope: requests with random salts create no counts."""


class Counters:
    """Named counts of one tier, for status and metrics. Thread-safe."""

    def __init__(self, max_scopes: int = MAX_SCOPES) -> None:
        self._lock = threading.Lock()
        self._max_scopes = max_scopes
        self._counts: Counter[str] = Counter()
        self._scopes: dict[str, Counter[str]] = {}
        self._latencies: dict[str, Histogram] = {}
        self._ages: dict[str, Histogram] = {}

    def add(self, name: str, amount: int = 1, keyspace: str = "") -> None:
        self.add_all(keyspace, **{name: amount})

    def add_all(self, keyspace: str, **amounts: int) -> None:
        """Add to several counts of a scope, or to those of none; zeros leave no trace."""
        some = {name: amount for name, amount in amounts.items() if amount}
        with self._lock:
            self._counts.update(some)
            if keyspace and some:
                self._scope(keyspace[:SCOPE_DIGITS]).update(some)

    def refuse(self, refusal: Refusal, amount: int = 1, keyspace: str = "") -> None:
        """Count blocks that were neither stored nor looked up, by reason."""
        with self._lock:
            self._counts["refused"] += amount
            self._counts[f"refused_{refusal}"] += amount
            scope = NO_SCOPE if refusal in OUTSIDE else keyspace[:SCOPE_DIGITS]
            if scope:
                self._scope(scope)[f"refused_{refusal}"] += amount

    def observe(self, operation: str, seconds: float) -> None:
        with self._lock:
            self._latencies.setdefault(operation, Histogram(LATENCY_BUCKETS_S)).add(seconds)

    def age(self, moment: str, seconds: float) -> None:
        """Count the time since a block's tokens were computed, at a `hit` or an `eviction`."""
        with self._lock:
            self._ages.setdefault(moment, Histogram(AGE_BUCKETS_S)).add(max(0.0, seconds))

    def retain(self, keyspaces: Collection[str]) -> None:
        """Drop the counts of scopes that left the policy, which makes room for others."""
        kept = {keyspace[:SCOPE_DIGITS] for keyspace in keyspaces} | {OTHER, NO_SCOPE}
        with self._lock:
            self._scopes = {scope: counts for scope, counts in self._scopes.items() if scope in kept}

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def by_scope(self) -> dict[str, Mapping[str, int]]:
        """Return the counts by scope: the first digits of the keyspace, `_other` or `_none`."""
        with self._lock:
            return {scope: dict(counts) for scope, counts in self._scopes.items()}

    def latencies(self) -> dict[str, Histogram]:
        with self._lock:
            return {name: one.copy() for name, one in self._latencies.items()}

    def ages(self) -> dict[str, Histogram]:
        with self._lock:
            return {name: one.copy() for name, one in self._ages.items()}

    def _scope(self, scope: str) -> Counter[str]:
        found = self._scopes.get(scope)
        if found is None:
            if len(self._scopes) >= self._max_scopes and scope not in (OTHER, NO_SCOPE):
                return self._scope(OTHER)
            found = self._scopes[scope] = Counter()
        return found
