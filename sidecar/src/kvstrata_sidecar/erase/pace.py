"""How much one command deletes, and how long its server is left to others afterwards. Pure.

A server serves nobody while it runs a script, so a command that took too long is followed by a smaller one. What it
took is measured from here, which is never less than what the server spent: on a busy machine or a slow link steps are
smaller than they need be, and never larger.
"""

from __future__ import annotations

GOAL_S = 0.002
"""What a command should take at most, well below the 10 ms that none may take."""

MOST_AT_ONCE = 128
LEAST_AT_ONCE = 8
FIRST_AT_ONCE = 16
BYTES_AT_ONCE = 16 << 20
"""Of large values fewer go at once: a server gives back their memory within the command."""

PAUSE = 1.0
"""How much longer than a command took its server is then left to others."""

LONGEST_PAUSE_S = 0.05


class Pace:
    """For one primary."""

    def __init__(self) -> None:
        self._count = FIRST_AT_ONCE

    def count(self, mean_bytes: int) -> int:
        """Return how many values of this size the next command may delete."""
        return max(1, min(self._count, BYTES_AT_ONCE // max(1, mean_bytes)))

    def took(self, count: int, seconds: float) -> float:
        """Note what a command for so many values took; return for how long to pause."""
        if seconds > GOAL_S:
            self._count = max(LEAST_AT_ONCE, self._count // 2)
        elif count == self._count and seconds < GOAL_S / 2:
            self._count = min(MOST_AT_ONCE, 2 * self._count)
        return min(LONGEST_PAUSE_S, PAUSE * seconds)
