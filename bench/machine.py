"""How busy the machine was with something else while a benchmark ran."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from bench.operator_under_test import TICKS_PER_S, cpu_s


class Busyness:
    """Measures which share of the machine others than `ours` used during a block. `ours` are process ids."""

    def __init__(self, *ours: int) -> None:
        self._ours = ours
        self.others_percent = 0.0
        """Processor time of all other processes, in percent of all processors, after the block."""
        self.elapsed_s = 0.0
        self._before = (0.0, 0.0, 0.0)

    def __enter__(self) -> Busyness:
        self._before = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at, busy, ours = (now - before for now, before in zip(self._now(), self._before, strict=True))
        self.elapsed_s = at
        self.others_percent = max(0.0, 100 * (busy - ours) / (at * (os.cpu_count() or 1)))

    def _now(self) -> tuple[float, float, float]:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        busy = (user + nice + system + irq + softirq + steal) / TICKS_PER_S
        return time.monotonic(), busy, sum(cpu_s(pid) for pid in (os.getpid(), *self._ours))
