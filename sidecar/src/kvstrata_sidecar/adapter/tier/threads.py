"""Threads of a tier: workers, and a timer that cancels tasks at their deadlines and aborts their parts.

The timer waits for no disk and no server, so that a slow one never delays it.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvstrata_sidecar.adapter.policy.enforcement import Permit, Refusal
from kvstrata_sidecar.adapter.tier.queues import Lane
from kvstrata_sidecar.adapter.tier.tasks import AnyPart, Carrier, Deps, Gain, Lent, Task, TaskTable

ATTEMPTS = 3
"""Attempts at a part whose failure may be transient."""

CLOSE_TIMEOUT_S = 1.0
LOGGED_EVERY_S = 60.0

BATCH_BLOCKS = 16
BATCH_BYTES = 8 << 20
"""Bytes that one part carries at most, if it is more than one block: other parts wait for it."""

logger = logging.getLogger(__name__)

GroupT = TypeVar("GroupT")


class Upkeep(threading.Thread, ABC):
    """A thread that does a tier's other work, from `start` until `close`."""

    def __init__(self, tier: str, work: str) -> None:
        super().__init__(name=f"kvs-{tier}-{work}", daemon=True)

    @abstractmethod
    def close(self) -> None:
        """Have the thread end soon."""


class Worker(threading.Thread):
    """Serves one lane of a tier's `threads` until it is closed, over its own carrier."""

    def __init__(self, name: str, lane: Lane, threads: TierThreads, carrier: Carrier) -> None:
        super().__init__(name=name, daemon=True)
        self._lane = lane
        self._threads = threads
        self._tasks = threads.tasks
        self._carrier = carrier
        self._lock = threading.Lock()
        self._part: AnyPart | None = None
        self._aborted = False

    def run(self) -> None:
        while (taken := self._lane.take()) is not None:
            label, part = taken
            try:
                self._serve(part)
            finally:
                self._lane.done(label)
        self._carrier.close()

    def abort(self, which: Callable[[AnyPart], bool], why: str = "") -> None:
        """Make the part under way fail at once if `which` selects it; `why` blames the server that it waits for."""
        with self._lock:
            if self._part is not None and which(self._part):
                self._aborted = True
                self._carrier.abort(why)

    def _serve(self, part: AnyPart) -> None:
        error: Exception | None = None
        try:
            self._attempt(part)
        except Exception as failure:
            error = failure
            refusal = self._threads.refusal_of(failure)
            if refusal is not None:
                part.refused(refusal)
            else:
                self._threads.failed(failure)
            self._tasks.drop(part.task)
        part.over(error)

    def _attempt(self, part: AnyPart) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._exchange(part)
                return
            except Exception as error:
                if not self._threads.worth_another(error) or self._aborted or attempt == ATTEMPTS:
                    raise

    def _exchange(self, part: AnyPart) -> None:
        """Run the part between begin and end, under a permit, abortable; raises the exchange's exception."""
        task = part.task
        permit: Permit | None = None
        gain = Gain()
        ended = False
        self._carrier.renew()
        with self._lock:
            self._part, self._aborted = part, False
        try:
            if task is not None and not self._tasks.begin(task):
                return
            try:
                entered = self._enter(part)
                if isinstance(entered, Refusal):
                    part.refused(entered)
                else:
                    permit = entered
                    part.run(self._carrier, gain)
                    ended = True
            finally:
                if task is not None:
                    self._tasks.end(task, gain, over=ended)
        finally:
            with self._lock:
                self._part = None
            # Last: a pod acknowledges once permits are back, and by then every buffer is released and answered for.
            if permit is not None:
                permit.release()
        if not ended:
            self._tasks.drop(part.task)

    def _enter(self, part: AnyPart) -> Permit | Refusal | None:
        if part.keyspace is None:
            return None
        return self._threads.enforcement.enter(
            part.keyspace, lambda: self.abort(lambda current: current is part), part.pools, self._threads.tier.name
        )


class TierThreads:
    """The timer, and workers of the lane `blocks`. `carrier` makes a worker's, `share` is as in Lane. A breaker reports
    errors that are `reported`; others are a server's refusals, or defects of ours."""

    def __init__(
        self,
        deps: Deps[Any, Any],
        tasks: TaskTable,
        clock: Callable[[], float],
        carrier: Callable[[], Carrier],
        reported: tuple[type[Exception], ...],
        share: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.tier = tier = deps.tier
        self.tasks = tasks
        self.blocks = Lane(share=share)
        self._counters = deps.counters
        self.enforcement = deps.enforcement
        self._clock = clock
        self._carrier = carrier
        self._reported = reported
        self._block_workers = [self._worker(str(number), self.blocks) for number in range(1, tier.workers + 1)]
        self._wake = threading.Condition()
        self._wake_at_s = 0.0
        self._log_at_s = 0.0
        self._closed = False
        self._timer = threading.Thread(target=self._keep_time, name=f"kvs-{tier.name}-timer", daemon=True)

    def start(self) -> None:
        for thread in (*self._block_workers, self._timer):
            thread.start()

    def wake_by(self, moment_s: float) -> None:
        """Check deadlines and breakers by `moment_s`."""
        with self._wake:
            if moment_s < self._wake_at_s:
                self._wake_at_s = moment_s
                self._wake.notify_all()

    @property
    def alive(self) -> bool:
        return self._closed or all(one.is_alive() for one in (self._timer, *self._workers()))

    def close(self, error: Exception | None = None) -> None:
        """Answer every task and stop the threads; waiting parts end with `error`."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for lane in self._lanes():
            self._end(lane.close(), error)
        self.tasks.expire(float("inf"))

    def join(self) -> None:
        """Wait briefly for each thread; one that waits for the disk ends when the disk answers."""
        for thread in (*self._workers(), self._timer):
            thread.join(CLOSE_TIMEOUT_S)

    def abort(self, which: Callable[[AnyPart], bool], why: str = "") -> None:
        """Abort the parts under way that `which` selects; `why` blames the servers that they wait for."""
        for worker in self._workers():
            worker.abort(which, why)

    def _workers(self) -> Iterable[Worker]:
        return self._block_workers

    def _lanes(self) -> Iterable[Lane]:
        return [self.blocks]

    def _worker(self, name: str, lane: Lane) -> Worker:
        return Worker(f"kvs-{self.tier.name}-{name}", lane, self, self._carrier())

    def refusal_of(self, error: Exception) -> Refusal | None:  # noqa: ARG002
        """Return the refusal that a part's exception means, None for a failure."""
        return None

    def worth_another(self, error: Exception) -> bool:  # noqa: ARG002
        """Whether a part may succeed if tried again at once."""
        return False

    def _probe_due(self) -> None:
        """Send the probes that are due."""

    def _probes_in_s(self) -> Iterable[float | None]:
        """Return the seconds until probes are due; called with the timer's lock, so that no breaker is missed."""
        return ()

    def _end(self, parts: Iterable[AnyPart], error: Exception | None) -> None:
        for part in parts:
            self.tasks.drop(part.task)
            part.over(error)

    def failed(self, error: Exception) -> None:
        """Count the error, and log it if no breaker reports it."""
        self._counters.add("errors")
        now_s = self._clock()
        if not isinstance(error, self._reported) and now_s >= self._log_at_s:
            self._log_at_s = now_s + LOGGED_EVERY_S
            logger.error("Blocks cannot be carried to or from tier %s", self.tier.name, exc_info=error)

    def _keep_time(self) -> None:
        while True:
            for task in self.tasks.expire(self._clock()):
                self._give_up(task)
            self._probe_due()
            with self._wake:
                if self._closed:
                    return
                now_s = self._clock()
                moments = [now_s + one for one in self._probes_in_s() if one is not None]
                if (deadline_s := self.tasks.next_deadline_s()) is not None:
                    moments.append(deadline_s)
                self._wake_at_s = min(moments, default=float("inf"))
                if self._wake_at_s > now_s:
                    self._wake.wait(None if self._wake_at_s == float("inf") else self._wake_at_s - now_s)

    def _give_up(self, task: Task) -> None:
        hurried = task.restore is not None and task.restore.hurries(self.tier.load_deadline_ms)
        if not hurried:
            self._counters.add(f"late_{task.kind}")
        for lane in self._lanes():
            lane.forget(lambda part: part.task is task)
        why = "" if hurried else f"a {task.kind} took longer than its deadline"
        self.abort(lambda part: part.task is task, why)


def divide(
    groups: Mapping[GroupT, Sequence[Lent[Any]]], count: int, workers: int
) -> list[tuple[GroupT, list[Lent[Any]]]]:
    """Divide `count` blocks into parts, each of one group, that keep all workers busy."""
    share = min(BATCH_BLOCKS, -(-count // workers))
    batches: list[tuple[GroupT, list[Lent[Any]]]] = []
    for group, blocks in groups.items():
        size, batch = 0, list[Lent[Any]]()
        for block in blocks:
            if batch and (len(batch) == share or size + len(block.view) > BATCH_BYTES):
                batches.append((group, batch))
                size, batch = 0, []
            batch.append(block)
            size += len(block.view)
        batches.append((group, batch))
    return batches
