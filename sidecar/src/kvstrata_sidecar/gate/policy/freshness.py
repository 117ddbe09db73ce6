"""Freshness: the age of the policy in force.

Freshness is the moment, on CLOCK_BOOTTIME, at which the last quorum read of the bundle root in force was *sent*. The
send time counts, because later commits may be missing. CLOCK_BOOTTIME includes suspension, and no time service changes
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Freshness:
    """The send time of the last good read; 0 before the first."""

    __slots__ = ("_clock_ns", "sent_ns")

    def __init__(self, clock_ns: Callable[[], int] = boottime_ns) -> None:
        self._clock_ns = clock_ns
        self.sent_ns = 0

    def now_ns(self) -> int:
        """Taken just before a read is sent."""
        return self._clock_ns()

    def confirm(self, sent_ns: int) -> None:
        """Record an answered read; an older one than known changes nothing."""
        self.sent_ns = max(self.sent_ns, sent_ns)

    def age_ms(self) -> int:
        """Return the age in milliseconds, or -1 before the first read."""
        return (self._clock_ns() - self.sent_ns) // 1_000_000 if self.sent_ns else -1

    def fresh(self, stale_after_s: int) -> bool:
        """Whether the last read was sent within `stale_after_s`. A clock that ran backwards is not fresh."""
        return bool(self.sent_ns) and 0 <= self._clock_ns() - self.sent_ns <= stale_after_s * 1_000_000_000
