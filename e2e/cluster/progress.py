"""Progress for the user: the running step, its duration, an estimate of it, and advice when it fails.

`python -m e2e.cluster.progress TEXT COMMAND…` runs a command as a step.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from e2e.cluster.settings import REPOSITORY, Paths

HEARTBEAT_INTERVAL_S = 15.0
TTY_INTERVAL_S = 0.5
QUIET_BELOW_S = 2.0
ESTIMATE_FROM_S = 30.0
TYPICAL = Path(__file__).with_name("durations.toml")
RECORDED = Paths().local / "durations.json"


class ClusterError(Exception):
    """A failure that the user can act on.

    Attributes:
        advice: one sentence with the next step; may be empty.
        log: a file whose last lines explain the failure, or None.
    """

    def __init__(self, message: str, *, advice: str = "", log: Path | None = None) -> None:
        super().__init__(message)
        self.advice = advice
        self.log = log


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a text file, indented; empty when there is nothing to read."""
    try:
        content = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in content[-lines:])


def describe(error: ClusterError) -> str:
    """An error as the user sees it: the failure, the log's tail, and advice."""
    parts = [f"error: {error}"]
    if error.log is not None and (last_lines := tail(error.log)):
        parts.append(f"  the last lines of {error.log}:\n{last_lines}")
    if error.advice:
        parts.append(f"  what to do: {error.advice}")
    return "\n".join(parts)


class Durations:
    """How long steps took, in seconds by name: in `recorded` on this machine, in `typical` on two quiet cores."""

    def __init__(self, recorded: Path = RECORDED, typical: Path = TYPICAL) -> None:
        self._recorded, self._typical = recorded, typical

    def estimate_s(self, step: str) -> float | None:
        """The last duration of a step here, else the typical one; None if unknown."""
        known: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError):
            known = tomllib.loads(self._typical.read_text())
        return (known | self._read()).get(_name(step))

    def record(self, step: str, elapsed_s: float) -> None:
        """Keep the duration of a step that succeeded, if the folder of the record exists."""
        if elapsed_s < QUIET_BELOW_S or not self._recorded.parent.is_dir():
            return
        draft = self._recorded.with_suffix(f".{threading.get_ident()}")
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(self._read() | {_name(step): round(elapsed_s, 1)}, indent=1, sort_keys=True))
            draft.replace(self._recorded)

    def _read(self) -> dict[str, float]:
        try:
            found = json.loads(self._recorded.read_text())
        except (OSError, ValueError):
            return {}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _name(step: str) -> str:
    """Return a step's text without the parts that differ between runs: parentheses, tags, the repository's path."""
    return re.sub(r" *\(.*|(?<=\w):[-.\w]+", "", step).replace(f"{REPOSITORY}/", "")


_RUNNING: dict[threading.Event, Callable[[], str]] = {}
"""Steps that run side by side, which share the last line of a terminal."""


class Progress:
    """Prints steps as they run: counters in place on a terminal, a heartbeat line elsewhere.

    Steps of over thirty seconds, by `durations`, show how long they take. Without `stream` these are this machine's.
    """

    def __init__(self, stream: TextIO | None = None, durations: Durations | None = None) -> None:
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._durations = durations if durations is not None or stream is not None else Durations()

    def report(self, message: str) -> None:
        """Print one line, by one write: lines of steps that run side by side do not mix."""
        print(f"\r\033[K{message}\n" if self._on_terminal else f"{message}\n", end="", file=self._stream, flush=True)

    @contextmanager
    def step(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Announce `what` while the body runs, and print how long it took.

        Steps shorter than two seconds print a single line when they end. A function is asked each time.
        """
        text = what if callable(what) else lambda: what
        started = time.monotonic()
        done = threading.Event()
        name = text()
        heartbeat = threading.Thread(target=self._heartbeat, args=(text, name, started, done), daemon=True)
        heartbeat.start()
        outcome = "failed"
        try:
            yield
            outcome = "done"
        finally:
            done.set()
            heartbeat.join()
            elapsed_s = time.monotonic() - started
            self._finish(f"{text()}: {outcome} ({elapsed_s:.1f} s)")
            if outcome == "done" and self._durations is not None:
                self._durations.record(name, elapsed_s)

    def _heartbeat(self, text: Callable[[], str], name: str, started: float, done: threading.Event) -> None:
        if done.wait(QUIET_BELOW_S):
            return
        estimate_s = (self._durations.estimate_s(name) if self._durations is not None else None) or 0.0
        about = f" of about {estimate_s:.0f} s" if estimate_s >= ESTIMATE_FROM_S else ""
        interval_s = TTY_INTERVAL_S if self._on_terminal else HEARTBEAT_INTERVAL_S
        while True:
            elapsed_s = time.monotonic() - started
            if self._on_terminal:
                _RUNNING[done] = lambda: f"{text()} ... {time.monotonic() - started:.0f} s{about}"
                line = "; ".join(running() for running in tuple(_RUNNING.values()))
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\033[K{line[:width]}", end="", file=self._stream, flush=True)
            else:
                self.report(f"{text()} ... {elapsed_s:.0f} s{about}")
            if done.wait(interval_s):
                _RUNNING.pop(done, None)
                return

    def _finish(self, line: str) -> None:
        self.report(line)


def main(arguments: list[str]) -> int:
    """Run a command as a step; returns its exit code. Its output is shown when the step ends."""
    text, *command = arguments
    ended: subprocess.CompletedProcess[str] | None = None
    with contextlib.suppress(ClusterError), Progress().step(text):
        ended = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if ended.returncode:
            raise ClusterError(text)
    if ended is None:
        return 1
    print(ended.stdout, end="", flush=True)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
