"""What a store that finds a full scope lets the next ones know: which blocks may go for theirs without another look."""

from __future__ import annotations

import threading
from collections.abc import Callable

FORESIGHT_S = 1.0
"""How long a store relies on what was last seen of the scope's buckets, once the ledger is exhausted."""


class Foresight:
    """Up to which last use, in ms of the server's clock, a scope's blocks may go at once. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, int]] = {}

    def of(self, keyspace: str) -> int:
        """Return before which last use a scope's blocks may go, 0 if nobody has looked lately."""
        with self._lock:
            until_s, evict_before_ms = self._known.get(keyspace, (0.0, 0))
            if until_s <= self._clock():
                self._known.pop(keyspace, None)
                return 0
            return evict_before_ms

    def note(self, keyspace: str, evict_before_ms: int) -> None:
        """Let the stores of the next second know what was seen."""
        now_s = self._clock()
        with self._lock:
            self._known.pop(keyspace, None)
            self._known[keyspace] = (now_s + FORESIGHT_S, evict_before_ms)
            # In the order in which they end: what nobody asks for any more is not kept.
            while self._known[first := next(iter(self._known))][0] <= now_s:
                del self._known[first]

    def __len__(self) -> int:
        return len(self._known)
