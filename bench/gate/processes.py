"""Processes, on a core of their own if asked, and their cost: CPU time to the nanosecond, resident memory."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.machine import process_tree
from e2e.cluster.progress import ClusterError

_STOP_S = 10.0
_PR_SET_PDEATHSIG = 1


class Process:
    """A running program with its output in a log; it dies with the benchmark, however that ends.

    Without a `core` it may use all.
    """

    def __init__(
        self, arguments: Sequence[str], *, core: int | None, log: Path, environment: Mapping[str, str]
    ) -> None:
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def pinned() -> None:
            if core is not None:
                os.sched_setaffinity(0, {core})
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(arguments), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=dict(environment), start_new_session=True, preexec_fn=pinned,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def require_alive(self) -> None:
        """Raise ClusterError with the log's tail if the process has ended."""
        if self._process.poll() is not None:
            raise ClusterError(f"{self.log.stem} ended with code {self._process.returncode}", log=self.log)

    def stop(self) -> None:
        """End the process and its children, softly at first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                continue


def cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of a process and its living children."""
    # The clock id that clock_getcpuclockid(3) gives for a process: /proc/PID/stat counts in steps of 10 ms.
    return sum(time.clock_gettime((~number << 3) | 2) for number in process_tree(pid))


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process and its children in MB (10^6 bytes)."""
    pages = sum(int(Path(f"/proc/{number}/statm").read_text().split()[1]) for number in process_tree(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
