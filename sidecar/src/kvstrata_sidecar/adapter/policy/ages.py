"""Ages of blocks: retention counts from the moment at which a block's tokens were computed.

A block that this process computed is new. One loaded from a tier keeps its age, so that copies in other tiers and in
memory live no longer than the first.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

MAX_KNOWN_BLOCKS = 262_144


class AgeBook(Protocol):
    """Ages of the blocks in the server's own memory."""

    def inherit_age(self, key: Hashable, age_s: float) -> None:
        """Record the age of a block that is being loaded."""

    def age_s(self, key: Hashable) -> float:
        """Return a block's age, 0 if unknown."""


class Ages:
    """Remembers when loaded blocks were computed, `MAX_KNOWN_BLOCKS` of them at most. Thread-safe. `memory` is the age
    book of the server's own memory, None without one; the older of both ages counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory: AgeBook | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._computed_s: OrderedDict[Hashable, float] = OrderedDict()

    def now_s(self) -> float:
        """Return the present moment, for `asked_s` of `inherit`."""
        return self._clock()

    def inherit(self, key: Hashable, age_s: float, asked_s: float | None = None) -> None:
        """Record the age of a block before its load is answered; `asked_s` is when `age_s` was true, None for now."""
        if asked_s is not None:
            age_s += self._clock() - asked_s
        with self._lock:
            self._computed_s[key] = self._clock() - age_s
            self._computed_s.move_to_end(key)
            if len(self._computed_s) > MAX_KNOWN_BLOCKS:
                self._computed_s.popitem(last=False)
        book = self.memory
        if book is not None:
            book.inherit_age(key, age_s)

    def age_s(self, key: Hashable) -> float:
        """Return a block's age, 0 for one that was computed here."""
        with self._lock:
            computed_s = self._computed_s.get(key)
        age_s = 0.0 if computed_s is None else max(0.0, self._clock() - computed_s)
        book = self.memory
        return age_s if book is None else max(age_s, book.age_s(key))

    def forget(self, key: Hashable) -> None:
        """Drop a block that left this process: if it is computed again, it is new."""
        with self._lock:
            self._computed_s.pop(key, None)
