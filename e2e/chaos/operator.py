"""The operator of a managed cluster, as its servers know it: it looks, does what the rules say, and looks again.

It stands in for the operator's own loop, whose rules, connections and mover it uses; whatever has `run` and `seen`
may take its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis.asyncio as redis

from e2e.chaos.pods import PORT, Pods
from kvstrata.adapters.redis_nodes import NodeAccess, RedisNodes
from kvstrata.adapters.slot_mover import SlotMover
from kvstrata.model.topology import Cluster
from kvstrata.objects.redisusers import ADMIN_USER
from kvstrata.plan.topology import Step, step

WAIT_S = 0.1
RETRY_S = 0.3


@dataclass(frozen=True)
class Seen:
    """A look that was begun at `at_s`, and what followed from it."""

    at_s: float
    cluster: Cluster
    step: Step | None


class Operator:
    """Tends the pods until it is cancelled, which is how it dies: anywhere."""

    def __init__(self, pods: Pods, told: Callable[[str], None]) -> None:
        self.seen: Seen | None = None
        self._pods, self._told = pods, told
        self._nodes = RedisNodes(NodeAccess(PORT, username=ADMIN_USER, password=ADMIN_USER))
        self._mover = SlotMover(_dial, lambda: (ADMIN_USER, ADMIN_USER), lambda: True)
        self._message = ""

    async def run(self) -> None:
        """Look and act."""
        try:
            while True:
                pause_s = await self._pass()
                await asyncio.sleep(pause_s)
        finally:
            await self._nodes.close()

    async def _pass(self) -> float:
        """Look once and do what follows; return how long to wait before the next look."""
        pods, at_s = self._pods, time.monotonic()
        listed = dict(pods.pods)
        cluster = await self._nodes.look(listed.values())
        found = step(cluster, pods.goal)
        self.seen = Seen(at_s, cluster, found)
        message = f"{found.reason}: {found.message}" if found is not None else "settled"
        if message != self._message:
            self._message = message
            self._told(message)
        if found is None:
            pods.shrink()
            return WAIT_S
        if found.waits:
            return WAIT_S
        sent = await self._nodes.send(found.commands, cluster.pods, lambda: True)
        failed = [one for one in sent if one.failure]
        for one in failed:
            self._told(f"  {' '.join(one.command.words[:3])}: {one.failure} {one.answer}")
        if not failed:
            for report in await asyncio.gather(*(self._mover.carry_out(order, cluster) for order in found.moves)):
                if not report.done:
                    failed.append(report)
                    self._told(f"  {report.reason}: {report.message}")
        if not failed and found.remove_pod in pods.pods:
            pods.delete(found.remove_pod)
        for shard in found.drained:
            pods.sizes.pop(shard, None)
        return max(found.pause_s, RETRY_S if failed else 0.0)


def _dial(host: str, port: int) -> redis.Connection:
    return redis.Connection(host=host, port=port, username=ADMIN_USER, password=ADMIN_USER, protocol=2)
