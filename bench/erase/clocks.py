"""How much processor time a server has used: the thread that serves, and those beside it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple


class Used(NamedTuple):
    """Seconds of processor time: of the whole process, and the part of its threads that serve no client."""

    whole_s: float
    beside_s: float

    @property
    def serving_s(self) -> float:
        """Time of the thread that carries commands out: while it works, the server answers no other client."""
        return self.whole_s - self.beside_s

    def since(self, before: Used) -> Used:
        """Return the time used after `before`."""
        return Used(self.whole_s - before.whole_s, self.beside_s - before.beside_s)


class ServerClock:
    """Reads both for one server, whose threads do not change.

    The clock of the process is exact. The kernel brings the accounts of the other threads up to date when one of them
    stops or at its next tick: time that is not in there yet counts as the serving thread's.
    """

    def __init__(self, pid: int) -> None:
        # As clock_getcpuclockid(3) returns it for a process.
        self._clock = (~pid << 3) | 2
        tasks = Path(f"/proc/{pid}/task")
        self._beside = [task / "schedstat" for task in tasks.iterdir() if task.name != str(pid)]

    def read(self) -> Used:
        """Return the time used until now."""
        beside = sum(int(account.read_text().split()[0]) for account in self._beside)
        return Used(time.clock_gettime(self._clock), beside / 1e9)


class Exchange(NamedTuple):
    """Seconds that one took as seen from here, and of processor time of its server; how many commands it had."""

    took_s: float
    serving_s: float
    beside_s: float
    commands: int = 1
