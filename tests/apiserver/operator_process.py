"""An operator as a process, seen through its own HTTP port."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster.ports import free_port

ANSWERS_WITHIN_S = 60.0
"""A process on a busy machine may answer late; one that hangs never does."""


@dataclass(slots=True)
class OperatorProcess:
    """One running operator."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def page(self, path: str) -> tuple[int, str]:
        """Status and text of a page; (0, "") while the process does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def answer(self, path: str) -> tuple[int, str]:
        """Ask for a page until the process answers; (0, "") if it has ended, or does not answer for a minute."""
        ends = time.monotonic() + ANSWERS_WITHIN_S
        while (answer := self.page(path)) == (0, "") and self.process.poll() is None and time.monotonic() < ends:
            time.sleep(0.1)
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 if the process has ended or does not answer."""
        return total(self.answer("/metrics")[1], name, **labels)

    @property
    def leading(self) -> bool:
        """Whether this process acts."""
        return self.metric("kvstrata_leading") == 1

    def wait_until_leading(self, timeout_s: float = 240.0) -> float:
        """Wait, and return how many seconds it took."""
        start = time.monotonic()
        while not self.leading:
            assert self.process.poll() is None, f"the operator ended\n{self.log_tail()}"
            assert time.monotonic() < start + timeout_s, f"the operator does not lead\n{self.log_tail()}"
            time.sleep(0.1)
        return time.monotonic() - start

    def stop(self) -> int:
        """Ask it to end, as the kubelet does; return the exit code."""
        self.process.terminate()
        return self.process.wait(60)

    def kill(self) -> None:
        """Let it vanish."""
        self.process.kill()
        self.process.wait(10)

    def log_tail(self) -> str:
        """The last lines that it logged."""
        return "\n".join(self.log.read_text().splitlines()[-25:])


def total(page: str, name: str, **labels: str) -> float:
    """The sum of the samples of a metric on a page that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.split("{")[0].split(" ")[0] == name and all(pair in line for pair in wanted)
    )


@dataclass(slots=True)
class Operators:
    """Starts operators against one apiserver, each with a port and a log of its own."""

    kubeconfig: Path
    namespace: str
    repository: Path
    logs: Path
    started: list[OperatorProcess] = field(default_factory=list)

    def start(self, name: str, module: str = "kvstrata.cli.operator", **variables: str) -> OperatorProcess:
        """Start an operator whose pod has this name; `variables` add to its environment."""
        port = free_port()
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.repository}/operator/src:{self.repository}/sidecar/src:{self.repository}",
            "KUBECONFIG": str(self.kubeconfig),
            "KVSTRATA_NAMESPACE": self.namespace,
            "KVSTRATA_POD_NAME": name,
            "KVSTRATA_SIDECAR_IMAGE": "localhost/kvstrata-sidecar:test",
            "KVSTRATA_EXTERNAL_REDIS": '{"cidrs": ["127.0.0.0/8"], "plainPasswords": true}',
            "KVSTRATA_HOST_PATHS": "/var/cache",
            "KVSTRATA_REDIS_IMAGE": "localhost/kvstrata-redis:test",
            "KVSTRATA_HTTP_PORT": str(port),
            **variables,
        }
        log = self.logs / f"{name}-{len(self.started)}.log"
        command = [sys.executable, "-m", module]
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        self.started.append(OperatorProcess(process, port, log))
        return self.started[-1]

    def running(self) -> list[OperatorProcess]:
        """Those that have not ended."""
        return [operator for operator in self.started if operator.process.poll() is None]
