"""How busy the machine was with something else while a benchmark ran."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Busyness:
    """Measures which share of the machine others than the benchmark used during a block.

    The benchmark is this process, the processes `ours`, and all that descends from them, be it alive or ended: load
    comes from child processes, which begin and end within the block.
    """

    def __init__(self, *ours: int) -> None:
        self._ours = ours
        self.others_percent = 0.0
        """Processor time of all other processes, in percent of all processors, after the block."""
        self.ours_s = 0.0
        """Processor time of the benchmark, in seconds, after the block."""
        self.elapsed_s = 0.0
        self._before = (0.0, 0.0, 0.0)

    def __enter__(self) -> Busyness:
        self._before = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at, busy, ours = (now - before for now, before in zip(self._now(), self._before, strict=True))
        self.elapsed_s, self.ours_s = at, ours
        self.others_percent = max(0.0, 100 * (busy - ours) / (at * (os.cpu_count() or 1)))

    def _now(self) -> tuple[float, float, float]:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        busy = (user + nice + system + irq + softirq + steal) / TICKS_PER_S
        # A process of `ours` may also be a child of this one, and is counted once.
        processes = {number for pid in (os.getpid(), *self._ours) for number in process_tree(pid)}
        return time.monotonic(), busy, sum(_with_ended_children_s(number) for number in processes)


def _with_ended_children_s(pid: int) -> float:
    # A child's time passes to its parent's account when the parent has waited for it, so no second is lost or
    # counted twice whenever a child ends. A process that ends just now is such a child.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and of its living descendants, itself first."""
    found = [pid]
    for number in found:
        try:
            for task in Path(f"/proc/{number}/task").iterdir():
                found.extend(map(int, (task / "children").read_text().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it, or one of its threads, ended just now
    return found
