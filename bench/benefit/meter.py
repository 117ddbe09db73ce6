"""Processor time of a fleet's processes by part, and when they rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from bench.machine import process_tree

REST_SHARE = 0.25
"""A fleet rests when it takes at most this share of one processor for REST_S: its programs poll."""

REST_S = 0.15
LONGEST_S = 30.0


class Meter:
    """Processor seconds, user and system, of the processes of each part and of their children."""

    def __init__(self, parts: Mapping[str, Sequence[int]]) -> None:
        self._roots = parts
        self._clocks: dict[str, list[int]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look for children that were started meanwhile."""
        # As clock_getcpuclockid(3) returns it: nanoseconds, where /proc/PID/stat counts in hundredths of a second.
        self._clocks = {
            part: [(~number << 3) | 2 for pid in pids for number in process_tree(pid)]
            for part, pids in self._roots.items()
        }

    def now(self) -> dict[str, float]:
        """Return the seconds of each part so far."""
        return {part: sum(map(time.clock_gettime, clocks)) for part, clocks in self._clocks.items()}

    def total(self) -> float:
        """Return the seconds of all parts so far."""
        return sum(self.now().values())

    async def rest(self) -> float:
        """Wait until nothing is computed or stored any more; return the seconds that it took."""
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < LONGEST_S:
            before, at_s = self.total(), time.monotonic()
            await asyncio.sleep(REST_S)
            if self.total() - before <= REST_SHARE * (time.monotonic() - at_s):
                break
        return time.monotonic() - begun_s


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the difference of two readings by part."""
    return {part: round(after[part] - before[part], 4) for part in after}
