"""How old blocks are: retention counts from the moment at which a block's tokens were computed.

A block that this process computed is new. One that it loaded from a tier brings its age along, so that its copy in
another tier, and in the server's own memory, lives no longer than the first.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

MAX_KNOWN_BLOCKS = 262_144


class AgeBook(Protocol):
    """Knows the ages of what is in the server's own memory."""

    def inherit_age(self, key: Hashable, age_s: float) -> None:
        """Learn how old a block is that is being loaded."""

    def age_s(self, key: Hashable) -> float:
        """Return how old a block is, 0 if that is not known."""


class Ages:
    """Remembers when loaded blocks were computed, the last `limit` of them. Safe to share between threads.

    `memory` returns who knows the server's own memory, or None without one; its word counts when it knows a block as
    older. `clock` returns seconds.
    """

    def __init__(
        self,
        memory: Callable[[], AgeBook | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        limit: int = MAX_KNOWN_BLOCKS,
    ) -> None:
        self.memory = memory
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._computed_s: OrderedDict[Hashable, float] = OrderedDict()

    def now_s(self) -> float:
        """Return the moment that `inherit` counts from."""
        return self._clock()

    def inherit(self, key: Hashable, age_s: float, asked_s: float | None = None) -> None:
        """Learn the age of a block that is being loaded; called before the load is answered.

        `asked_s` is when its tier was asked: it was that old then, and grew older on its way.
        """
        if asked_s is not None:
            age_s += self._clock() - asked_s
        with self._lock:
            self._computed_s[key] = self._clock() - age_s
            self._computed_s.move_to_end(key)
            if len(self._computed_s) > self._limit:
                self._computed_s.popitem(last=False)
        book = self.memory()
        if book is not None:
            book.inherit_age(key, age_s)

    def age_s(self, key: Hashable) -> float:
        """Return how old a block is, 0 for one that was computed here."""
        with self._lock:
            computed_s = self._computed_s.get(key)
        age_s = 0.0 if computed_s is None else max(0.0, self._clock() - computed_s)
        book = self.memory()
        return age_s if book is None else max(age_s, book.age_s(key))

    def forget(self, key: Hashable) -> None:
        """Forget a block that left this process: when it comes back by being computed, it is new."""
        with self._lock:
            self._computed_s.pop(key, None)
