"""How old blocks are that are being loaded from another tier: known before they arrive."""

from __future__ import annotations

import threading
from collections.abc import Hashable

MAX_KNOWN_AGES = 65_536


class Arrivals:
    """When the tokens of coming blocks were computed, on one clock.

    `announce` and `computed_s` may be called from any thread at any moment, `follow` and `enter` from one, in the order
    in which blocks came and went: a block of the same name may be leaving, and the age is that of the next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._announced: dict[Hashable, float] = {}
        self._next: dict[Hashable, float] = {}

    def announce(self, key: Hashable, computed_s: float) -> None:
        """Learn of a block whose load is about to be answered."""
        with self._lock:
            _put(self._announced, key, computed_s)

    def computed_s(self, key: Hashable) -> float | None:
        """Return what was announced and has not been entered."""
        with self._lock:
            return self._announced.get(key)

    def follow(self, key: Hashable, computed_s: float) -> None:
        """Note that the next block of this name was announced."""
        _put(self._next, key, computed_s)

    def enter(self, key: Hashable, *, out_of_order: bool = False) -> float | None:
        """Return what was announced of the block that is entered now, None if nothing was.

        `out_of_order` is whether it is not known in which order things happened: then any announcement counts.
        """
        computed_s = self._next.pop(key, None)
        with self._lock:
            announced_s = self._announced.get(key)
            if computed_s is None and out_of_order:
                computed_s = announced_s
            if computed_s is not None and announced_s == computed_s:
                del self._announced[key]
        return computed_s


def _put(ages: dict[Hashable, float], key: Hashable, computed_s: float) -> None:
    if len(ages) >= MAX_KNOWN_AGES:
        del ages[next(iter(ages))]
    ages[key] = computed_s
