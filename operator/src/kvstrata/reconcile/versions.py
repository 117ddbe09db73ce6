"""The newest resourceVersion that is known of each object, and for a while of each that is gone.

Events, lists and answers to writes may arrive late: what is older than what is known changes nothing, and brings back
nothing that was deleted since. Nothing arrives later than `REMEMBERED_S`, so what is gone need not be known for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

REMEMBERED_S = 3600.0
"""Far longer than a request, a list or a watch may take: what is under way when an object goes ends before."""

Slot = tuple[str, str]
"""Kind and name of an object of a namespace."""


class Versions:
    """Versions of the objects of one namespace; 0 of one that nothing is known of. `now` is the wall clock."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._known: dict[Slot, int] = {}
        self._gone: dict[Slot, datetime] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, slot: Slot) -> int:
        """Return the newest version that is known of an object."""
        return self._known.get(slot, 0)

    def seen(self, slot: Slot, version: int) -> None:
        """Take note of an object that is there."""
        self._known[slot] = version
        self._gone.pop(slot, None)

    def gone(self, slot: Slot, version: int) -> None:
        """Take note that an object is gone since `version`, 0 where that is not known; it is forgotten in time."""
        self._known[slot] = max(self.of(slot), version)
        self._gone.pop(slot, None)
        self._gone[slot] = now = self._now()
        while (now - self._gone[oldest := next(iter(self._gone))]).total_seconds() > REMEMBERED_S:
            del self._gone[oldest], self._known[oldest]

    def drop(self, slot: Slot) -> None:
        """Forget an object of which no version counts any more."""
        self._known.pop(slot, None)
        self._gone.pop(slot, None)
