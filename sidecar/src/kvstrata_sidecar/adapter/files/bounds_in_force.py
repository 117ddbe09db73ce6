"""Bounds of one tier's files under the policy in force, and when each scope is due. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.index.deadlines import Deadlines
from kvstrata_sidecar.adapter.index.scope_index import Scope
from kvstrata_sidecar.adapter.index.victims import next_expiry_s
from kvstrata_sidecar.adapter.policy.limits import Bounds, bounds_of, scaled_guarantees

LOOK_S = 1.0
"""Delay until blocks are checked again that must go and are being read."""

OUTSIDE_LIFE_S = 24 * 3600.0
"""How long blocks of a keyspace are kept after it left the policy: a suspended policy may come back."""


class Policy:
    """Bounds of the scopes of `tier`. Without a retention of their own `default_ttl_s` applies, None for no end."""

    def __init__(self, tier: str, default_ttl_s: int | None) -> None:
        self._tier = tier
        self._default_ttl_s = default_ttl_s
        self._view: CacheView | None = None
        self._outside_since_s: dict[str, float] = {}
        self._deadlines = Deadlines()
        self.next_s = self._deadlines.next_s
        self._room_bytes = 0.0
        self.bounds: Mapping[str, Bounds] = {}
        self.guarantees: Mapping[str, float] = {}

    def follow(self, view: CacheView | None, scopes: Iterable[tuple[str, Scope]], now_s: float) -> None:
        """Put another view in force, and plan to check the `scopes` whose bounds changed."""
        if view is self._view:
            return
        self._view, before = view, self.bounds
        self.bounds = {name: self._with_default(bound) for name, bound in bounds_of(view, self._tier).items()}
        self.guarantees = scaled_guarantees(self.bounds, self._room_bytes)
        for keyspace, scope in scopes:
            self.note(keyspace, now_s)
            if before.get(keyspace) != self.bounds.get(keyspace):
                self.plan(keyspace, scope, now_s, again_s=now_s if keyspace in self.bounds else None)

    def set_room(self, room_bytes: float) -> None:
        if room_bytes != self._room_bytes:
            self._room_bytes = room_bytes
            self.guarantees = scaled_guarantees(self.bounds, room_bytes)

    def alive(self, keyspace: str, computed_s: float, now_s: float) -> bool:
        bound = self.bounds.get(keyspace)
        return bound is not None and (bound.retention_s is None or now_s - computed_s < bound.retention_s)

    def note(self, keyspace: str, now_s: float) -> None:
        if keyspace in self.bounds:
            self._outside_since_s.pop(keyspace, None)
        else:
            self._outside_since_s.setdefault(keyspace, now_s)

    def is_kept_outside(self, keyspace: str, now_s: float) -> bool:
        """Whether blocks of a keyspace outside of the policy may stay while there is room."""
        since_s = self._outside_since_s.get(keyspace)
        return keyspace not in self.bounds and since_s is not None and now_s - since_s < OUTSIDE_LIFE_S

    def plan(self, keyspace: str, scope: Scope | None, now_s: float, *, again_s: float | None = None) -> None:
        """Plan the next check of a scope: at `again_s` if given, otherwise when something in it expires."""
        if scope is None:
            self._outside_since_s.pop(keyspace, None)
            self._deadlines.plan(keyspace, None)
        elif again_s is not None:
            self._deadlines.plan(keyspace, again_s)
        elif (bound := self.bounds.get(keyspace)) is None:
            end_s = self._outside_since_s.get(keyspace, now_s) + OUTSIDE_LIFE_S
            self._deadlines.plan(keyspace, max(now_s + LOOK_S, end_s))
        else:
            self._deadlines.plan(keyspace, next_expiry_s(scope, bound, now_s, now_s + LOOK_S))

    def due(self, now_s: float, count: int) -> list[str]:
        due = sorted(self._deadlines.due(now_s))
        for keyspace in due[count:]:
            self._deadlines.plan(keyspace, now_s)
        return due[:count]

    def _with_default(self, bound: Bounds) -> Bounds:
        return bound if bound.retention_s is not None else replace(bound, retention_s=self._default_ttl_s)
