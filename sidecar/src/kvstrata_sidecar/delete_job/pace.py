"""How much one command deletes, and how long its server is left to others afterwards. Pure.

A server serves nobody while it runs a script, so a command takes no more than it does within a time. The script sees to
that itself as far as its server has a clock for it; this keeps it from having to. What a value takes is the least that
one took in any of the last commands: the rest of what is seen from here, on a busy machine most of it, was spent
waiting for a processor or a link, and smaller commands would wait as often.
"""

from __future__ import annotations

from collections import deque

GOAL_S = 0.002
"""What a command should take at most, well below the 10 ms that none may take."""

MOST_AT_ONCE = 256
"""As many as the script takes."""

LEAST_AT_ONCE = 8
FIRST_AT_ONCE = 16
BYTES_AT_ONCE = 16 << 20
"""Of large values fewer go at once: a server gives back their memory within the command."""

PAUSE = 1.0
"""How much longer than a command needed its server is then left to others."""

COMMANDS_SEEN = 32
"""Of how many commands the quickest tells what a value takes; that it takes more than before is known after as many."""

LONGEST_PAUSE_S = 0.05


class Pace:
    """For one primary."""

    def __init__(self) -> None:
        self._count = FIRST_AT_ONCE
        self._each_s: deque[float] = deque(maxlen=COMMANDS_SEEN)

    def count(self, mean_bytes: int) -> int:
        """Return how many values of this size the next command may delete."""
        return max(1, min(self._count, BYTES_AT_ONCE // max(1, mean_bytes)))

    def took(self, count: int, seconds: float) -> float:
        """Note what a command took that came to so many values; return for how long to pause."""
        if count:
            self._each_s.append(seconds / count)
        each_s = min(self._each_s, default=0.0)
        fitting = int(GOAL_S / each_s) if each_s > 0 else MOST_AT_ONCE
        self._count = max(LEAST_AT_ONCE, min(MOST_AT_ONCE, 2 * self._count, fitting))
        return min(LONGEST_PAUSE_S, PAUSE * count * each_s)
