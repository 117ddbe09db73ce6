"""Remembers how old blocks must be that stores may evict from a full scope without reading its buckets again."""

from __future__ import annotations

import threading
from collections.abc import Callable

FORESIGHT_S = 1.0
"""Time that a store relies on the last look at the scope's buckets, once the ledger is exhausted."""


class Foresight:
    """The last use, in ms of the server's clock, before which a scope's blocks may be evicted. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, int]] = {}

    def of(self, keyspace: str) -> int:
        """Return the last use before which blocks may be evicted, 0 without a recent look."""
        with self._lock:
            until_s, evict_before_ms = self._known.get(keyspace, (0.0, 0))
            if until_s <= self._clock():
                self._known.pop(keyspace, None)
                return 0
            return evict_before_ms

    def note(self, keyspace: str, evict_before_ms: int) -> None:
        now_s = self._clock()
        with self._lock:
            self._known.pop(keyspace, None)
            self._known[keyspace] = (now_s + FORESIGHT_S, evict_before_ms)
            # Ordered by end: drop entries that have ended.
            while self._known[first := next(iter(self._known))][0] <= now_s:
                del self._known[first]

    def __len__(self) -> int:
        return len(self._known)
