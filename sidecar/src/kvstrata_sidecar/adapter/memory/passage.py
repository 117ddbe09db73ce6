"""Blocks on their way through the memory to the tiers behind it.

LMCache first tells that a block was written, and then locks it to store it in other tiers. One that has to go at once,
as where a scope may keep nothing in memory, could be deleted in between, and would reach no tier.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

GRACE_S = 0.25
"""How long a block waits for LMCache to take it up; a tier whose store cannot begin is not waited for any longer."""


class Passage:
    """What came and was not taken up yet. Safe to share between threads; `came` and `taken` hold nobody up.

    `passes_on` says whether there is a tier behind the memory that admits a block.
    """

    def __init__(self, passes_on: Callable[[Any], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._passes_on = passes_on
        self._clock = clock
        self._lock = threading.Lock()
        self._came_s: dict[Hashable, float] = {}

    def came(self, keys: Iterable[Hashable]) -> None:
        """Note that blocks were written that LMCache will take up for other tiers."""
        if passing := [key for key in keys if self._passes_on(key)]:
            now_s = self._clock()
            with self._lock:
                for key in passing:
                    # At the end: the order is that of coming.
                    self._came_s.pop(key, None)
                    self._came_s[key] = now_s

    def taken(self, keys: Iterable[Hashable]) -> None:
        """Note that blocks were locked; by whomever: what is locked cannot be deleted."""
        if self._came_s:
            with self._lock:
                for key in keys:
                    self._came_s.pop(key, None)

    def waits(self, key: Hashable, now_s: float) -> bool:
        """Whether a block has yet to be taken up."""
        came_s = self._came_s.get(key)
        return came_s is not None and now_s < came_s + GRACE_S

    def forget(self, now_s: float) -> None:
        """Wait no longer for what nobody took up in time."""
        if self._came_s:
            with self._lock:
                while self._came_s:
                    key, came_s = next(iter(self._came_s.items()))
                    if now_s < came_s + GRACE_S:
                        break
                    del self._came_s[key]

    def __bool__(self) -> bool:
        return bool(self._came_s)
