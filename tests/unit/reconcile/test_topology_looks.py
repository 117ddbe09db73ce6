"""When a managed cluster is looked at: not at every plan of its tier."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from kvstrata.clients.redis.nodes import RedisNodes
from kvstrata.clients.resources import SECRET
from kvstrata.model.pods import BackendAccess
from kvstrata.model.redis.cluster import Cluster, Goal, ServerPod
from kvstrata.plan.actions import ReconcileCluster
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis import topology
from kvstrata.reconcile.redis.topology import Topologies
from kvstrata.reconcile.store import Store
from tests.support.memory_kube import MemoryKube

NAMESPACE, NAME = "team", "kvs-shared-redis-auth"
HOST = "kvs-shared-redis.team.svc"
ACCESS = BackendAccess(f"{HOST}:6379", HOST, "admin", (NAME, "admin-password"), cluster=True)
ORDER = ReconcileCluster("shared", Goal(3, 1, 1 << 30, {}), 6379, ACCESS)


class _Looks:
    """Counts looks; nobody ever answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._looked = asyncio.Event()

        async def look(_: RedisNodes, pods: Any) -> Cluster:
            self.count += 1
            self._looked.set()
            return Cluster({pod.uid: pod for pod in pods}, {}, {}, at_s=0.0)

        monkeypatch.setattr(RedisNodes, "look", look)

    async def another(self) -> None:
        self._looked.clear()
        await asyncio.wait_for(self._looked.wait(), 30)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> _Looks:
    return _Looks(monkeypatch)


async def test_plans_that_bring_nothing_new_cause_no_look_while_something_is_waited_for(
    looks: _Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "WAIT_S", 3600.0)
    monkeypatch.setattr(topology, "LONGEST_WAIT_S", 3600.0)
    kube, store = MemoryKube(), Store(lambda: bytes(64), lambda: datetime.now(UTC))
    secret = {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": {"admin-password": "c2VjcmV0"}}
    await kube.create(SECRET, NAMESPACE, secret)
    async with Topologies(kube, store, WorkQueue(lambda: 0.0), lambda: True) as topologies:
        topologies.tend(NAMESPACE, ORDER)
        await looks.another()
        for _ in range(20):
            topologies.tend(NAMESPACE, replace(ORDER))
            await asyncio.sleep(0.005)
        assert looks.count <= 2  # the first order also wakes the task that it starts

        pod = ServerPod("kvs-shared-redis-0-0", "uid", 0, 0, None, ready=False, deleting=False, revision="a")
        store.domain(NAMESPACE).servers["shared"] = {pod.name: pod}
        topologies.tend(NAMESPACE, ORDER)
        await looks.another()
        topologies.tend(NAMESPACE, replace(ORDER, goal=replace(ORDER.goal, shards=4)))
        await looks.another()


async def test_pods_that_change_bring_quick_looks_after_a_long_wait(
    looks: _Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def pause(_: Any, at_most_s: float) -> None:
        pauses.append(at_most_s)
        await asyncio.sleep(0)

    monkeypatch.setattr(topology._Tending, "pause", pause)
    kube, store = MemoryKube(), Store(lambda: bytes(64), lambda: datetime.now(UTC))
    secret = {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": {"admin-password": "c2VjcmV0"}}
    await kube.create(SECRET, NAMESPACE, secret)
    async with Topologies(kube, store, WorkQueue(lambda: 0.0), lambda: True) as topologies:
        topologies.tend(NAMESPACE, ORDER)
        for _ in range(30):
            await looks.another()
        assert pauses[-1] == topology.LONGEST_WAIT_S
        pod = ServerPod("kvs-shared-redis-0-0", "uid", 0, 0, None, ready=False, deleting=False, revision="a")
        store.domain(NAMESPACE).servers["shared"] = {pod.name: pod}
        before = len(pauses)
        for _ in range(3):
            await looks.another()
        assert min(pauses[before:]) < 2 * topology.WAIT_S
