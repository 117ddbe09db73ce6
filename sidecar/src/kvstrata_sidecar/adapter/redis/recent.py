"""Cache of recent values: a bounded number, each for a short time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_RECENT = 65_536


class Recent(Generic[K, V]):
    """Values by key, each kept for `keep_s`, at most `limit` of them. Thread-safe."""

    def __init__(self, clock: Callable[[], float], keep_s: float, limit: int = MAX_RECENT) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._limit = limit
        self._lock = threading.Lock()
        self._until: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def get(self, key: K) -> V | None:
        known = self._until.get(key)
        return known[1] if known is not None and self._clock() < known[0] else None

    def put(self, key: K, value: V) -> None:
        """Keep a value instead of an earlier one; beyond the limit the oldest is dropped."""
        with self._lock:
            self._until.pop(key, None)
            if self._forget_past() >= self._limit:
                self._until.popitem(last=False)
            self._until[key] = (self._clock() + self._keep_s, value)

    def put_new(self, key: K, value: V) -> bool:
        """Keep a value if its key is absent and the limit allows it; return whether it was kept."""
        with self._lock:
            if self._forget_past() >= self._limit or key in self._until:
                return False
            self._until[key] = (self._clock() + self._keep_s, value)
            return True

    def items(self) -> list[tuple[K, V]]:
        with self._lock:
            self._forget_past()
            return [(key, value) for key, (_, value) in self._until.items()]

    def _forget_past(self) -> int:
        """Drop expired values; return the number of the others. The caller holds the lock."""
        now_s = self._clock()
        while self._until and next(iter(self._until.values()))[0] <= now_s:
            self._until.popitem(last=False)
        return len(self._until)
