"""Threads of a tier of files: workers, and a timer for deadlines.

The timer touches no disk, so a slow disk never delays it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstrata_sidecar.adapter.files.exchanges import Files, Hands
from kvstrata_sidecar.adapter.files.file_format import Pages
from kvstrata_sidecar.adapter.files.health import DiskError
from kvstrata_sidecar.adapter.params import FileTierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.queues import Lane
from kvstrata_sidecar.adapter.tier.tasks import AnyPart, Task, TaskTable
from kvstrata_sidecar.adapter.tier.workers import Worker

CLOSE_TIMEOUT_S = 1.0
LOGGED_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class FileThreads:
    def __init__(
        self,
        tier: FileTierParams,
        tasks: TaskTable,
        enforcement: Enforcement,
        files: Files,
        make_pages: Callable[[], Pages],
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._tasks = tasks
        self._counters = counters
        self._clock = clock
        self._lane = Lane(tier.queue_limit, tier.queue_limit_bytes)
        self._workers = [
            Worker(
                f"kvs-{tier.name}-{number}",
                self._lane,
                tasks,
                enforcement,
                Hands(files, make_pages()),
                self._failed,
                tier=tier.name,
            )
            for number in range(1, tier.workers + 1)
        ]
        self._wake = threading.Condition()
        self._wake_at_s = float("inf")
        self._log_at_s = 0.0
        self._closed = False
        self._timer = threading.Thread(target=self._keep_time, name=f"kvs-{tier.name}-timer", daemon=True)

    def start(self) -> None:
        for thread in self._threads():
            thread.start()

    def put(self, part: AnyPart) -> Refusal | None:
        return self._lane.put(part)

    def wake_by(self, moment_s: float) -> None:
        with self._wake:
            if moment_s < self._wake_at_s:
                self._wake_at_s = moment_s
                self._wake.notify_all()

    @property
    def alive(self) -> bool:
        return all(one.is_alive() for one in self._threads())

    def close(self) -> None:
        """Answer every task and stop the threads."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for part in self._lane.close():
            if part.task is not None:
                self._tasks.drop(part.task)
            part.over(None)
        self._tasks.expire(float("inf"))

    def join(self) -> None:
        """Wait briefly for each thread; one that waits for the disk ends when the disk answers."""
        for thread in self._threads():
            thread.join(CLOSE_TIMEOUT_S)

    def _threads(self) -> list[threading.Thread]:
        return [*self._workers, self._timer]

    def _failed(self, error: Exception) -> None:
        """Count an error; log those that are defects of ours."""
        self._counters.add("errors")
        now_s = self._clock()
        if not isinstance(error, DiskError) and now_s >= self._log_at_s:
            self._log_at_s = now_s + LOGGED_EVERY_S
            logger.error("Blocks cannot be carried to or from tier %s", self._tier.name, exc_info=error)

    def _keep_time(self) -> None:
        while True:
            for task in self._tasks.expire(self._clock()):
                self._give_up(task)
            with self._wake:
                if self._closed:
                    return
                now_s = self._clock()
                next_s = self._tasks.next_deadline_s()
                self._wake_at_s = float("inf") if next_s is None else next_s
                if self._wake_at_s > now_s:
                    self._wake.wait(None if next_s is None else self._wake_at_s - now_s)

    def _give_up(self, task: Task) -> None:
        self._counters.add(f"late_{task.kind}")

        def is_of(part: AnyPart) -> bool:
            return part.task is task

        self._lane.forget(is_of)
        for worker in self._workers:
            worker.abort(is_of, f"a {task.kind} took longer than its deadline")
