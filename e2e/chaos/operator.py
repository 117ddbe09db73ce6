"""The operator of a managed cluster without Kubernetes: its own loop, over simulated pods.

The product's own code tends the cluster (`kvstrata.reconcile.redis.topology`). The API server is reduced to the parts
that this code uses: pods, which are passed in here, Secrets, and evictions. The plans' part is done here, too: a shard
without slots is removed, and StatefulSets get fewer pods, when the rules decide so.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from kvstrata.clients.kube import Kube
from kvstrata.clients.resources import SECRET, Resource
from kvstrata.model.pods import BackendAccess, ClusterReport
from kvstrata.model.redis.cluster import Cluster, Goal, ServerPod
from kvstrata.objects import names
from kvstrata.objects.redis.users import ADMIN_USER
from kvstrata.plan.actions import ReconcileCluster
from kvstrata.plan.redis.topology import Step, look
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis.topology import Topologies
from kvstrata.reconcile.store import Store

NAMESPACE, TIER = "team", "shared"
PASSWORD, AUTHORITY = ("auth", "password"), ("authority", "ca.crt")
"""Secrets, and keys in them."""
TEND_S = 0.1
"""How often pods are passed in and the operator looks again: at rest, more often than it would by itself."""


class Pods(Protocol):
    """The pods of one tier, and the actions of their controllers on request of the operator."""

    goal: Goal

    @property
    def pods(self) -> Mapping[str, ServerPod]:
        """Pods by uid, as the API server would show them."""

    def evict(self, uid: str) -> None:
        """Delete a pod; its StatefulSet makes another."""

    def drain(self, shard: int) -> None:
        """Remove a shard's StatefulSet."""

    def shrink(self) -> None:
        """Give StatefulSets fewer pods, where they have more than the tier wants."""


@dataclass(frozen=True)
class Servers:
    """How the pods' servers are reached: the port of all, and TLS if there is an authority to trust."""

    port: int
    ca_pem: bytes | None = None
    server_name: str = ""


@dataclass(frozen=True)
class Seen:
    """A look that was begun after `at_s`, the step that followed from it, and the failure of the step before it."""

    at_s: float
    cluster: Cluster
    step: Step | None
    failure: str


class Operator:
    """Tends the pods until it is cancelled, which is how it dies: anywhere.

    `report` is called once for each step, `may_write` before each command; `reported_at_s` is when a look ended last,
    or a step failed.
    """

    def __init__(
        self,
        pods: Pods,
        servers: Servers,
        report: Callable[[str], None],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.seen: Seen | None = None
        self._pods, self._servers, self._report = pods, servers, report
        self._queue = WorkQueue(time.monotonic)
        self._store = Store(lambda: bytes(64), lambda: datetime.now(UTC))
        self._store.domain(NAMESPACE).clusters = _Reports(self._take_note)
        self._kube = _Api(pods, servers.ca_pem)
        self._may_write = may_write
        self._message = ""
        self.reported_at_s = time.monotonic()

    async def run(self) -> None:
        """Look and act."""
        async with Topologies(self._kube, self._store, self._queue, self._may_write) as topologies:
            while True:
                named = (replace(pod, name=_name(pod)) for pod in self._pods.pods.values())
                self._store.domain(NAMESPACE).servers[TIER] = {pod.name: pod for pod in named}
                topologies.tend(NAMESPACE, self._order())
                await asyncio.sleep(TEND_S)

    def _order(self) -> ReconcileCluster:
        authority = AUTHORITY if self._servers.ca_pem else None
        access = BackendAccess("", self._servers.server_name, ADMIN_USER, PASSWORD, authority)
        return ReconcileCluster(TIER, self._pods.goal, self._servers.port, access)

    def _take_note(self, report: ClusterReport) -> None:
        """Report the step that follows from a look, and do the plans' part. Repeated reports of a look are skipped."""
        if report.moved:
            return
        # Looks follow one another: each was begun after the report of the one before.
        began_s, self.reported_at_s = self.reported_at_s, time.monotonic()
        if report.cluster is None:
            self._report_change(f"{report.reason}: {report.message}")
            return
        found, _ = look(report.cluster, self._pods.goal)
        self.seen = Seen(began_s, report.cluster, found, report.message)
        if report.message:
            self._report(f"  {report.reason}: {report.message}")
            return
        self._report_change(f"{found.reason}: {found.message}" if found is not None else "settled")
        if found is None:
            self._pods.shrink()
        for shard in found.drained if found is not None else ():
            self._pods.drain(shard)

    def _report_change(self, message: str) -> None:
        if message != self._message:
            self._message = message
            self._report(message)


def _name(pod: ServerPod) -> str:
    """Name of a pod of that place: the operator ignores pods with other names."""
    return f"{names.redis_shard(TIER, pod.shard)}-{pod.ordinal}"


class _Reports(dict[str, ClusterReport]):
    """A store's reports about clusters; `notify` is called with each look."""

    def __init__(self, notify: Callable[[ClusterReport], None]) -> None:
        super().__init__()
        self._notify = notify

    def __setitem__(self, tier: str, report: ClusterReport) -> None:
        super().__setitem__(tier, report)
        self._notify(report)


class _Api(Kube):
    """An API server that has two Secrets, and allows every eviction."""

    def __init__(self, pods: Pods, ca_pem: bytes | None) -> None:
        self._pods = pods
        self._secrets = {PASSWORD[0]: {PASSWORD[1]: ADMIN_USER.encode()}, AUTHORITY[0]: {AUTHORITY[1]: ca_pem or b""}}

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        assert (resource, namespace) == (SECRET, NAMESPACE), (resource, namespace)
        return {"data": {key: base64.b64encode(value).decode() for key, value in self._secrets[name].items()}}

    async def request(self, method: str, path: str, *, body: Any = None, **_: Any) -> dict[str, Any]:
        assert (method, path.rpartition("/")[2]) == ("POST", "eviction"), (method, path)
        uid = body["deleteOptions"]["preconditions"]["uid"]
        if uid in self._pods.pods:
            self._pods.evict(uid)
        return {}
