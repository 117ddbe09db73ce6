"""Applies a policy's changes to one tier: scope by scope, as soon as it is in force."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from functools import partial

from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.policy.limits import SharedBounds, bounds_of
from kvstrata_sidecar.adapter.redis.budget.scope_state import ScopeView
from kvstrata_sidecar.adapter.redis.client.commands import call, reads_status
from kvstrata_sidecar.adapter.redis.client.resp import Transport
from kvstrata_sidecar.adapter.redis.deps import MAX_WAITING, TierDeps
from kvstrata_sidecar.adapter.redis.sweep.sweeper import Deadline, SweeperConnection

ENTRIES_PER_CALL = 256

Terms = tuple[SharedBounds | None, int | None]
"""A scope's bounds, and the life of its blocks in milliseconds."""


class PolicyChanges:
    """Policy changes that a tier has yet to apply. Thread-safe. `departed` are keyspaces that left the policy and still
    have capacity."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terms: Mapping[str, Terms] = {}
        self._changed: dict[str, Terms] = {}
        self._guarantees_changed = False
        self.departed: dict[str, None] = {}

    def follow(self, terms: Mapping[str, Terms]) -> None:
        """Record the changes of the terms now in force; scopes that left the policy have nothing to apply."""
        with self._lock:
            before, self._terms = self._terms, terms
            self._guarantees_changed = self._guarantees_changed or _guarantees(terms) != _guarantees(before)
            changed = (name for name, one in terms.items() if one != before.get(name, (None, None)))
            self._changed = {name: terms[name] for name in (*self._changed, *changed) if name in terms}
            left = (name for name, (bounds, _) in before.items() if bounds is not None and bounds.divided)
            departed = [name for name in (*self.departed, *left) if name not in terms]
            self.departed = dict.fromkeys(departed[:MAX_WAITING])

    def apply_all_again(self) -> None:
        """Have everything applied again: the tier has other servers."""
        with self._lock:
            self._terms = {}

    def pending(self) -> list[tuple[str, Terms]]:
        with self._lock:
            return list(self._changed.items())

    def applied(self, keyspace: str, terms: Terms) -> None:
        """Record that these terms hold, unless others are in force by now."""
        with self._lock:
            if self._changed.get(keyspace) == terms:
                del self._changed[keyspace]

    def released(self, keyspace: str) -> None:
        """Record that a departed keyspace has no capacity any more but for its blocks."""
        with self._lock:
            self.departed.pop(keyspace, None)

    def take_guarantees_changed(self) -> bool:
        """Whether guarantees changed since the last call: a new one needs loans back."""
        with self._lock:
            changed, self._guarantees_changed = self._guarantees_changed, False
            return changed

    def __len__(self) -> int:
        return len(self._changed)


def _guarantees(terms: Mapping[str, Terms]) -> dict[str, int]:
    return {name: bounds.guaranteed_bytes for name, (bounds, _) in terms.items() if bounds and bounds.guaranteed_bytes}


class ApplyPolicy:
    """Applies changed bounds and retentions; scopes for which that fails are tried again after all others. Asks which
    keyspaces of a new policy the tier has revoked."""

    def __init__(self, deps: TierDeps) -> None:
        self._deps = deps
        self.changes = PolicyChanges()
        self._following = threading.Lock()
        self._followed: CacheView | None = None
        self._checked: CacheView | None = None
        self._waiting: deque[tuple[str, Terms]] = deque()

    def follow(self) -> None:
        """Record the changes of the view in force. Thread-safe."""
        # A lock of its own: thousands of scopes take a while.
        with self._following:
            view, terms = self._deps.enforcement.view, self._deps.terms
            if view is not None and view is not self._followed:
                self._followed, capacity_bytes = view, terms.capacity_bytes
                bounds = {n: terms.in_tier(b) for n, b in bounds_of(view, self._deps.tier.name).items()}
                self.changes.follow({n: (b.shared(capacity_bytes), b.retention_ms) for n, b in bounds.items()})

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:
        self.follow()
        deps, view = self._deps, self._deps.enforcement.view
        if view is not self._checked:
            self._checked = view
            self._waiting.clear()
            with connection.isolated("The check of revoked keyspaces"):
                deps.revoked.learn(connection.transport(), deps.listed())
        self._waiting = self._waiting or deque(self.changes.pending())
        while self._waiting and not deadline.is_interrupted():
            keyspace, terms = self._waiting.popleft()
            connection.attempt(keyspace, partial(self._apply, terms=terms))
        return bool(self._waiting)

    def _apply(self, transport: Transport, keyspace: str, terms: Terms) -> None:
        bounds, life_ms = terms
        ledgers = self._deps.ledgers
        ledger = ledgers.of(transport, keyspace, bounds)
        scope = ledger.view()
        self._deps.usage.put(keyspace, scope.usage)
        clamp(transport, scope, life_ms)
        if bounds is not None and bounds.divided:
            ledgers.capacity.charge(transport, keyspace, bounds, scope.ledger)
        is_above = bounds is not None and scope.above(bounds.limit_bytes) and ledger.settle() > 0
        if not is_above and all(bucket.known for bucket in scope.buckets):
            self.changes.applied(keyspace, terms)


def clamp(transport: Transport, scope: ScopeView, life_ms: int | None) -> None:
    """Shorten lives in buckets with blocks that may live longer than `life_ms`, None for no bound."""
    steps = [(one.state, 0, 0) for one in scope.buckets if life_ms is not None and one.longest_ms > life_ms]
    while steps and life_ms is not None:
        commands = [
            call("clamp", state, reads_status(2), life_ms=life_ms, since=since, cursor=cursor, count=ENTRIES_PER_CALL)
            for state, cursor, since in steps
        ]
        answers = zip(steps, transport.ask(commands), strict=True)
        steps = [(step[0], cursor, since) for step, (status, (cursor, since)) in answers if status != "done"]
