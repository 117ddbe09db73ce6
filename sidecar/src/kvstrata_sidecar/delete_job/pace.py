"""Size of deleting commands, and the pause after each. Pure.

A server serves no other client while it runs a script, so a command is bounded in time. The script itself does that if
its server has a clock for it; this avoids relying on it. The time per value is the minimum over the last commands: the
rest of the observed time is waiting for a processor or a link, which smaller commands would not avoid.
"""

from __future__ import annotations

from collections import deque

GOAL_S = 0.002
"""Target duration of a command, well below the 10 ms limit."""

MOST_AT_ONCE = 256
"""The script's maximum."""

LEAST_AT_ONCE = 8
FIRST_AT_ONCE = 16
BYTES_AT_ONCE = 16 << 20
"""Fewer large values at once: a server frees their memory within the command."""

PAUSE = 1.0
"""Pause as a multiple of the command's time."""

COMMANDS_SEEN = 32
"""Commands over which the minimum is taken; a slowdown is noticed after as many."""

LONGEST_PAUSE_S = 0.05


class Pace:
    def __init__(self) -> None:
        self._count = FIRST_AT_ONCE
        self._each_s: deque[float] = deque(maxlen=COMMANDS_SEEN)

    def count(self, mean_bytes: int) -> int:
        """Return how many values of this size the next command may delete."""
        return max(1, min(self._count, BYTES_AT_ONCE // max(1, mean_bytes)))

    def took(self, count: int, seconds: float) -> float:
        if count:
            self._each_s.append(seconds / count)
        each_s = min(self._each_s, default=0.0)
        fitting = int(GOAL_S / each_s) if each_s > 0 else MOST_AT_ONCE
        self._count = max(LEAST_AT_ONCE, min(MOST_AT_ONCE, 2 * self._count, fitting))
        return min(LONGEST_PAUSE_S, PAUSE * count * each_s)
