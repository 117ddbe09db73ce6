"""The rig of servers that play pods, with a mover that carries out orders, and books of all that is in a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis
import redis.asyncio

from kvstrata.clients.redis.key_names import bucket_of, part_of, whole_buckets
from kvstrata.clients.redis.slot_mover import SlotMover
from kvstrata.model.redis.cluster import SLOTS, Cluster, ServerPod
from kvstrata.plan.redis.topology import Step
from kvstrata.plan.redis.topology.steps import MoveOrder
from kvstrata_sidecar.adapter.redis.client.slots import slot_of
from tests.topology.looks import step
from tests.topology.rig import Patience, Rig

TIMEOUT_MS = 15_000
"""For servers without a successor: one that a busy machine starves is not dead."""


@dataclass(frozen=True)
class Moved:
    """Progress of orders, or why one failed."""

    slots: int = 0
    dropped: int = 0
    failure: str = ""


def total(reports: Sequence[Moved]) -> Moved:
    """What orders did together, and why they failed."""
    failures = "; ".join(filter(None, (one.failure for one in reports)))
    return Moved(sum(one.slots for one in reports), sum(one.dropped for one in reports), failures)


class MoverRig(Rig):
    """A rig whose operator moves slots, too. `reports` has what moved and failed, `credentials` are the mover's."""

    credentials: tuple[str, str] | None = None

    def __init__(self, *args: Any, timeout_ms: int = TIMEOUT_MS, **options: Any) -> None:
        super().__init__(*args, **options)
        self.goal = replace(self.goal, node_timeout_ms=timeout_ms)
        self.reports: list[Moved] = []
        self.removes = True

    async def made_anew(self, shards: int = 3) -> None:
        """As after the start: so many shards, settled, no keys, and connections of this event loop."""
        self.nodes = self.connect()
        self.credentials = None
        await self.heard()
        for pod in self.pods.values():
            with self.admin(pod) as client:
                # With its connections: servers keep those that they moved keys over.
                client.execute_command("ACL", "DELUSER", "admin")
        await self.scale(shards, drops=False)
        await self.settled()
        for pod in self.pods.values():
            with self.admin(pod) as client:
                client.flushall()
        self.reports, self.steps = [], []

    async def no_pause(self, _: float) -> None:
        """Take turns with others, and lose no time."""
        await asyncio.sleep(0)

    def mover(self, commands: int | None = None, pause: Callable[[float], Any] | None = None) -> SlotMover:
        """A mover that may send so often and then leads no more."""
        left = [commands]

        def may_write() -> bool:
            if left[0] is not None:
                left[0] -= 1
            return left[0] is None or left[0] >= 0

        return SlotMover(self.dial, lambda: self.credentials, may_write, pause=pause or self.no_pause)

    def dial(self, host: str, port: int) -> redis.asyncio.Connection:
        """As the operator's driver does."""
        user, password = self.credentials or (None, None)
        return redis.asyncio.Connection(host=host, port=port, username=user, password=password, protocol=2)

    async def scale(self, shards: int, **others: Any) -> None:
        """Want so many shards; start the pods that are missing."""
        revisions = dict.fromkeys(range(shards), "a")
        self.goal = replace(self.goal, shards=shards, revisions=revisions, **others)
        there = {(pod.shard, pod.ordinal) for pod in self.pods.values()}
        for shard in range(shards):
            for ordinal in range(1 + self.goal.replicas):
                if (shard, ordinal) not in there:
                    self.add(shard, ordinal)

    async def pass_once(self, mover: SlotMover | None = None) -> Step | None:
        """Look, and do what the rules say; return what that was."""
        cluster = await self.look()
        found = step(cluster, self.goal)
        if found is None:
            return None
        self.steps.append(found)
        await self.nodes.send(found.commands, cluster.pods, lambda: True)
        for order in found.moves:
            if failure := await (mover or self.mover()).carry_out(order, cluster, self.count):
                self.reports.append(Moved(failure=failure))
        if found.remove_pod in self.pods:
            self.replace(self.pods[found.remove_pod])
        for pod in list(self.pods.values()):
            if pod.shard in found.drained and self.removes:
                self.delete(pod)
        await asyncio.sleep(found.pause_s or (0.05 if found.waits else 0))
        return found

    def count(self, slots: int, dropped: int) -> None:
        """Take the progress of an order."""
        self.reports.append(Moved(slots, dropped))

    async def settled(self, mover: SlotMover | None = None) -> None:
        """Pass until nothing is left to do, or to remove if shards without slots are to stay."""
        patience = Patience()
        while (found := await self.pass_once(mover)) is not None and (self.removes or not found.drained):
            patience.ask((found, self.reports[-1:]))

    def order(self, cluster: Cluster, source: int, target: int, *slots: int, **others: Any) -> MoveOrder:
        """An order of a shard's slots to another, key by key."""
        nodes = {cluster.pods[one.pod_uid].shard: one.node_id for one in cluster.servers.values() if one.is_primary}
        pieces = tuple((slot, slot) for slot in slots)
        found = MoveOrder(nodes[source], nodes[target], pieces, atomic=False, drops=False, movable_bytes=8 << 20)
        return replace(found, **others)

    async def owner(self, slot: int) -> ServerPod:
        """The pod whose server says that a slot is its own."""
        for server in (await self.heard()).servers.values():
            if any(first <= slot <= last for first, last in server.itself.slots):
                return self.pods[server.pod_uid]
        raise AssertionError("nobody has it")

    def admin(self, pod: ServerPod) -> Any:
        """A client of one server that may do everything."""
        return redis.Redis(host=str(pod.ip), port=self.port, protocol=2)

    async def keys(self) -> Mapping[bytes, str]:
        """All keys of all primaries, and who has them; none is at two, or where its slot is not."""
        cluster = await self.heard()
        found: dict[bytes, str] = {}
        for server in cluster.servers.values():
            if not server.is_primary:
                continue
            pod = cluster.pods[server.pod_uid]
            mine = {slot for first, last in server.itself.slots for slot in range(first, last + 1)}
            with self.admin(pod) as client:
                for name in client.scan_iter(count=1000):
                    assert name not in found, f"{name} is at {found[name]} and at {pod.name}"
                    assert slot_of(name) in mine, f"{name} is at {pod.name}, where its slot is not"
                    found[name] = pod.name
        return found

    async def assert_whole(self) -> None:
        """Every slot has one owner, none is open, all say the same; no value is without its bucket's index."""
        cluster = await self.heard()
        primaries = [one for one in cluster.servers.values() if one.is_primary]
        owned = [slot for one in primaries for first, last in one.itself.slots for slot in range(first, last + 1)]
        assert sorted(owned) == list(range(SLOTS))
        assert not any(one.itself.migrating or one.itself.importing for one in primaries)
        names = await self.keys()
        states = whole_buckets(names)
        orphans = [name for name in names if bucket_of(name) and not part_of(name).startswith(b"#")]
        assert not [name for name in orphans if bucket_of(name) not in states]
