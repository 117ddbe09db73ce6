"""Who had a replica take over, and what follows when it will not."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from kvstrata.clients.redis.nodes import REFUSED, Sent
from kvstrata.model.redis.cluster import Cluster, Command, ServerPod
from kvstrata.plan.redis.cluster import cluster_state
from kvstrata.plan.redis.topology import Step, StepReason
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis import topology as module
from kvstrata.reconcile.redis.topology import Topologies
from kvstrata.reconcile.store import Store
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE
from tests.topology import looks
from tests.unit.reconcile.test_topologies import GOAL, Nodes, Told, counted, look, teller, tier, until, whole


def test_a_failover_of_the_servers_own_is_told_from_one_that_was_ordered() -> None:
    told = Told()
    before = whole(away=())
    heir, slots = looks.node(0, 1), looks.even(3)[0]
    after = replace(before, servers={uid: _claimed(one, heir, slots) for uid, one in before.servers.items()})

    async def scenario(name: str, order: StepReason | None) -> None:
        events = teller(name, told)
        await look(events, before)
        if order is not None:
            events.sent(Step(order, "", (Command("uid-0-1", heir, ("CLUSTER", "FAILOVER")),)))
        await look(events, after)
        await look(events, after)

    asyncio.run(scenario("vote", None))
    asyncio.run(scenario("planned", StepReason.FAILING_OVER))
    asyncio.run(scenario("ordered", StepReason.TAKING_OVER))
    assert told.all == [("FailedOver", True), ("FailedOver", False), ("FailedOver", True)]
    assert told.messages[0] == "kvs-t-redis-0-1 has 5461 slots of kvs-t-redis-0-0, which is a replica now"
    assert counted("tier_failovers_total", "vote", by="servers") == 1
    assert counted("tier_failovers_total", "planned", by="planned") == 1
    assert counted("tier_failovers_total", "ordered", by="operator") == 1


def _claimed(server: Any, heir: str, slots: looks.Slots) -> Any:
    peers = tuple(
        replace(peer, slots=slots, is_primary=True, primary=None, epoch=9)
        if peer.node_id == heir
        else replace(peer, slots=(), is_primary=False, primary=heir)
        if peer.node_id == looks.node(0)
        else peer
        for peer in server.peers
    )
    return replace(server, peers=peers)


class Refusing(Nodes):
    """Servers of which those of the newest template are replicas, and will not take over."""

    asked = 0

    async def look(self, pods: Iterable[ServerPod]) -> Cluster:
        found = whole()
        newest = {uid: replace(pod, revision="new") if pod.ordinal else pod for uid, pod in found.pods.items()}
        fits = {uid: replace(one, max_bytes=GOAL.max_bytes_each) for uid, one in found.servers.items()}
        return replace(found, pods=newest, servers=fits)

    async def send(
        self, commands: Sequence[Command], pods: Mapping[str, ServerPod], permitted: Callable[[], bool]
    ) -> tuple[Sent, ...]:
        assert [command.words for command in commands] == [("CLUSTER", "FAILOVER")]
        Refusing.asked += 1
        return tuple(Sent(command, REFUSED, "ERR Master is down or failed") for command in commands)


def test_a_refused_failover_is_told_and_tried_again_and_a_later_one_is_the_servers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RedisNodes", Refusing)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(import_module("kvstrata.plan.redis.topology.roll"), "FAILOVER_PAUSE_S", 0.0)
    told = Told()

    async def scenario() -> None:
        store = Store(lambda: bytes(64), module.utc_now)
        store.observe(tier("refused", formedAt="2026-01-01T00:00:00Z"))
        state = cluster_state(store.world(NAMESPACE), store.world(NAMESPACE).tiers["refused"])
        assert state is not None
        order = replace(state.order, goal=replace(GOAL, revisions=dict.fromkeys(range(3), "new")))
        assert order.access.password is not None
        name, key = order.access.password
        kube = MemoryKube()
        secret = {"metadata": {"name": name, "namespace": NAMESPACE}, "data": {key: base64.b64encode(b"p").decode()}}
        kube.put({"apiVersion": "v1", "kind": "Secret", **secret})
        queue = WorkQueue(asyncio.get_running_loop().time)
        async with Topologies(kube, store, queue, lambda: True) as topologies:
            topologies.tend(NAMESPACE, order)
            events = topologies._tended[NAMESPACE, "refused"].events
            monkeypatch.setattr(events, "_events", told)
            await until(lambda: Refusing.asked >= 3)
            report = store.world(NAMESPACE).clusters["refused"]
            assert (report.reason, report.message) == (
                "CommandFailed", "kvs-t-redis-0-1 refuses CLUSTER FAILOVER: ERR Master is down or failed"
            )  # fmt: skip
            planned = cluster_state(store.world(NAMESPACE), store.world(NAMESPACE).tiers["refused"])
            assert planned is not None
            assert str(planned.fields["progress"]).endswith(report.message)
        heir, slots = looks.node(0, 1), looks.even(3)[0]
        before = whole()
        after = replace(before, servers={uid: _claimed(one, heir, slots) for uid, one in before.servers.items()})
        await look(events, after)

    asyncio.run(scenario())
    assert told.all[:2] == [("ReplacementStarted", False), ("FailedOver", True)]
    assert counted("tier_failovers_total", "refused", by="servers") == 1


def test_a_failover_long_after_it_was_ordered_is_the_servers_own() -> None:
    told = Told()
    before = whole()
    heir, slots = looks.node(0, 1), looks.even(3)[0]
    after = replace(before, servers={uid: _claimed(one, heir, slots) for uid, one in before.servers.items()})

    async def scenario() -> None:
        events = teller("late", told)
        await look(events, before)
        events.sent(Step(StepReason.FAILING_OVER, "", (Command("uid-0-1", heir, ("CLUSTER", "FAILOVER")),)))
        await look(events, replace(after, at_s=60.0))

    asyncio.run(scenario())
    assert told.all == [("FailedOver", True)]
