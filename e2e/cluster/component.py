"""One program of a control plane: started, and on purpose paused, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.processes import children_of, recorded_pid, spawn, wait_until
from e2e.cluster.progress import ClusterError


class Component:
    """A program of the control plane in `directory`, by its name; any process may have started it."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self._pid_file = directory / "pid" / name
        self._log = directory / "log" / f"{name}.log"
        self._command = directory / "command" / f"{name}.json"

    @property
    def pid(self) -> int:
        """The program's process, below the one that put it into the node's namespaces.

        Raises:
            ClusterError: it does not run.
        """
        pid = recorded_pid(self._pid_file)
        if pid is None:
            raise ClusterError(f"{self.name} does not run", log=self._log)
        return (children_of(pid) or [pid])[0]

    def start(self, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        """Start it and remember how, so that another process can start it again."""
        self._command.parent.mkdir(parents=True, exist_ok=True)
        self._command.write_text(json.dumps([str(part) for part in command]))
        return spawn(command, log=self._log, pid_file=self._pid_file)

    def start_again(self) -> None:
        """Start it as it was started last. Nothing happens while it runs."""
        if recorded_pid(self._pid_file) is None:
            self.start(json.loads(self._command.read_text()))

    def kill(self) -> None:
        """End it at once (SIGKILL); returns when it is gone."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        if not wait_until(lambda: recorded_pid(self._pid_file) is None, timeout_s=10):
            raise ClusterError(f"{self.name} (process {pid}) does not end", log=self._log)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let it hang (SIGSTOP) while the block runs: connections stay open, and nothing is answered."""
        outer = recorded_pid(self._pid_file)
        try:
            with paused(self.pid):
                yield
        finally:
            # nsenter stops itself when its child is stopped, and would not notice later that its child ended.
            if outer is not None and recorded_pid(self._pid_file) == outer:
                os.kill(outer, signal.SIGCONT)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Let it be gone while the block runs: connections break, and new ones are refused."""
        try:
            self.kill()
            yield
        finally:
            self.start_again()


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop a process while the block runs; it may end meanwhile by other hands."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
