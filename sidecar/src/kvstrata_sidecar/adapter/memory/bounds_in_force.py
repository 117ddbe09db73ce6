"""Bounds of one CPU tier's scopes as of the last turn; a newer view may be in force already."""

from __future__ import annotations

import threading

from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.memory.erase import Purges
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.policy.limits import Bounds, bounds_of, scaled_guarantees


class InForce:
    """Bounds of scopes in `tier`, None without one. `purges` counts deletions of keyspaces that left the policy."""

    def __init__(self, enforcement: Enforcement, tier: str | None, purges: Purges) -> None:
        self._enforcement = enforcement
        self._tier = tier
        self._purges = purges
        self._view: CacheView | None = None
        self._watched: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._guarantees: tuple[float, dict[str, float]] = (0.0, {})
        self.bounds: dict[str, Bounds] = {}

    def take(self) -> set[str] | None:
        """Apply the view in force; return the keyspaces whose bounds changed, None for the same view."""
        view = self._enforcement.view
        if view is self._view:
            return None
        self.watch()
        before, self.bounds = self.bounds, bounds_of(view, self._tier)
        self._guarantees = (0.0, {})
        self._view = view
        differ = {keyspace for keyspace, bound in self.bounds.items() if before.get(keyspace) != bound}
        return differ | (before.keys() - self.bounds.keys())

    def watch(self) -> None:
        """Count deletions of keyspaces that left the policy, for each view, even one replaced at once. Thread-safe."""
        with self._lock:
            view = self._enforcement.view
            before, now = self._watched, frozenset(view.keyspaces if view is not None else ())
            self._purges.watch(before - now)
            self._purges.forget(now - before)
            self._watched = now

    def guarantees(self, room_bytes: float) -> dict[str, float]:
        """Return guaranteed bytes by keyspace, scaled down if they do not fit."""
        if self._guarantees[0] != room_bytes:
            self._guarantees = (room_bytes, scaled_guarantees(self.bounds, room_bytes))
        return self._guarantees[1]
