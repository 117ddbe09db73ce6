"""The loop: what it costs to take a key does not grow with the queue."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import Mock

from prometheus_client import REGISTRY

from kvstrata.model.refs import Key
from kvstrata.reconcile.loop import Loop
from kvstrata.reconcile.queue import WorkQueue


class CountedQueue(WorkQueue):
    """A queue that knows how often it was counted."""

    counted = 0

    def __len__(self) -> int:
        self.counted += 1
        return super().__len__()


class Idle(Loop):
    """A loop that has nothing to do for a key, and stops before the last two."""

    async def reconcile(self, key: Key) -> None:
        """Count as worked on."""
        self._queue.done(key)
        if key.name == "97":
            await asyncio.Event().wait()


async def test_the_queue_is_counted_when_it_is_asked_for_and_not_at_every_key() -> None:
    queue = CountedQueue(time.monotonic)
    for number in range(100):
        queue.add(Key("CachedModel", "ns", str(number)))
    loop = Idle(Mock(), queue, Mock(), Mock(), workers=1)
    working = asyncio.create_task(loop.run())
    await asyncio.sleep(0.05)
    assert queue.counted == 0
    assert REGISTRY.get_sample_value("kvstrata_queue_depth") == 2
    working.cancel()
