"""Slots on their way are counted and told while their movers are at it, which may be for hours."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from kvstrata.clients.redis.slot_keys import OnProgress
from kvstrata.clients.redis.slot_mover import SlotMover
from kvstrata.model.redis.cluster import Cluster
from kvstrata.model.refs import Key
from kvstrata.plan.redis.cluster import cluster_state
from kvstrata.plan.redis.topology import MoveOrder
from kvstrata.reconcile.events import Events
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis import topology as module
from kvstrata.reconcile.redis.topology import Topologies
from kvstrata.reconcile.redis.topology_events import TopologyEvents
from kvstrata.reconcile.store import Store
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE
from tests.topology import looks
from tests.unit.reconcile.test_topologies import Nodes, tier, until


class Crowded(Nodes):
    """Two shards that have what three are to have, in servers of the memory that they should have."""

    max_bytes = 0

    def dial(self, ip: str, port: int) -> Any:
        raise AssertionError(ip, port)

    async def look(self, pods: Any) -> Cluster:
        found = looks.cluster([*looks.even(2), ()], replicas=1)
        fits = {uid: replace(one, max_bytes=self.max_bytes) for uid, one in found.servers.items()}
        return replace(found, servers=fits)


def counted(name: str, of: str) -> float | None:
    return REGISTRY.get_sample_value(f"kvstrata_tier_{name}", {"namespace": NAMESPACE, "tier": of})


def test_status_and_metrics_move_while_slots_do(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[MoveOrder] = []
    goes, ends = asyncio.Event(), asyncio.Event()

    async def carry_out(_: SlotMover, order: MoveOrder, cluster: Cluster, told: OnProgress) -> str:
        begun.append(order)
        if len(begun) > 1:
            await asyncio.Event().wait()
        await goes.wait()
        told(100, 3)
        told(61, 0)
        await ends.wait()
        told(0, 1)
        return ""

    monkeypatch.setattr(module, "RedisNodes", Crowded)
    monkeypatch.setattr(SlotMover, "carry_out", carry_out)

    async def scenario() -> None:
        store = Store(lambda: bytes(64), module.utc_now)
        store.observe(tier("moving", formedAt="2026-01-01T00:00:00Z"))
        state = cluster_state(store.world(NAMESPACE), store.world(NAMESPACE).tiers["moving"])
        assert state is not None
        monkeypatch.setattr(Crowded, "max_bytes", state.order.goal.max_bytes_each)
        assert state.order.access.password is not None
        name, key = state.order.access.password
        kube = MemoryKube()
        secret = {"metadata": {"name": name, "namespace": NAMESPACE}, "data": {key: base64.b64encode(b"p").decode()}}
        kube.put({"apiVersion": "v1", "kind": "Secret", **secret})
        queue = WorkQueue(asyncio.get_running_loop().time)
        async with Topologies(kube, store, queue, lambda: True) as topologies:
            topologies.tend(NAMESPACE, state.order)
            await until(lambda: bool(begun))
            async with asyncio.timeout(30):
                queue.done(await queue.take())
            goes.set()
            await until(lambda: counted("slots_moved_total", "moving") == 161)
            assert counted("slots_to_move", "moving") == 5461 - 161
            assert counted("moved_values_dropped_total", "moving") == 3
            async with asyncio.timeout(30):
                assert await queue.take() == Key("CacheTier", NAMESPACE, "moving"), "it is planned for what has moved"
            world = store.world(NAMESPACE)
            assert world.clusters["moving"].moved == 161
            told = cluster_state(world, world.tiers["moving"])
            assert told is not None
            assert "moving slots: 161 of 5,461" in str(told.fields["progress"])
            ends.set()
            await until(lambda: counted("moved_values_dropped_total", "moving") == 4)

    asyncio.run(scenario())


def test_slots_that_are_only_closed_have_not_moved() -> None:
    events = TopologyEvents(Events(MemoryKube()), NAMESPACE, "counted", lambda: None)
    moves, closes = (
        MoveOrder("a", target, ((0, 9),), atomic=False, drops=False, movable_bytes=1) for target in ("b", "a")
    )
    told = [events.moved(*more) for more in ((moves, 4, 0), (closes, 3, 0), (moves, 0, 1), (moves, 2, 0))]
    assert told == [4, 4, 4, 6]
    assert counted("slots_moved_total", "counted") == 6
    assert counted("moved_values_dropped_total", "counted") == 1
