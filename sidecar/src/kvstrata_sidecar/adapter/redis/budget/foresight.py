"""What a store that finds a full scope lets the next ones know: which blocks may go for theirs without another look."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstrata_sidecar.adapter.redis.client.commands import Place

FORESIGHT_S = 1.0
"""How long a store relies on what was last seen of the scope's buckets, once the ledger is exhausted."""


class Foresight:
    """Up to which last use, in ms of the server's clock, blocks may go at once. Safe to share between threads.

    It holds for all buckets of a scope, or, `per_bucket`, for the one that was looked at.
    """

    def __init__(self, clock: Callable[[], float], *, per_bucket: bool) -> None:
        self._clock = clock
        self._per_bucket = per_bucket
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[float, int]] = {}

    def of(self, place: Place) -> int:
        """Return before which last use blocks may go for one at this place, 0 if nobody has looked lately."""
        known = self._scope_of(place)
        with self._lock:
            until_s, evict_before_ms = self._known.get(known, (0.0, 0))
            if until_s <= self._clock():
                self._known.pop(known, None)
                return 0
            return evict_before_ms

    def note(self, place: Place, evict_before_ms: int) -> None:
        """Let the stores of the next second know what was seen."""
        now_s, known = self._clock(), self._scope_of(place)
        with self._lock:
            self._known.pop(known, None)
            self._known[known] = (now_s + FORESIGHT_S, evict_before_ms)
            # In the order in which they end: what nobody asks for any more is not kept.
            while self._known[first := next(iter(self._known))][0] <= now_s:
                del self._known[first]

    def __len__(self) -> int:
        return len(self._known)

    def _scope_of(self, place: Place) -> tuple[str, int]:
        return place.keyspace, place.bucket if self._per_bucket else -1
