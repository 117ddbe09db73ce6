"""kubectl and helm, as a user would type them."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e.cluster.ports import free_port
from e2e.cluster.settings import Paths

if TYPE_CHECKING:
    from e2e.product.api_reader import ApiReader  # needs packages that the demo does without

FORWARD_TIMEOUT_S = 60.0

LIMIT_S = 300.0
"""At least ten times as long as a quiet machine needs for anything but a rollout of engines: it is the limit of waits
that end by their condition, and lateness is no failure."""


class CommandError(Exception):
    """A command failed; the message holds the command and its output."""


class Kubectl:
    """Runs kubectl and helm against one cluster. With `reader`, objects are read over its connections instead."""

    def __init__(
        self, kubeconfig: Path | None = None, paths: Paths | None = None, reader: ApiReader | None = None
    ) -> None:
        paths = paths or Paths()
        self.kubeconfig = kubeconfig or paths.kubeconfig
        self._reader = reader
        self.environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{paths.bin}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def run(
        self, *arguments: str, stdin: str | None = None, timeout_s: float = LIMIT_S, program: str = "kubectl"
    ) -> str:
        """Run one command and return its output. Raises CommandError."""
        try:
            done = subprocess.run(
                [program, *arguments],
                input=stdin,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"{program} {' '.join(arguments)}: no answer in {timeout_s:.0f} s") from error
        if done.returncode != 0:
            raise CommandError(f"{program} {' '.join(arguments)}:\n{done.stderr.strip()}")
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command that runs until it is ended, with its output to be read."""
        return subprocess.Popen(
            ["kubectl", *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def helm(self, *arguments: str, timeout_s: float = LIMIT_S) -> str:
        """Run helm."""
        return self.run(*arguments, timeout_s=timeout_s, program="helm")

    def apply(self, *objects: Mapping[str, Any]) -> str:
        """Apply objects."""
        return self.run(
            "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        )

    def refused(self, *objects: Mapping[str, Any]) -> str:
        """Apply objects that must be refused; return the refusal. Raises AssertionError if they are accepted."""
        try:
            self.apply(*objects)
        except CommandError as error:
            return str(error)
        raise AssertionError("the API server accepted an object that it should have refused")

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any]:
        """Return one object. Raises CommandError."""
        status, found = self._reader.read(kind, namespace, name) if self._reader else (0, {})
        if status != 200:
            found = json.loads(self.run("-n", namespace, "get", kind, name, "-o", "json"))
        return found

    def list(self, kind: str, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Return all objects of a kind, by name. Raises CommandError."""
        status, found = self._reader.read(kind, namespace, selector=selector) if self._reader else (0, {})
        if status != 200:
            chosen = ["-l", selector] if selector else []
            found = json.loads(self.run("-n", namespace, "get", kind, *chosen, "-o", "json"))
        return sorted(found["items"], key=lambda item: str(item["metadata"]["name"]))

    def condition(self, kind: str, name: str, namespace: str, condition: str) -> dict[str, Any]:
        """Return a condition of an object, or an empty dict."""
        status = self.get(kind, name, namespace).get("status") or {}
        return next((c for c in status.get("conditions") or () if c["type"] == condition), {})

    def exec(self, pod: str, namespace: str, container: str, *command: str) -> str:
        """Run a command in a container."""
        return self.run("-n", namespace, "exec", pod, "-c", container, "--", *command)

    @contextmanager
    def forward(self, namespace: str, target: str, port: int) -> Iterator[int]:
        """Forward a free local port to `port` of `target` (`pod/name`) while the block runs."""
        local = free_port()
        process = subprocess.Popen(
            ["kubectl", "-n", namespace, "port-forward", target, f"{local}:{port}"],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for_port(local, process)
            yield local
        finally:
            process.terminate()
            process.wait(10)


def fresh_name(beginning: str) -> str:
    """Return an object's name that no earlier run has used."""
    return f"{beginning}-{secrets.token_hex(4)}"


def wait_until(what: str, holds: Any, timeout_s: float = LIMIT_S, every_s: float = 0.25) -> Any:
    """Return the first true result of `holds()`. Raises AssertionError with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    last: Any = None
    while time.monotonic() < deadline:
        last = holds()
        if last:
            return last
        time.sleep(every_s)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what} (last: {last!r})")


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + FORWARD_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise CommandError(f"no connection to the pod through local port {port}")


def pod_names(pods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of pods."""
    return [str(pod["metadata"]["name"]) for pod in pods]
