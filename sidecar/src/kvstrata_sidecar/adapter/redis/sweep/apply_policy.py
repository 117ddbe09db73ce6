"""Applies a policy's changes to one tier: scope by scope, as soon as it is in force."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial

from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.redis.client.commands import Transport
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.sweep.connection import Deadline, SweeperConnection
from kvstrata_sidecar.adapter.redis.sweep.inbox import Terms
from kvstrata_sidecar.adapter.redis.sweep.scopes import clamp


class ApplyPolicy:
    """Applies changed bounds and retentions; scopes for which that fails are tried again after all others. Asks which
    keyspaces of a new policy the tier has revoked.
    """

    def __init__(self, deps: TierDeps) -> None:
        self._deps = deps
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
                self._followed = view
                self._deps.inbox.changes.follow(
                    {name: (terms.bounds(name), terms.retention_ms(name)) for name in view.keyspaces}
                )

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:
        self.follow()
        deps, view = self._deps, self._deps.enforcement.view
        if view is not self._checked:
            self._checked = view
            self._waiting.clear()
            with connection.isolated("The check of revoked keyspaces"):
                deps.revoked.learn(connection.transport(), deps.listed())
        self._waiting = self._waiting or deque(deps.inbox.changes.pending())
        while self._waiting and not deadline.is_interrupted():
            keyspace, terms = self._waiting.popleft()
            connection.attempt(keyspace, partial(self._apply, terms=terms))
        return bool(self._waiting)

    def _apply(self, transport: Transport, keyspace: str, terms: Terms) -> None:
        bounds, life_ms = terms
        ledger = self._deps.ledgers.of(transport, keyspace, bounds)
        scope = ledger.view()
        self._deps.usage.put(keyspace, scope.usage)
        clamp(transport, scope, life_ms)
        ledger.charge(scope.ledger)
        is_above = bounds is not None and scope.above(bounds.limit_bytes) and ledger.settle() > 0
        if not is_above and all(bucket.known for bucket in scope.buckets):
            self._deps.inbox.changes.applied(keyspace, terms)
