"""The operator of a managed cluster without Kubernetes: its own loop, over pods that somebody else plays.

What tends clusters is the product's (`kvstrata.reconcile.redis.topology`). The API server is reduced to what that asks
of it: pods, which are told here, Secrets, and evictions. What plans do with what it reports is done here, too: a shard
without slots goes, and StatefulSets get fewer pods, when the rules say so.
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
from kvstrata.model.pods import ClusterReport
from kvstrata.model.redis.cluster import Cluster, Goal, ServerPod
from kvstrata.objects import names
from kvstrata.objects.redis.users import ADMIN_USER
from kvstrata.plan.actions import ReconcileCluster
from kvstrata.plan.redis.topology import Step, step
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis.topology import Topologies
from kvstrata.reconcile.store import Store

NAMESPACE, TIER = "team", "shared"
PASSWORD, AUTHORITY = ("auth", "password"), ("authority", "ca.crt")
"""Secrets, and keys in them."""
TEND_S = 0.1
"""How often it is told of pods; with it, it looks again: at rest, more often than it would."""


class Pods(Protocol):
    """The pods of one tier, and what their controllers do when the operator wants it."""

    goal: Goal

    @property
    def pods(self) -> Mapping[str, ServerPod]:
        """By uid, what the API server would show."""

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
    """A look that was begun after `at_s`, what followed from it, and how the step before it ended if that failed."""

    at_s: float
    cluster: Cluster
    step: Step | None
    failure: str


class Operator:
    """Tends the pods until it is cancelled, which is how it dies: anywhere.

    `told` hears of each step once, `may_write` is asked before each command; `told_at_s` is when a look ended last,
    or a step failed.
    """

    def __init__(
        self,
        pods: Pods,
        servers: Servers,
        told: Callable[[str], None],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.seen: Seen | None = None
        self._pods, self._servers, self._told = pods, servers, told
        self._queue = WorkQueue(time.monotonic)
        self._store = Store(lambda: bytes(64), lambda: datetime.now(UTC))
        self._store.domain(NAMESPACE).clusters = _Reports(self._take_note)
        self._kube = _Api(pods, servers.ca_pem)
        self._may_write = may_write
        self._message = ""
        self.told_at_s = time.monotonic()

    async def run(self) -> None:
        """Look and act."""
        async with Topologies(self._kube, self._store, self._queue, self._may_write) as topologies:
            while True:
                named = (replace(pod, name=_name(pod)) for pod in self._pods.pods.values())
                self._store.domain(NAMESPACE).servers[TIER] = {pod.name: pod for pod in named}
                topologies.tend(NAMESPACE, self._order())
                await asyncio.sleep(TEND_S)

    def _order(self) -> ReconcileCluster:
        return ReconcileCluster(
            tier=TIER,
            goal=self._pods.goal,
            port=self._servers.port,
            username=ADMIN_USER,
            password_secret=PASSWORD,
            authority_secret=AUTHORITY if self._servers.ca_pem else None,
            server_name=self._servers.server_name,
            endpoint="",
        )

    def _take_note(self, report: ClusterReport) -> None:
        """Tell what follows from a look, and do what plans do about it. One that is told again brings nothing new."""
        if report.moved:
            return
        # Looks follow one another: each was begun after the one before was told.
        began_s, self.told_at_s = self.told_at_s, time.monotonic()
        if report.cluster is None:
            self._say(f"{report.reason}: {report.message}")
            return
        found = step(report.cluster, self._pods.goal)
        self.seen = Seen(began_s, report.cluster, found, report.message)
        if report.message:
            self._told(f"  {report.reason}: {report.message}")
            return
        self._say(f"{found.reason}: {found.message}" if found is not None else "settled")
        if found is None:
            self._pods.shrink()
        for shard in found.drained if found is not None else ():
            self._pods.drain(shard)

    def _say(self, message: str) -> None:
        if message != self._message:
            self._message = message
            self._told(message)


def _name(pod: ServerPod) -> str:
    """What a pod of that place is called: no other is taken for the tier's."""
    return f"{names.redis_shard(TIER, pod.shard)}-{pod.ordinal}"


class _Reports(dict[str, ClusterReport]):
    """What a store has of clusters; whoever wants to know hears of each look."""

    def __init__(self, told: Callable[[ClusterReport], None]) -> None:
        super().__init__()
        self._told = told

    def __setitem__(self, tier: str, report: ClusterReport) -> None:
        super().__setitem__(tier, report)
        self._told(report)


class _Api(Kube):
    """An API server that has two Secrets, and lets every pod go."""

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
