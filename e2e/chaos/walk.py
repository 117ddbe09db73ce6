"""A random walk: something happens, sometimes two things at once, and after each it is again as it should be."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

from e2e.chaos.faults import FAULTS, Stage, described
from e2e.chaos.network import Network
from e2e.chaos.operator import Operator, Seen, Servers
from e2e.chaos.pods import PORT, ZONE, Pods
from e2e.chaos.traffic import Traffic
from kvstrata.model.redis.cluster import SLOTS, Cluster, Goal
from tests.tiers.certificates import SERVER_NAME, Authority
from tests.tiers.gate_stand_in import DOMAIN

MEMORY = 64 << 20
NODE_TIMEOUT_MS = 1500
PATIENCE_S = 150.0
"""For the operator's next report, and for hits to come back: so long that a slow machine does not fail a walk."""
LONGEST_S = 1200.0
"""For all reports of the operator until the cluster has converged."""
LOOK_EVERY_S = 0.05
THERE_AND_BACK = ("scaled", "replicas_changed")
TOGETHER = 0.4
"""How often a second fault begins before the first is over."""


class Failed(AssertionError):  # noqa: N818  (a finding)
    """The cluster or a request did not do as it should."""


class Walk:
    """One cluster of 3 x (1+1), and its faults. The same seed draws the same faults.

    With `tls` all clients and servers use TLS.
    """

    def __init__(self, directory: Path, command: Sequence[str], seed: int, *, tls: bool = False) -> None:
        self._dice = random.Random(seed)
        self._started_s = self._reported_s = time.monotonic()
        goal = Goal(3, 1, MEMORY, dict.fromkeys(range(3), "a"), node_timeout_ms=NODE_TIMEOUT_MS)
        certificates = Authority(directory).issue(SERVER_NAME, f"*.{ZONE}") if tls else None
        self.pods = Pods(Network(), directory, command, goal, DOMAIN, certificates)
        self._servers = Servers(PORT, certificates.ca.read_bytes() if certificates else None, SERVER_NAME)
        hosts = [self.pods.name(shard, ordinal) for shard in range(3) for ordinal in range(2)]
        self.traffic = Traffic(directory, hosts, PORT, certificates)
        self.operator = Operator(self.pods, self._servers, self.report)
        self._world: asyncio.Task[None] | None = None
        self._office: asyncio.Task[None] | None = None
        self._deck: list[str] = []
        self._away: set[str] = set()

    async def run(self, steps: int, only: Sequence[str] = ()) -> None:
        """Form the cluster and take so many steps. Raises Failed."""
        self._world = world = asyncio.create_task(self.pods.run())
        self._office = asyncio.create_task(self.operator.run())
        try:
            await self._converge(time.monotonic())
            self.traffic.start()
            await self._hits_come_back()
            for number in range(steps):
                self.traffic.keep_fresh()
                await self._step(number + 1, only)
        finally:
            for task in (world, self._office):
                task.cancel()
            await asyncio.gather(world, self._office, return_exceptions=True)
            await asyncio.to_thread(self.traffic.close)
            self.pods.close()

    def report(self, event: str) -> None:
        """Print an event and its time."""
        self._reported_s = time.monotonic()
        print(f"{time.monotonic() - self._started_s:7.2f}  {event}", flush=True)

    async def _step(self, number: int, only: Sequence[str]) -> None:
        names = [self._draw(only)]
        if self._dice.random() < TOGETHER:
            names.append(self._draw(only))
        self.report(f"--- {number}: {', '.join(names)}")
        wait_s = self._dice.uniform(0.0, 2.0)
        happened = asyncio.gather(*(self._after(wait_s * place, name) for place, name in enumerate(names)))
        for fault in await happened:
            self.report(f"    {fault}")
        self.pods.network.heal()
        self.pods.thaw()
        healed_s = time.monotonic()
        await self._converge(healed_s)
        converged_s = time.monotonic()
        await self._hits_come_back()
        self.report(
            f"    converged in {converged_s - healed_s:.1f} s, all hits after {time.monotonic() - healed_s:.1f} s; "
            f"{self.traffic.requests} requests, slowest "
            + ", ".join(f"{what} {took_s:.2f} s" for what, took_s in sorted(self.traffic.slowest_s.items()))
        )

    def _draw(self, only: Sequence[str]) -> str:
        """The next fault of a shuffled deck: each comes once before any comes again.

        A fault that changes the tier's shape comes again after the next one, and changes it back.
        """
        if not self._deck:
            self._deck = sorted(only or FAULTS)
            self._dice.shuffle(self._deck)
        name = self._deck.pop()
        if name in THERE_AND_BACK:
            self._away ^= {name}
            if name in self._away:
                self._deck.insert(max(0, len(self._deck) - 1), name)
        return name

    async def _after(self, wait_s: float, name: str) -> str:
        # Chances of its own: when those of another are taken must not change them.
        stage = Stage(self.pods, lambda: self.operator, self._succeed, random.Random(self._dice.random()))
        await asyncio.sleep(wait_s)
        return await FAULTS[name](stage)

    async def _succeed(self) -> None:
        """Kill the operator, wherever it is; another begins."""
        if self._office is not None:
            self._office.cancel()
            await asyncio.gather(self._office, return_exceptions=True)
        self.operator = Operator(self.pods, self._servers, self.report)
        self._office = asyncio.create_task(self.operator.run())

    async def _converge(self, since_s: float) -> None:
        """Wait until a look that was begun after `since_s` finds nothing to do, and all is as it is meant to be."""
        give_up_at_s = time.monotonic() + LONGEST_S
        while True:
            seen = self.operator.seen
            if seen is not None and seen.at_s > since_s and self._is_whole(seen):
                self._check(seen.cluster)
                return
            self._check_traffic()
            for task in (self._world, self._office):
                if task is not None and task.done():
                    task.result()
            if time.monotonic() > min(give_up_at_s, max(self._reported_s, since_s) + PATIENCE_S):
                last = f"{seen.step}\n{described(seen.cluster)}" if seen is not None else "no look"
                raise Failed(f"did not converge: {last}")
            await asyncio.sleep(LOOK_EVERY_S)

    def _is_whole(self, seen: Seen) -> bool:
        return seen.step is None and self.pods.complete and seen.cluster.servers.keys() == self.pods.pods.keys()

    def _check(self, cluster: Cluster) -> None:
        """Every slot has exactly one primary, every primary its replicas, and all servers agree."""
        goal = self.pods.goal
        owners = [server for server in cluster.servers.values() if server.itself.slots]
        held = sorted(slot for one in owners for first, last in one.itself.slots for slot in range(first, last + 1))
        names = {server.node_id for server in cluster.servers.values()}
        slots = {server.node_id: server.itself.slots for server in owners}
        wrong = [
            "slots without a primary, or with two" * (held != list(range(SLOTS))),
            "shards without slots" * ({cluster.pods[one.pod_uid].shard for one in owners} != set(range(goal.shards))),
            "a primary that is a replica" * (not all(one.is_primary for one in owners)),
            "open slots" * any(one.itself.migrating or one.itself.importing for one in owners),
            "servers that did not answer" * (len(cluster.servers) != goal.shards * (1 + goal.replicas)),
        ]
        for server in cluster.servers.values():
            name = cluster.pods[server.pod_uid].name
            known = {peer.node_id for peer in server.peers if not peer.handshake}
            reported = {peer.node_id: peer.slots for peer in server.peers if peer.slots}
            wrong += [
                f"{name} knows others" * (known != names),
                f"{name} reports other slots" * (reported != slots),
                f"{name} has {server.max_bytes} bytes" * (server.max_bytes != goal.max_bytes_each),
                f"{name} has another node time-out" * (server.node_timeout_ms != goal.node_timeout_ms),
                f"{name} is not in step" * (server not in owners and not server.link_up),
                f"{name} has a former template"
                * (cluster.pods[server.pod_uid].revision != goal.revisions[cluster.pods[server.pod_uid].shard]),
            ]
        if any(wrong):
            raise Failed("; ".join(one for one in wrong if one) + f"\n{described(cluster)}")

    async def _hits_come_back(self) -> None:
        """Wait until the reader finds everything again, in a round that began after now."""
        since_s = time.monotonic()
        while self.traffic.whole_since_s < since_s:
            self._check_traffic()
            if time.monotonic() > since_s + PATIENCE_S:
                raise Failed(f"hits do not come back\n{self.traffic.states()}")
            await asyncio.sleep(LOOK_EVERY_S)

    def _check_traffic(self) -> None:
        if self.traffic.problems:
            raise Failed("; ".join(self.traffic.problems) + f"\n{self.traffic.states()}")
