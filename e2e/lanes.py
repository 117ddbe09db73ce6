"""Work that mostly waits, side by side: lanes of commands, each with its output in one piece."""

from __future__ import annotations

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
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A command that ended otherwise than with 0."""

    command: Command
    code: int

    def __str__(self) -> str:
        return f"FAILED: {self.command.name}: exit {self.code}"


class Lanes:
    """Runs lanes beside each other. Output goes to one log per command and is printed whole when the command ends."""

    def __init__(self, logs: Path, progress: Progress, print_whole: Callable[[str], None] = print) -> None:
        self._logs = logs
        self._progress = progress
        self._print_whole = print_whole
        self._printing = threading.Lock()

    def run(self, lanes: Sequence[Sequence[Command]]) -> list[Failure]:
        """Run every lane to its end, whatever fails; returns the commands that failed."""
        self._logs.mkdir(parents=True, exist_ok=True)
        names = "; ".join(" then ".join(command.name for command in lane) for lane in lanes)
        with (
            self._progress.step(f"side by side, each printed when it ends: {names}"),
            ThreadPoolExecutor(len(lanes)) as pool,
        ):
            return [failure for failures in pool.map(self._run_lane, lanes) for failure in failures]

    def _run_lane(self, lane: Sequence[Command]) -> list[Failure]:
        codes = [(command, self._run_command(command)) for command in lane]
        return [Failure(command, code) for command, code in codes if code]

    def _run_command(self, command: Command) -> int:
        log = self._logs / f"{command.name.replace('/', '-').replace(' ', '-')}.log"
        started_s = time.monotonic()
        with log.open("wb") as output:
            code = subprocess.run(
                command.arguments,
                cwd=REPOSITORY,
                env=command.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                check=False,
            ).returncode
        with self._printing:
            self._print_whole(f"{command.name}:\n{log.read_text(errors='replace').rstrip()}")
            self._print_whole(f"{command.name}: exit {code} after {time.monotonic() - started_s:.0f} s")
            sys.stdout.flush()
        return code
