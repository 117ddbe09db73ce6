"""The operator's replicas: their leader, their processes, and the faults that a test inflicts on them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from e2e.cluster.audit import AuditLog, Write
from e2e.cluster.settings import Paths

from .direct import metric, pid_in, scrape
from .install import SYSTEM_NAMESPACE
from .kubectl import LIMIT_S, CommandError, Kubectl, wait_until

LEASE = "kvstrata-operator"
DEPLOYMENT = "kvstrata"
SELECTOR = "app.kubernetes.io/component=operator"
HTTP_PORT = 8080
QUIET_S = 1.5
"""A leader that reconciled nothing for so long has nothing left to do."""


@dataclass(frozen=True, slots=True)
class OperatorPod:
    """One replica's container as it runs now."""

    name: str
    uid: str
    pid: int
    restarts: int

    def metric(self, name: str) -> float:
        """Return the sum of one of its metrics; 0 while it does not answer."""
        try:
            return metric(scrape(self.pid, HTTP_PORT, timeout_s=2), name)
        except OSError:
            return 0.0

    @property
    def leads(self) -> bool:
        """Whether it acts."""
        return self.metric("kvstrata_leading") == 1

    def kill(self) -> float:
        """Let its process vanish (SIGKILL); return the wall-clock time at which that was done, in Unix seconds."""
        at = time.time()
        os.kill(self.pid, signal.SIGKILL)
        return at


class Operators:
    """The replicas of the installed operator."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl

    def pods(self) -> list[OperatorPod]:
        """Return the replicas whose process runs."""
        found = []
        for pod in self._kubectl.list("pod", SYSTEM_NAMESPACE, SELECTOR):
            status = (pod["status"].get("containerStatuses") or [{}])[0]
            name = pod["metadata"]["name"]
            if "running" not in status.get("state", {}) or "deletionTimestamp" in pod["metadata"]:
                continue
            try:
                pid = pid_in(pod, "operator")
            except CommandError:
                continue
            found.append(OperatorPod(name, pod["metadata"]["uid"], pid, int(status["restartCount"])))
        return found

    def restarts(self, name: str) -> int:
        """Return how often a replica's container has been started again."""
        status = self._kubectl.get("pod", name, SYSTEM_NAMESPACE)["status"]
        return int(status["containerStatuses"][0]["restartCount"])

    def holder(self) -> str:
        """Return the pod that holds the Lease, or nothing."""
        spec = self._kubectl.get("lease", LEASE, SYSTEM_NAMESPACE)["spec"]
        return str(spec.get("holderIdentity") or "")

    def acting(self) -> OperatorPod:
        """Wait until a replica leads and has nothing left to do; return it."""

        def settled() -> OperatorPod | None:
            leader = next((pod for pod in self.pods() if pod.leads), None)
            if leader is None:
                return None
            done = leader.metric("kvstrata_reconcile_seconds_count")
            time.sleep(QUIET_S)
            quiet = done > 0 and leader.metric("kvstrata_reconcile_seconds_count") == done
            return leader if quiet and leader.leads else None

        found: OperatorPod = wait_until("an operator leads and rests", settled)
        return found

    def fresh(self) -> OperatorPod:
        """Return a leader with a spare, neither of which has restarted: Kubernetes delays every further restart."""
        for pod in self.pods():
            if pod.restarts:
                self._kubectl.run("-n", SYSTEM_NAMESPACE, "delete", "pod", pod.name, "--wait=true")
        wait_until("two operators that never restarted run", self._two_ready)
        return self.acting()

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Let there be no operator while the block runs."""
        self.scale(0)
        try:
            yield
        finally:
            self.scale(2)

    def scale(self, replicas: int) -> None:
        """Set how many replicas there are and wait until that is so."""
        name = f"deployment/{DEPLOYMENT}"
        self._kubectl.run("-n", SYSTEM_NAMESPACE, "scale", name, f"--replicas={replicas}")
        if replicas:
            self._kubectl.run("-n", SYSTEM_NAMESPACE, "rollout", "status", name)
        else:
            wait_until("no operator runs", lambda: not self._kubectl.list("pod", SYSTEM_NAMESPACE, SELECTOR))

    def _two_ready(self) -> bool:
        pods = self.pods()
        ready = self._kubectl.get("deployment", DEPLOYMENT, SYSTEM_NAMESPACE)["status"].get("readyReplicas")
        return len(pods) == 2 and ready == 2 and not any(pod.restarts for pod in pods)


class OperatorWrites:
    """Writes of the operators of a namespace since this object was created, by the API server's audit log; the Lease
    apart."""

    def __init__(self, paths: Paths | None = None, namespace: str = SYSTEM_NAMESPACE) -> None:
        self._log, self._namespace = AuditLog((paths or Paths()).node / "control-plane"), namespace

    def all(self) -> list[Write]:
        """Return every write that took effect, but for those of the Lease."""
        return [write for write in self.every_attempt() if write.done and write.resource != "leases"]

    def every_attempt(self) -> list[Write]:
        """Return every write that was asked for, refused ones and the Lease's with them."""
        account = f"system:serviceaccount:{self._namespace}:"
        return [write for write in self._log.writes() if write.account.startswith(account)]

    def bundle_roots(self) -> list[Write]:
        """Return the commits of bundles: a commit is the write of a root."""
        return [w for w in self.all() if w.resource == "secrets" and re.fullmatch(r"kvs-.*-bundle", w.name)]

    def when(self, count: int, act: Callable[[], float]) -> float:
        """Wait for that many writes, then `act` at once and return its result."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.all()) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"only {len(self.all())} writes in {LIMIT_S:.0f} s: {self.all()}")
            time.sleep(0.001)
        return act()
