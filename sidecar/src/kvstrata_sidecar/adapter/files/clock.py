"""Two clocks: one on which ages are counted while the process lives, and the wall clock that files carry."""

from __future__ import annotations

import time
from collections.abc import Callable


def boottime_s() -> float:
    """Return seconds of a clock that never goes back and counts suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clocks:
    """Translates between the two. `now_s` is the first, `wall_s` the second.

    The second is read once, at the start, and goes on with the first: nobody who sets it makes blocks younger or older.
    """

    def __init__(self, now_s: Callable[[], float] = boottime_s, wall_s: Callable[[], float] = time.time) -> None:
        self.now_s = now_s
        self._wall_s = wall_s
        self._ahead_s = wall_s() - now_s()

    def start(self, remembered_s: float) -> None:
        """Read the wall clock anew; it is no earlier than what a process before this one saw."""
        self._ahead_s = max(self._wall_s(), remembered_s) - self.now_s()

    def to_wall(self, moment_s: float) -> float:
        """Return when a moment of `now_s` is on the wall clock."""
        return moment_s + self._ahead_s

    def from_wall(self, moment_s: float) -> float:
        """Return when a moment of the wall clock is on `now_s`."""
        return moment_s - self._ahead_s
