"""Common base of the tiers behind the server's own memory: tasks with deadlines, and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvstrata.contract.messages.adapter import TierState
from kvstrata_sidecar.adapter.params import FileTierParams, TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import AnyPart, Restore, Task, TaskKind, TaskTable
from kvstrata_sidecar.adapter.tier.threads import TierThreads

ParamsT = TypeVar("ParamsT", bound=TierParams | FileTierParams)
ThreadsT = TypeVar("ThreadsT", bound=TierThreads)


class BaseTier(Generic[ParamsT, ThreadsT]):
    """See SlowerTier. `answered(task)` is called from any thread, without locks, once `pop_stores` or `pop_found` has
    the answer. `lets_go` is as in TaskTable."""

    _io_threads: ThreadsT

    def __init__(
        self,
        tier: ParamsT,
        enforcement: Enforcement,
        answered: Callable[[Task], None],
        clock: Callable[[], float],
        lets_go: Callable[[], bool] = lambda: False,
    ) -> None:
        self._params: ParamsT = tier
        self._enforcement = enforcement
        self._answered = answered
        self._clock = clock
        self._counters = counters = Counters()
        self._tasks = TaskTable(self._answer, lets_go)
        self.pop_stores, self.pop_found = self._tasks.pop_stores, self._tasks.pop_found
        self.by_scope, self.latencies, self.ages = counters.by_scope, counters.latencies, counters.ages
        self._deadlines_ms = {TaskKind.STORE: tier.store_deadline_ms, TaskKind.LOAD: tier.load_deadline_ms}
        self._closed = False

    def refuse(self, refusal: Refusal, blocks: Sequence[Block]) -> None:
        for keyspace, amount in Counter(block.keyspace for block in blocks).items():
            self._counters.refuse(refusal, amount, keyspace)

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot()

    def _counted(self, medium: str, breaker: str, detail: str) -> TierState:
        """Return the part of the state that follows from counters and parameters."""
        counts, encrypts = self._counters.snapshot(), self._params.encrypts
        return TierState(
            name=self._params.name,
            medium=medium,
            breaker=breaker,
            detail=detail,
            stored=counts.get("stored", 0),
            loaded=counts.get("loaded", 0),
            refused=counts.get("refused", 0),
            errors=counts.get("errors", 0),
            encrypted=encrypts,
            keyless=self._enforcement.keyless() if encrypts else 0,
        )

    def _open(
        self, kind: TaskKind, key_count: int, parts: int, deadline_ms: int, restore: Restore | None = None
    ) -> Task:
        # A task without parts has no deadline; `_answer` relies on it.
        deadline_s = self._clock() + deadline_ms / 1000 if parts else float("inf")
        task = self._tasks.open(kind, key_count, parts, deadline_s, restore)
        if parts:
            self._io_threads.wake_by(deadline_s)
        return task

    def _open_load(self, key_count: int, parts: int, restore: Restore | None) -> Task:
        deadline_ms = self._params.load_deadline_ms
        if restore is not None and restore.hurries(deadline_ms):
            deadline_ms = int(1000 * restore.within_s)
        return self._open(TaskKind.LOAD, key_count, parts, deadline_ms, restore)

    def _require_queued(self, part: AnyPart, refusal: Refusal | None) -> None:
        """Count a part that was not queued, for `refusal`, as failed."""
        if refusal is not None:
            part.refused(refusal)
            if part.task is not None:
                self._tasks.drop(part.task)

    def _answer(self, task: Task) -> None:
        if task.restore is not None:
            self._counters.observe(task.kind, self._clock() - task.restore.began_s)
        elif task.deadline_s != float("inf"):
            self._counters.observe(task.kind, self._clock() - task.deadline_s + self._deadlines_ms[task.kind] / 1000)
        self._answered(task)
