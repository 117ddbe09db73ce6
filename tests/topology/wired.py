"""Real servers, tended by the operator's own loop: operators that are killed anywhere, and several that all lead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from e2e.chaos.operator import Operator, Servers
from tests.tiers.certificates import SERVER_NAME
from tests.topology.rig import Patience, Rig

WATCH_S = 0.02


class Permits:
    """Lets an operator send so many commands (None: all), and then nothing more."""

    def __init__(self, commands: int | None = None) -> None:
        self._left = commands
        self.spent = False

    def __call__(self) -> bool:
        self.spent = self.spent or self._left == 0
        if self._left:
            self._left -= 1
        return not self.spent


class WiredRig(Rig):
    """Servers that play pods, whose operator is the product's. `told` is what operators told of their steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, users=True, **options)
        self.told: list[str] = []

    # What controllers do when the operator wants it

    def evict(self, uid: str) -> None:
        """Delete a pod; its StatefulSet makes another."""
        self.replace(self.pods[uid])

    def drain(self, shard: int) -> None:
        """Remove a shard's StatefulSet, and with it its pods."""
        for pod in list(self.pods.values()):
            if pod.shard == shard:
                self.delete(pod)

    def shrink(self) -> None:
        """Remove pods that are one too many."""
        for pod in list(self.pods.values()):
            if pod.ordinal > self.goal.replicas:
                self.delete(pod)

    # Operators

    async def outlive(self, lives: Iterable[int]) -> int:
        """Have one operator after the other, each killed when it sent so many commands; return how many were killed.

        Ends when nothing is left to do, which the last one, that nobody kills, sees to.
        """
        killed = 0
        for commands in lives:
            if not await self.tended(Permits(commands)):
                return killed
            killed += 1
        await self.tended()
        return killed

    async def tended(self, permits: Permits | None = None) -> bool:
        """Have an operator in office until nothing is left to do; or, which is when this is True, it may send no more.

        What it had begun by then has ended when it is killed: it dies between two commands.
        """
        permits, patience = permits or Permits(), Patience()
        async with self.in_office(permits) as operator:
            since_s, spent_s = time.monotonic(), 0.0
            while not self.is_settled(operator, since_s):
                if permits.spent:
                    spent_s = spent_s or time.monotonic()
                    if operator.reported_at_s > spent_s:
                        return True
                patience.ask(self.told[-1:])
                await asyncio.sleep(WATCH_S)
        return False

    def is_settled(self, operator: Operator, since_s: float) -> bool:
        """Whether an operator that looked since then finds all pods, and nothing to do."""
        seen = operator.seen
        if seen is None:
            return False
        self.probe(seen.cluster)
        return (
            seen.step is None
            and seen.at_s > since_s
            and self.is_up(seen.cluster)
            and self.pods.keys() == seen.cluster.pods.keys()
        )

    @asynccontextmanager
    async def in_office(self, permits: Permits) -> AsyncIterator[Operator]:
        """Have an operator tend the servers, and kill it in the end, wherever it is."""
        ca_pem = self._tls.ca.read_bytes() if self._tls else None
        operator = Operator(self, Servers(self.port, ca_pem, SERVER_NAME), self.told.append, permits)
        task = asyncio.create_task(operator.run())
        try:
            yield operator
        finally:
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended
