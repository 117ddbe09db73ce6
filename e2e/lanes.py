"""Work that mostly waits, side by side: lanes of commands, each with its output in one piece."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.progress import Progress
from e2e.cluster.settings import REPOSITORY


@dataclass(frozen=True, slots=True)
class Command:
    """One program of a lane.

    Attributes:
        name: what it is called in the progress, in its log's name and in a failure.
        arguments: the program and its arguments; it runs in the repository's root.
        environment: what it sees, or None for what this process sees.
        niceness: how far it and what it starts stand back for other programs, as of nice(1).
        is_needed: whether what follows in its lane is worth nothing when it fails, and is not run then.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    niceness: int = 0
    is_needed: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A command that ended otherwise than with 0, or was not run because the one that it `needed` did."""

    command: Command
    code: int
    needed: str = ""

    def __str__(self) -> str:
        if self.needed:
            return f"NOT RUN: {self.command.name}, because this failed: {self.needed}"
        return f"FAILED: {self.command.name}: exit {self.code}"


NOT_RUN = -1
"""The code of a command that was not run."""

_PERCENT = re.compile(rb"\[ *([0-9]+)%\]")


class Lanes:
    """Runs lanes beside each other. Output goes to one log per command and is printed whole when the command ends.

    Meanwhile the progress tells what runs, and of tests how far they are.
    """

    def __init__(self, logs: Path, progress: Progress, print_whole: Callable[[str], None] = print) -> None:
        self._logs = logs
        self._progress = progress
        self._print_whole = print_whole
        self._printing = threading.Lock()
        self._running: dict[str, Path] = {}

    def run(self, lanes: Sequence[Sequence[Command]]) -> list[Failure]:
        """Run every lane to its end, whatever fails in others; returns the commands that failed or were not run."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._progress.step(self._state), ThreadPoolExecutor(len(lanes)) as pool:
            return [failure for failures in pool.map(self._run_lane, lanes) for failure in failures]

    def _state(self) -> str:
        with self._printing:
            running = dict(self._running)
        return "; ".join(f"{name}{_percent(log)}" for name, log in running.items()) or "all that ran side by side"

    def _run_lane(self, lane: Sequence[Command]) -> list[Failure]:
        failures: list[Failure] = []
        needed = ""
        for command in lane:
            if needed:
                failures.append(Failure(command, NOT_RUN, needed))
            elif code := self._run_command(command):
                failures.append(Failure(command, code))
                needed = command.name if command.is_needed else ""
        return failures

    def _run_command(self, command: Command) -> int:
        log = self._logs / f"{command.name.replace('/', '-').replace(' ', '-')}.log"
        nice = ("nice", "-n", str(command.niceness)) if command.niceness else ()
        started_s = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                (*nice, *command.arguments),
                cwd=REPOSITORY,
                env=command.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            with self._printing:
                self._running[command.name] = log
            _, status, used = os.wait4(process.pid, 0)
        code = process.returncode = os.waitstatus_to_exitcode(status)
        took = f"{time.monotonic() - started_s:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processors"
        with self._printing:
            del self._running[command.name]
            self._print_whole(f"{command.name}:\n{log.read_text(errors='replace').rstrip()}")
            self._print_whole(f"{command.name}: exit {code} after {took}")
            sys.stdout.flush()
        return code


def _percent(log: Path) -> str:
    """Return how far tests are that write this log, as pytest says, with a space before it."""
    found = _PERCENT.findall(log.read_bytes())
    return f" {int(found[-1])} %" if found else ""
