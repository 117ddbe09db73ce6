"""Background tasks beside the loop, at most one per slot, and clocks. A task that fails is logged and retried."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Hashable
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from kvstrata.model.refs import Key

from . import metrics
from .queue import WorkQueue

log = logging.getLogger(__name__)

RETRY_S = 5.0

Clock = Callable[[], datetime]
"""Time in UTC."""

CLOCK_ERROR_S = 60.0
"""How far the wall clock may be from `utc_now`; beyond it the process is unhealthy, and is restarted."""

Leads = Callable[[], bool]
"""Whether this process leads, and may write."""


class Background:
    """At most one task per slot. Subclasses choose the slots. Leaving the context cancels all tasks."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, slot: Hashable, work: Coroutine[Any, Any, None], failure: str, *again: Key) -> None:
        """Start `work` unless its slot is taken. On failure, log `failure` and enqueue `again`."""
        # A task that is done may still be listed when the plan that follows it begins another.
        if (running := self._tasks.get(slot)) is not None and not running.done():
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
        task = self._tasks.pop(slot, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def utc_now() -> datetime:
    """Return the wall clock's time at the start of this process plus the time since then: fences are waited out by it,
    and it does not jump with the wall clock."""
    return _BOOTED + timedelta(seconds=since_boot_s())


def clock_problem() -> str | None:
    error_s = (datetime.now(UTC) - utc_now()).total_seconds()
    return f"the wall clock was set by {error_s:.0f} s" if abs(error_s) > CLOCK_ERROR_S else None


def since_boot_s() -> float:
    """Seconds since boot, including sleep; unaffected by changes of the wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_BOOTED = datetime.now(UTC) - timedelta(seconds=since_boot_s())
