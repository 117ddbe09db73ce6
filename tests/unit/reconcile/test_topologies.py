"""What is told of a managed cluster: Events and counts, and a total loss before the cluster is formed anew."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import REGISTRY

from kvstrata.api.base import Resource
from kvstrata.api.cachetier import CacheTier, SlotLoss
from kvstrata.clients.kube import KubeError
from kvstrata.clients.redis.nodes import Sent
from kvstrata.clients.redis.probe import Access
from kvstrata.model.redis.cluster import SLOTS, Cluster, Command, Peer, ServerPod
from kvstrata.model.refs import Key
from kvstrata.plan.redis import topology as rules
from kvstrata.plan.redis.cluster import cluster_state
from kvstrata.plan.redis.topology import Step, StepReason
from kvstrata.reconcile import metrics
from kvstrata.reconcile.events import Events
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis import topology as module
from kvstrata.reconcile.redis.topology import Topologies
from kvstrata.reconcile.redis.topology_events import TopologyEvents
from kvstrata.reconcile.store import Store
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, redis_tier
from tests.topology import looks

GOAL = looks.goal(3, replicas=1, revisions=dict.fromkeys(range(3), "r"))


class Told(Events):
    """Events that are kept."""

    def __init__(self) -> None:
        self.all: list[tuple[str, bool]] = []
        self.messages: list[str] = []

    async def publish(self, about: Resource, reason: str, message: str, *, warning: bool = False) -> None:
        self.all.append((reason, warning))
        self.messages.append(message)


def tier(name: str = "shared", **status: Any) -> dict[str, Any]:
    managed = {"managed": {"shards": 3, "replicasPerShard": 1, "tls": {"mode": "Disabled"}}}
    raw = redis_tier(name, capacity="30Gi", redis=managed)
    raw["metadata"] |= {"uid": f"uid-{name}", "generation": 1, "resourceVersion": str(1 + 10 * len(status))}
    return {**raw, "status": status}


def teller(name: str, told: Told, **status: Any) -> TopologyEvents:
    return TopologyEvents(told, NAMESPACE, name, lambda: CacheTier.parse(tier(name, **status)))


def counted(name: str, of: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"kvstrata_{name}", {"namespace": NAMESPACE, "tier": of, **labels})


def whole(shards: int = 3, **options: Any) -> Cluster:
    return looks.cluster(looks.even(shards), replicas=1, **options)


def empty() -> Cluster:
    """Servers that were started just now, and know nobody."""
    found = whole()
    fresh = {
        uid: replace(
            one,
            peers=(Peer(one.node_id, str(found.pods[uid].ip), 6379, "", True, None, 0, linked=True),),
            is_primary=True,
        )
        for uid, one in found.servers.items()
    }
    return replace(found, servers=fresh)


async def look(events: TopologyEvents, cluster: Cluster, goal: Any = GOAL) -> None:
    await events.looked(cluster, goal, rules.look(cluster, goal)[1])


def forming() -> Step:
    found, _ = rules.look(empty(), GOAL)
    assert found is not None
    assert found.reason is StepReason.FORMING
    return found


def test_the_first_formation_is_no_loss_and_any_other_is() -> None:
    told = Told()

    async def first() -> None:
        events = teller("first", told)
        await events.done(forming())
        assert told.all == [], "its slots are given, and not served yet"
        await look(events, whole())
        await look(events, whole())

    asyncio.run(first())
    asyncio.run(teller("again", told, formedAt="2026-01-01T00:00:00Z").done(forming()))
    assert told.all == [("Formed", False), ("EverythingLost", True)]
    assert counted("tier_slots_lost_total", "first") == 0
    assert counted("tier_slots_lost_total", "again") == SLOTS
    assert counted("tier_formations_total", "again") == 1


def test_slots_are_lost_once_although_their_pod_is_replaced_before() -> None:
    told = Told()
    events = teller("once", told, formedAt="2026-01-01T00:00:00Z")
    asyncio.run(events.done(Step(StepReason.ROLLING, "a is replaced", remove_pod="uid", lost=((0, 9),))))
    asyncio.run(events.done(Step(StepReason.SLOTS_LOST, "given", (), lost=((0, 9),))))
    assert told.all == [("Replaced", False), ("SlotsLost", True)]
    assert counted("tier_slots_lost_total", "once") == 10
    assert counted("tier_replacements_total", "once") == 1


def test_what_a_formation_that_was_cut_off_gives_later_is_no_loss() -> None:
    told = Told()
    rest = Step(StepReason.SLOTS_LOST, "given", (), lost=((0, 9),))

    async def scenario() -> None:
        events = teller("cut off", told)
        assert events.lost_with(rest) == 0
        await events.done(rest)
        assert told.all == [], "a shard may wait for its server still"
        await look(events, whole())
        assert events.lost_with(rest) == 10, "from then on it has served"
        await look(events, whole())

    asyncio.run(scenario())
    assert told.all == [("Formed", False)]
    assert counted("tier_slots_lost_total", "cut off") == 0
    assert counted("tier_formations_total", "cut off") == 1


def test_what_is_formed_anew_after_everything_was_lost_is_not_lost_once_more() -> None:
    rest = Step(StepReason.SLOTS_LOST, "given", (), lost=((0, 9),))
    lost = {"at": "2026-01-01T01:00:00Z", "slots": SLOTS}
    events = teller("twice", Told(), formedAt="2026-01-01T00:00:00Z", lastLoss=lost)
    assert events.lost_with(rest) == 0
    served = teller("twice", Told(), formedAt="2026-01-01T02:00:00Z", lastLoss=lost)
    assert served.lost_with(rest) == 10
    asyncio.run(look(events, whole()))
    assert events.lost_with(rest) == 10
    asyncio.run(look(events, empty()))
    assert events.lost_with(rest) == 0


def test_a_migration_and_a_replacement_are_told_when_they_begin_and_when_they_are_over() -> None:
    told = Told()
    crowded = looks.cluster([*looks.even(2), ()], replicas=1)

    async def scenario() -> None:
        events = teller("moves", told)
        await look(events, whole())
        await look(events, crowded)
        assert counted("tier_slots_to_move", "moves") == 5461
        await look(events, looks.cluster([*looks.even(2), ()], replicas=1, away=[1]))  # nobody can tell
        await look(events, crowded)
        await look(events, whole())
        renewed = replace(GOAL, revisions=dict.fromkeys(range(3), "new"))
        await look(events, whole(), renewed)
        assert counted("tier_pods_to_replace", "moves") == 6
        await look(events, whole())

    asyncio.run(scenario())
    reasons = ["MigrationStarted", "MigrationEnded", "ReplacementStarted", "ReplacementEnded"]
    assert [reason for reason, _ in told.all] == reasons


def test_a_process_that_begins_to_look_tells_nothing_of_before() -> None:
    told = Told()
    asyncio.run(look(teller("quiet", told), whole()))
    assert told.all == []


def test_a_cluster_that_is_forgotten_is_shown_no_more() -> None:
    events = teller("gone", Told())
    asyncio.run(look(events, whole(away=[0])))
    assert counted("backend_up", "gone") == 1
    assert counted("backend_slots_uncovered", "gone") == 5461
    assert counted("tier_replicas_missing", "gone") == 1
    events.sent(forming())
    metrics.FORMATIONS.labels(NAMESPACE, "gone").inc()
    events.leave()
    assert counted("backend_slots_uncovered", "gone") is None
    assert counted("tier_formations_total", "gone") == 1
    events.forget()
    told = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    assert not [sample.name for sample in told if sample.labels.get("tier") == "gone"]


class Nodes:
    """Servers that are empty until they are told anything."""

    sent: Sequence[Command] = ()

    def __init__(self, port: int, access: Access, server_name: str) -> None:
        self.access = access

    async def look(self, pods: Iterable[ServerPod]) -> Cluster:
        return whole() if Nodes.sent else empty()

    async def send(
        self, commands: Sequence[Command], pods: Mapping[str, ServerPod], permitted: Callable[[], bool]
    ) -> tuple[Sent, ...]:
        Nodes.sent = commands
        return ()

    async def close(self) -> None:
        pass


class Formed(Nodes):
    """Servers that are well."""

    async def look(self, pods: Iterable[ServerPod]) -> Cluster:
        return whole()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("written", [True, False])
def test_a_loss_of_everything_is_in_status_before_it_is_repaired_unless_status_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    monkeypatch.setattr(module, "RedisNodes", Nodes)
    monkeypatch.setattr(module, "REPORT_WITHIN_S", 60.0 if written else 0.0)
    monkeypatch.setattr(Nodes, "sent", ())

    async def scenario() -> None:
        store = Store(lambda: bytes(64), module.utc_now)
        store.observe(tier(formedAt="2026-01-01T00:00:00Z"))
        state = cluster_state(store.world(NAMESPACE), store.world(NAMESPACE).tiers["shared"])
        assert state is not None
        assert state.order.access.password is not None
        name, key = state.order.access.password
        kube = MemoryKube()
        secret = {"metadata": {"name": name, "namespace": NAMESPACE}, "data": {key: base64.b64encode(b"p").decode()}}
        kube.put({"apiVersion": "v1", "kind": "Secret", **secret})
        queue = WorkQueue(asyncio.get_running_loop().time)
        async with Topologies(kube, store, queue, lambda: True) as topologies:
            topologies.tend(NAMESPACE, state.order)
            if written:
                await until(
                    lambda: (found := store.world(NAMESPACE).clusters.get("shared")) is not None and bool(found.lost)
                )
                assert await queue.take() == Key("CacheTier", NAMESPACE, "shared")
                planned = cluster_state(store.world(NAMESPACE), store.world(NAMESPACE).tiers["shared"])
                assert planned is not None
                assert planned.fields["lastLoss"]["slots"] == SLOTS
                assert not Nodes.sent
                store.observe(tier(formedAt="2026-01-01T00:00:00Z", lastLoss=planned.fields["lastLoss"]))
            await until(lambda: bool(Nodes.sent))

    asyncio.run(scenario())


def test_what_may_not_be_done_yet_is_tried_at_intervals_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pod that a PodDisruptionBudget of somebody else keeps: for hours, perhaps."""
    evictions: list[float] = []
    monkeypatch.setattr(module, "RedisNodes", Formed)
    monkeypatch.setattr(module, "RETRY_S", 0.2)

    async def refused(_: MemoryKube, verb: str, path: str, **__: Any) -> Any:
        assert (verb, path.rpartition("/")[2]) == ("POST", "eviction")
        evictions.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)  # Meanwhile the tier is planned.
        raise KubeError(429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget.")

    async def scenario() -> int:
        plans = 0
        store = Store(lambda: bytes(64), module.utc_now)
        store.observe(tier(formedAt="2026-01-01T00:00:00Z"))
        state = cluster_state(store.world(NAMESPACE), store.world(NAMESPACE).tiers["shared"])
        assert state is not None
        new = replace(state.order.goal, revisions=dict.fromkeys(range(3), "new"), max_bytes_each=1 << 30)
        order = replace(state.order, goal=new)
        assert order.access.password is not None
        name, key = order.access.password
        kube = MemoryKube()
        monkeypatch.setattr(MemoryKube, "request", refused, raising=False)
        secret = {"metadata": {"name": name, "namespace": NAMESPACE}, "data": {key: base64.b64encode(b"p").decode()}}
        kube.put({"apiVersion": "v1", "kind": "Secret", **secret})
        queue = WorkQueue(asyncio.get_running_loop().time)
        async with Topologies(kube, store, queue, lambda: True) as topologies:
            topologies.tend(NAMESPACE, order)

            async def plan() -> None:
                nonlocal plans
                while True:
                    queue.done(await queue.take())
                    plans += 1
                    topologies.tend(NAMESPACE, order)

            planner = asyncio.create_task(plan())
            await until(lambda: len(evictions) >= 5)
            planner.cancel()
        return plans

    plans = asyncio.run(scenario())
    assert plans <= 4
    assert min(later - earlier for earlier, later in pairwise(evictions[-3:])) >= 0.2


def test_a_cluster_whose_secret_is_gone_is_shown_as_away() -> None:
    async def scenario() -> None:
        store = Store(lambda: bytes(64), module.utc_now)
        store.observe(tier())
        state = cluster_state(store.world(NAMESPACE), store.world(NAMESPACE).tiers["shared"])
        assert state is not None
        queue = WorkQueue(asyncio.get_running_loop().time)
        async with Topologies(MemoryKube(), store, queue, lambda: True) as topologies:
            topologies.tend(NAMESPACE, state.order)
            await until(lambda: "shared" in store.domain(NAMESPACE).clusters)
            assert store.domain(NAMESPACE).clusters["shared"].reason == "SecretNotFound"
            assert counted("backend_up", "shared") == 0

    asyncio.run(scenario())


def test_of_a_tier_that_was_made_again_nothing_is_told_that_befell_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deletion and creation may be seen as one change."""
    monkeypatch.setattr(module, "RedisNodes", Formed)

    async def scenario() -> None:
        store = Store(lambda: bytes(64), module.utc_now)
        store.observe(tier("again"))
        state = cluster_state(store.world(NAMESPACE), store.world(NAMESPACE).tiers["again"])
        assert state is not None
        assert state.order.access.password is not None
        name, key = state.order.access.password
        kube = MemoryKube()
        secret = {"metadata": {"name": name, "namespace": NAMESPACE}, "data": {key: base64.b64encode(b"p").decode()}}
        kube.put({"apiVersion": "v1", "kind": "Secret", **secret})
        queue = WorkQueue(asyncio.get_running_loop().time)
        async with Topologies(kube, store, queue, lambda: True) as topologies:
            topologies.tend(NAMESPACE, state.order)
            first = topologies._tended[NAMESPACE, "again"]
            tending = topologies._tasks[first]
            first.lost = SlotLoss(at=module.utc_now(), slots=SLOTS)
            await until(lambda: counted("tier_replicas_missing", "again") is not None)
            second = tier("again")
            second["metadata"] |= {"uid": "uid-second", "resourceVersion": "9"}
            store.observe(second)
            topologies.forget_untended(NAMESPACE, "again")
            assert "again" not in store.world(NAMESPACE).clusters
            assert counted("tier_formations_total", "again") is None
            topologies.tend(NAMESPACE, state.order)
            await until(lambda: "again" in store.world(NAMESPACE).clusters)
            assert store.world(NAMESPACE).clusters["again"].lost is None
            with pytest.raises(asyncio.CancelledError):
                await tending

    asyncio.run(scenario())


def test_a_defect_in_a_rule_is_not_told_as_a_secret_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("uid-0-0")

    def defects() -> float:
        return (
            REGISTRY.get_sample_value("kvstrata_reconcile_failures_total", {"kind": "CacheTier", "reason": "Bug"})
            or 0.0
        )

    monkeypatch.setattr(module, "RedisNodes", Formed)
    monkeypatch.setattr(module.topology, "look", broken)
    before = defects()

    async def scenario() -> None:
        store = Store(lambda: bytes(64), module.utc_now)
        store.observe(tier())
        state = cluster_state(store.world(NAMESPACE), store.world(NAMESPACE).tiers["shared"])
        assert state is not None
        assert state.order.access.password is not None
        name, key = state.order.access.password
        kube = MemoryKube()
        secret = {"metadata": {"name": name, "namespace": NAMESPACE}, "data": {key: base64.b64encode(b"p").decode()}}
        kube.put({"apiVersion": "v1", "kind": "Secret", **secret})
        queue = WorkQueue(asyncio.get_running_loop().time)
        async with Topologies(kube, store, queue, lambda: True) as topologies:
            topologies.tend(NAMESPACE, state.order)
            await until(lambda: defects() > before or "shared" in store.world(NAMESPACE).clusters)
        assert "shared" not in store.world(NAMESPACE).clusters

    asyncio.run(scenario())
    assert defects() > before
