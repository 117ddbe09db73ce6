"""What slower tiers said that they have: by the answers to what was stored in them, loaded from them or handed down.

A tier may have lost a block since: its word is trusted for a while, and then it is asked again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

MAX_WORDS = 262_144
"""Blocks of which a tier's word is remembered; beyond, the eldest words are forgotten."""


class Words:
    """Words by tier, which is any object. Safe to share between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, limit: int = MAX_WORDS) -> None:
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._said_s: dict[int, OrderedDict[Hashable, float]] = {}

    def heard(self, tier: object, keys: Iterable[Hashable]) -> None:
        """Learn that a tier has blocks now."""
        with self._lock:
            said_s, now_s = self._said_s.setdefault(id(tier), OrderedDict()), self._clock()
            for key in keys:
                said_s[key] = now_s
                said_s.move_to_end(key)
                if len(said_s) > self._limit:
                    said_s.popitem(last=False)

    def since_s(self, tier: object, key: Hashable) -> float | None:
        """Return how many seconds ago a tier said that it has a block, None if it never did."""
        with self._lock:
            said_s = self._said_s.get(id(tier))
            moment_s = None if said_s is None else said_s.get(key)
        return None if moment_s is None else self._clock() - moment_s

    def forget(self, key: Hashable) -> None:
        """Forget what was said of a block that has left the memory."""
        with self._lock:
            for said_s in self._said_s.values():
                said_s.pop(key, None)
