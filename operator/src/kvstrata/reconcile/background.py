"""What is done beside the loop: nobody waits for it, its end is a fact, and a defect in it is told and not lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Hashable
from types import TracebackType
from typing import Any, Self

from kvstrata.model.refs import Key

from . import metrics
from .queue import WorkQueue

log = logging.getLogger(__name__)

RETRY_S = 5.0


class Background:
    """One task for each slot at a time. Use it as a context manager, within one event loop: it ends what is under way.

    What a slot is, is its heir's to say.
    """

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, slot: Hashable, work: Coroutine[Any, Any, None], failure: str, *again: Key) -> None:
        """Begin with `work` unless its slot is taken. If it fails, `failure` is logged and `again` is planned anew."""
        if slot in self._tasks:
            work.close()
            return
        task = self._tasks[slot] = asyncio.create_task(work)

        def ended(_: asyncio.Task[None]) -> None:
            if self._tasks.get(slot) is task:
                del self._tasks[slot]
            if task.cancelled() or (error := task.exception()) is None:
                return
            log.error(failure, exc_info=error)
            for key in again:
                metrics.FAILURES.labels(key.kind, "Bug").inc()
                self._queue.add(key, RETRY_S)

        task.add_done_callback(ended)

    async def _end(self, slot: Hashable) -> None:
        """Cancel what is under way in a slot, and wait until it has ended."""
        task = self._tasks.pop(slot, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
