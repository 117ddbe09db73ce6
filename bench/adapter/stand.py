"""The benchmark's processes: Redis servers, and the measured process with LMCache."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from e2e.cluster.ports import free_port
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.rootfs import server_command

ROOT = Path(__file__).parents[2]
LMCACHE_PYTHON = "KVSTRATA_LMCACHE_PYTHON"
START_TIMEOUT_S = 20.0
_PR_SET_PDEATHSIG = 1


def lmcache_python(progress: Progress) -> Path:
    """Return the interpreter that has LMCache, installed if it is not there. Raises ClusterError if that fails."""
    named = os.environ.get(LMCACHE_PYTHON)
    if named:
        return Path(named)
    with progress.step("LMCache, as the tests install it"):
        command = [sys.executable, str(ROOT / "tests/dataplane/install_lmcache.py")]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"LMCache could not be installed:\n{done.stdout[-2000:]}", advice="run it again")
    return ROOT / ".local/venv-lmcache/bin/python"


class Redis:
    """A server on loopback without persistence; it dies with the benchmark."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_port()
        self.log = directory / f"redis-{self.port}.log"
        command = [
            *server_command(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(directory), *options,
        ]  # fmt: skip
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent
            )
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > give_up_at_s:
                    raise ClusterError("redis-server did not start", log=self.log) from None
                time.sleep(0.02)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class Client:
    """The measured process: a `module` of `bench`, which answers questions."""

    def __init__(self, python: Path, directory: Path, module: str = "adapter.client") -> None:
        self.log = directory / f"{module}.log"
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}/operator/src:{ROOT}/sidecar/src:{ROOT}",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": str(directory),
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", f"bench.{module}", str(directory)],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                preexec_fn=_die_with_parent,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def ask(self, op: str, **parameters: Any) -> dict[str, Any]:
        """Have something done and return the answer. Raises ClusterError for an error."""
        return await asyncio.to_thread(self._ask, {"op": op, **parameters})

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        questions, answers = self._process.stdin, self._process.stdout
        if questions is None or answers is None:
            raise ClusterError("the measured process has no pipes")
        try:
            questions.write(json.dumps(question).encode() + b"\n")
            questions.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise ClusterError("the measured process ended", log=self.log)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ClusterError(f"{question['op']} failed: {answer['error']}", log=self.log)
        return answer


@contextlib.contextmanager
def servers(directory: Path, *wanted: Sequence[str]) -> Iterator[list[Redis]]:
    """Run a Redis for each list of options."""
    running: list[Redis] = []
    try:
        for options in wanted:
            running.append(Redis(directory, *options))
        yield running
    finally:
        for server in running:
            server.kill()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
