"""A caller inside the cluster, which reaches a model by its Service as any application does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .kubectl import Kubectl, wait_until

NAME = "caller"
PROGRAM = Path(__file__).with_name("caller_program.py")
AUTHORITY = "/etc/caller/ca.crt"


@dataclass(frozen=True, slots=True)
class Request:
    """Outcome of one request. Times are seconds since 1970; `status` is 0 when the connection broke before it."""

    stream: bool
    began: float
    ended: float
    status: int
    events: int
    done: bool
    problem: str = ""

    @property
    def served(self) -> bool:
        """Whether a whole answer came: a document, or a stream with its end."""
        return self.status == 200 and self.done and not self.problem


@dataclass(frozen=True, slots=True)
class Calls:
    """All requests of a caller that have ended."""

    requests: Sequence[Request]

    @property
    def streams(self) -> list[Request]:
        """The streamed ones."""
        return [one for one in self.requests if one.stream]

    @property
    def broken(self) -> list[Request]:
        """Those that were not answered, or not to the end."""
        return [one for one in self.requests if not one.served]

    def __str__(self) -> str:
        longest = max((one.ended - one.began for one in self.requests), default=0.0)
        problems = f", broken: {self.broken[:3]}" if self.broken else ""
        others = len(self.requests) - len(self.streams)
        return f"{len(self.streams)} streams and {others} others, longest {longest:.1f} s{problems}"


class CallerPod:
    """The running caller."""

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        self._kubectl, self._namespace = kubectl, namespace

    def calls(self) -> Calls:
        """Return the outcomes of its requests so far."""
        lines = self._kubectl.run("-n", self._namespace, "logs", NAME, "--tail=-1").splitlines()
        return Calls([Request(**json.loads(line)) for line in lines if line.startswith("{")])


@contextmanager
def caller_pod(
    kubectl: Kubectl, namespace: str, model: str, key: str, *, streams: int, plain: int
) -> Iterator[CallerPod]:
    """Let a pod ask a model while the block runs: so many streams, and so many plain requests, side by side."""
    pods = kubectl.list("pod", namespace, f"kvstrata.io/model={model}")
    image = pods[0]["spec"]["initContainers"][0]["image"]
    host = f"kvs-{model}.{namespace}.svc"
    command = ["python3", "-S", "-u", "-c", PROGRAM.read_text(), host, "443", model, key, AUTHORITY]
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [*command, str(streams), str(plain)],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "authority", "mountPath": "/etc/caller", "readOnly": True}],
    }
    authority = {"secretName": f"kvs-{model}-gate-tls", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": NAME, "namespace": namespace},
            "spec": {
                "containers": [container],
                "volumes": [{"name": "authority", "secret": authority}],
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 65532,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": False,
            },
        }
    )
    try:
        kubectl.run("-n", namespace, "wait", "--for=condition=Ready", f"pod/{NAME}", "--timeout=240s")
        caller = CallerPod(kubectl, namespace)
        wait_until("the caller is answered", lambda: any(one.served for one in caller.calls().requests))
        yield caller
    finally:
        kubectl.run("-n", namespace, "delete", "pod", NAME, "--ignore-not-found", "--wait=false")
