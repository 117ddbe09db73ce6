"""Pods without the API server: their processes, their own networks and sockets, seen from the machine they run on.

`kubectl port-forward` and `kubectl exec` go through the API server, and so end with it. The local cluster's containers
are processes of this machine, so root can do the same by itself; a cluster elsewhere cannot be reached like this.
"""

from __future__ import annotations

import base64
import ctypes
import http.client
import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.cluster.settings import Paths

from .calls import HTTPS_PORT, Replica, _Connection
from .kubectl import CommandError, Kubectl

ENGINE_SOCKET = "run/kvstrata/engine/engine.sock"
LINK_SOCKET = "run/kvstrata/link/adapter.sock"
HEALTH_PORT = 8081
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_LIBC = ctypes.CDLL(None, use_errno=True)


def pods_run_here(paths: Paths | None = None) -> bool:
    """Whether the cluster in use is the local one, whose containers are processes of this machine."""
    try:
        return (paths or Paths()).provider.read_text().strip() == "local"
    except OSError:
        return False


def container_pid(kubectl: Kubectl, namespace: str, pod: str, container: str) -> int:
    """Return the first process of a running container. Asks the API server for the container's id.

    Raises CommandError when the container does not run, or not on this machine.
    """
    return pid_in(kubectl.get("pod", pod, namespace), container)


def pid_in(pod: Mapping[str, Any], container: str) -> int:
    """Return the first process of a running container of a pod, as the API server showed the pod.

    Raises CommandError when the container does not run, or not on this machine.
    """
    status = pod["status"]
    statuses = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
    name = next((str(one.get("containerID", "")) for one in statuses if one["name"] == container), "")
    identity = name.rpartition("/")[2]
    pids = sorted(_in_control_group(identity)) if identity else []
    if not pids:
        where = f"container {container} of pod {pod['metadata']['name']} ({name or '?'})"
        raise CommandError(f"no process of this machine belongs to {where}")
    return pids[0]


def _in_control_group(container: str) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                groups = (folder / "cgroup").read_text()
            except OSError:
                continue
            if container in groups:
                yield int(folder.name)


@contextmanager
def network_of(pid: int) -> Iterator[None]:
    """Let this thread be in the network of a process while the block runs; sockets made in it stay there."""
    with open("/proc/thread-self/ns/net") as own, open(f"/proc/{pid}/ns/net") as other:
        _enter(other.fileno())
        try:
            yield
        finally:
            _enter(own.fileno())


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _NEW_NETWORK) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the pod's network cannot be entered: {os.strerror(number)}")


def scrape(pid: int, port: int, path: str = "/metrics", timeout_s: float = 60.0) -> str:
    """GET a page of a process' pod, from within that pod's network. Raises OSError."""
    with network_of(pid):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        connection.connect()
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def metric(text: str, name: str) -> float:
    """Return the sum of a metric's samples in a page of metrics; 0 when there are none."""
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)", text, re.M)
    return sum(float(value) for value in found)


def sample(text: str, name: str, **labels: str) -> float | None:
    """Return the sum of a metric's samples that carry these labels; None when there are none."""
    found = re.findall(rf"^{re.escape(name)}(?:{{([^}}]*)}})? (\S+)", text, re.M)
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    values = [float(value) for shown, value in found if wanted <= set(shown.split(","))]
    return sum(values) if values else None


class DirectReplica(Replica):
    """One pod of a model, reached through its gate without the API server, which is asked once, at the start."""

    def __init__(self, kubectl: Kubectl, namespace: str, model: str, pod: str, tls: ssl.SSLContext) -> None:
        super().__init__(kubectl, namespace, model, pod, HTTPS_PORT, tls)
        self._gate = container_pid(kubectl, namespace, pod, "gate")
        self._engine = container_pid(kubectl, namespace, pod, "engine")

    def metric(self, name: str) -> float:
        """Return the sum of one of the engine's own metrics, read through the engine's socket."""
        with socket.socket(socket.AF_UNIX) as engine:
            engine.settimeout(60)
            engine.connect(f"/proc/{self._engine}/root/{ENGINE_SOCKET}")
            engine.sendall(b"GET /metrics HTTP/1.0\r\nHost: engine\r\n\r\n")
            text = b"".join(iter(lambda: engine.recv(65536), b"")).decode()
        return metric(text, name)

    def gate_metric(self, name: str) -> float:
        """Return the sum of one of the gate's own metrics."""
        return metric(scrape(self._gate, HEALTH_PORT), name)

    def ask_cache(self, line: bytes) -> bytes:
        """Send a line to the pod's cache server, as its gate does, and return the answer's. Raises OSError."""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(60)
            link.connect(f"/proc/{self._gate}/root/{LINK_SOCKET}")
            link.sendall(line)
            with link.makefile("rb") as answer:
                return answer.readline()

    def not_ready(self) -> str:
        """Return the gate's reason why the pod is not ready, or an empty string. Raises OSError."""
        answer = scrape(self._gate, HEALTH_PORT, "/readyz").strip()
        return "" if answer == "ok" else answer

    def _connect(self) -> _Connection:
        connection = super()._connect()
        with network_of(self._gate):
            connection.connect()
        return connection


def direct_replica(kubectl: Kubectl, namespace: str, model: str, pod: str) -> DirectReplica:
    """Find one pod's processes, and the authority of its gate's certificate."""
    secret = kubectl.get("secret", f"kvs-{model}-gate-tls", namespace)
    authority = base64.b64decode(secret["data"]["ca.crt"]).decode()
    return DirectReplica(kubectl, namespace, model, pod, ssl.create_default_context(cadata=authority))
