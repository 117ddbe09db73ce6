"""Cache of presence answers from slower tiers.

A slower tier reports a block as present when it answers a store, a load or a write-back. The tier may evict the block
later, so an answer is only as good as its age; callers decide how old is too old (`age_s`) and then ask the tier.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

MAX_ENTRIES = 262_144
"""Per tier; beyond this the least recently confirmed entry is dropped."""


class PresenceCache:
    """When each tier last confirmed that it holds a block. Thread-safe. Tiers are compared by identity. Keys are block
    keys of LMCache's memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_entries: int = MAX_ENTRIES) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._confirmed_s: dict[int, OrderedDict[Hashable, float]] = {}

    def confirm(self, tier: object, keys: Iterable[Hashable]) -> None:
        with self._lock:
            confirmed_s, now_s = self._confirmed_s.setdefault(id(tier), OrderedDict()), self._clock()
            for key in keys:
                confirmed_s[key] = now_s
                confirmed_s.move_to_end(key)
                if len(confirmed_s) > self._max_entries:
                    confirmed_s.popitem(last=False)

    def age_s(self, tier: object, key: Hashable) -> float | None:
        """Return the seconds since `tier` last confirmed `key`, None if it never did."""
        with self._lock:
            confirmed_s = self._confirmed_s.get(id(tier))
            moment_s = None if confirmed_s is None else confirmed_s.get(key)
        return None if moment_s is None else self._clock() - moment_s

    def forget(self, tier: object) -> None:
        """Drop a tier, whose identity another one may get."""
        with self._lock:
            self._confirmed_s.pop(id(tier), None)

    def discard(self, key: Hashable) -> None:
        with self._lock:
            for confirmed_s in self._confirmed_s.values():
                confirmed_s.pop(key, None)
