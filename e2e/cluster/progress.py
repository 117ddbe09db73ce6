"""Progress for the user: the running step, its duration, and advice when it fails."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

HEARTBEAT_INTERVAL_S = 15.0
TTY_INTERVAL_S = 0.5
QUIET_BELOW_S = 2.0


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


class Progress:
    """Prints steps as they run: a counter in place on a terminal, a heartbeat line elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()

    def report(self, message: str) -> None:
        """Print one line."""
        print(f"\r\033[K{message}" if self._on_terminal else message, file=self._stream, flush=True)

    @contextmanager
    def step(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Announce `what` while the body runs, and print how long it took.

        Steps shorter than two seconds print a single line when they end. A function is asked each time.
        """
        text = what if callable(what) else lambda: what
        started = time.monotonic()
        done = threading.Event()
        heartbeat = threading.Thread(target=self._heartbeat, args=(text, started, done), daemon=True)
        heartbeat.start()
        outcome = "failed"
        try:
            yield
            outcome = "done"
        finally:
            done.set()
            heartbeat.join()
            self._finish(f"{text()}: {outcome} ({time.monotonic() - started:.1f} s)")

    def _heartbeat(self, text: Callable[[], str], started: float, done: threading.Event) -> None:
        if done.wait(QUIET_BELOW_S):
            return
        interval_s = TTY_INTERVAL_S if self._on_terminal else HEARTBEAT_INTERVAL_S
        while True:
            elapsed_s = time.monotonic() - started
            if self._on_terminal:
                print(f"\r\033[K{text()} ... {elapsed_s:.0f} s", end="", file=self._stream, flush=True)
            else:
                self.report(f"{text()} ... {elapsed_s:.0f} s")
            if done.wait(interval_s):
                return

    def _finish(self, line: str) -> None:
        self.report(line)
