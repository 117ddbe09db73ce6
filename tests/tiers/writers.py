"""Several writer processes, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Writer:
    """One process of `tests.tiers.writer`."""

    def __init__(self, port: int, keyspace: str, *, limit: int, window_ms: int, seed: int, scale: int) -> None:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}/operator/src:{ROOT}/sidecar/src:{ROOT}"}
        arguments = map(str, (port, keyspace, limit, window_ms, seed, scale))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiers.writer", *arguments],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )

    def first_line(self) -> None:
        """Wait until it stored, or was refused, for the first time."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the writer ended"

    def first_store(self) -> None:
        """Wait until it stored for the first time."""
        assert self._process.stdout is not None
        line = b"0"
        while line.split()[0] == b"0":
            line = self._process.stdout.readline()
            assert line, "the writer ended"

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does; returns when it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        about = Path(f"/proc/{self._process.pid}/stat")
        give_up_at_s = time.monotonic() + 60
        while about.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < give_up_at_s, "it does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> dict[str, int]:
        """Kill it and return its last line."""
        self._process.kill()
        lines = self._process.communicate()[0].decode().splitlines()
        last = next((line for line in reversed(lines) if len(line.split()) == 4), "0 0 0 0")
        return dict(zip(("stored", "refused", "errors", "evicted_bytes"), map(int, last.split()), strict=True))
