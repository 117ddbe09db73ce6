"""The operator as a process of its own, and its cost: processor time, memory, requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.apiserver import NAMESPACE, OPERATOR_NAMESPACE, REPOSITORY, ApiServer
from e2e.cluster.ports import free_port

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1
COMPILED = REPOSITORY / ".local" / "bench-pycache"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class RunningProcess:
    """A process whose cost is read from /proc."""

    process: subprocess.Popen[bytes]
    log: Path

    def cpu_s(self) -> float:
        """Processor seconds so far, user and system, of all threads."""
        return cpu_s(self.process.pid)

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Resident memory in MB (10^6 bytes): now, or its peak as `VmHWM`."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise LookupError(f"/proc knows no {field}")

    def log_tail(self) -> str:
        """The last lines that it logged."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def check(self) -> None:
        """Raise RuntimeError if it ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"a process ended with {self.process.returncode}\n{self.log_tail()}")

    def stop(self) -> None:
        """Ask it to end, as the kubelet does; kill it when it does not."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class OperatorUnderTest(RunningProcess):
    """A running operator."""

    url: str
    started_at: float

    async def metric(self, name: str) -> float | None:
        """The sum of a metric's samples; None while it does not answer."""
        page = await self._page("/metrics")
        if page is None:
            return None
        lines = (line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name)
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def wait_until_synced(self) -> float:
        """Wait until it leads and knows the world; return the seconds since it was started."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while await self._page("/readyz") is None or await self.metric("kvstrata_leading") != 1:
                self.check()
                await asyncio.sleep(POLL_S)
        return time.monotonic() - self.started_at

    async def wait_until_settled(self, quiet_s: float, timeout_s: float) -> float:
        """Wait until it has reconciled nothing for `quiet_s`; return the seconds from its start to the last time."""
        reconciled, since = await self.metric("kvstrata_reconcile_seconds_count"), time.monotonic()
        async with asyncio.timeout(timeout_s):
            while time.monotonic() - since < quiet_s:
                await asyncio.sleep(POLL_S)
                self.check()
                now = await self.metric("kvstrata_reconcile_seconds_count")
                if now != reconciled:
                    reconciled, since = now, time.monotonic()
        return since - self.started_at

    async def _page(self, path: str) -> str | None:
        try:
            async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
                return await answer.text() if answer.status == 200 else None
        except aiohttp.ClientError:
            return None


@contextlib.asynccontextmanager
async def running_operator(server: ApiServer, name: str = "operator") -> AsyncIterator[OperatorUnderTest]:
    """Run an operator over the benchmark's namespace while the block runs; it leads when the block starts."""
    port = free_port()
    environment = {
        **program_environment(),
        "KUBECONFIG": str(server.kubeconfig),
        "KVSTRATA_NAMESPACE": OPERATOR_NAMESPACE,
        "KVSTRATA_POD_NAME": name,
        "KVSTRATA_WATCH_NAMESPACES": NAMESPACE,
        "KVSTRATA_SIDECAR_IMAGE": "localhost/kvstrata-sidecar:bench",
        "KVSTRATA_REDIS_IMAGE": "localhost/kvstrata-redis:bench",
        "KVSTRATA_HTTP_PORT": str(port),
    }
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-operator-") as folder:
        log = Path(folder) / "operator.log"
        started_at = time.monotonic()
        process = spawn([sys.executable, "-m", "kvstrata.cli.operator"], environment, log)
        operator = OperatorUnderTest(process, log, f"http://127.0.0.1:{port}", started_at)
        try:
            yield operator
        except Exception:
            print(operator.log_tail(), file=sys.stderr)
            raise
        finally:
            operator.stop()


@contextlib.asynccontextmanager
async def supervised(*processes: RunningProcess) -> AsyncIterator[None]:
    """End the block with an error as soon as one of `processes` ends: nothing that it waits for would come."""

    async def supervise() -> None:
        while True:
            for process in processes:
                process.check()
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(supervise())
        yield
        task.cancel()


def program_environment() -> dict[str, str]:
    """Return the environment of a program of the product, which finds its modules compiled, as those in images are."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **inherited,
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/operator/src:{REPOSITORY}/sidecar/src",
        "PYTHONPYCACHEPREFIX": str(COMPILED),
    }


def spawn(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program with its output in `log`, in a session of its own: Ctrl-C is for the benchmark to handle."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
