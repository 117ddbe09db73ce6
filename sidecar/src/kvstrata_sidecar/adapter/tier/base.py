"""Common base of the tiers behind the server's own memory: tasks with deadlines, threads, and counters."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvstrata.contract.messages.adapter import TierState
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.interface import Block, PodTier
from kvstrata_sidecar.adapter.tier.tasks import AnyPart, DepsT, Groups, Restore, Task, TaskKind, TaskTable
from kvstrata_sidecar.adapter.tier.threads import CLOSE_TIMEOUT_S, TierThreads, Upkeep, divide

ThreadsT = TypeVar("ThreadsT", bound=TierThreads)


class Placement(Protocol):
    """Finds the places of blocks in a tier. Refused blocks are counted and left out."""

    def to_store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> Groups[Any]: ...

    def to_load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> Groups[Any]: ...


class BaseTier(PodTier, Generic[DepsT, ThreadsT]):
    """A tier behind the server's own memory. `store`, `lookup` and `load` start a task and return its id; `pop_stores`
    and `pop_found` are those of TaskTable. `answered(task)` is called from any thread, without locks, once they have
    the answer. `lets_go` is as in TaskTable."""

    parts: ClassVar[Mapping[TaskKind, Callable[..., AnyPart]]]
    """Makers of the parts that carry blocks."""

    _io_threads: ThreadsT
    _places: Placement

    def __init__(
        self,
        deps: DepsT,
        answered: Callable[[Task], None],
        clock: Callable[[], float],
        lets_go: Callable[[], bool] = lambda: False,
    ) -> None:
        self._deps = deps
        self._params = params = deps.tier
        self._enforcement = deps.enforcement
        self._answered = answered
        self._clock = clock
        self.counts = deps.counters
        self._tasks = TaskTable(self._answer, lets_go)
        self.pop_stores, self.pop_found = self._tasks.pop_stores, self._tasks.pop_found
        self._deadlines_ms = {TaskKind.STORE: params.store_deadline_ms, TaskKind.LOAD: params.load_deadline_ms}
        self._closed = False

    def _start(self, *upkeep: Upkeep) -> None:
        """Start all threads."""
        self._upkeep = upkeep
        self._io_threads.start()
        for thread in upkeep:
            thread.start()

    @property
    def healthy(self) -> bool:
        """Whether all threads are alive. An absent server or disk is no fault of this process."""
        return self._closed or (self._io_threads.alive and all(one.is_alive() for one in self._upkeep))

    def close(self) -> None:
        """Answer every task, end the threads. One that is connecting or waits for the disk ends by itself later."""
        self._closed = True
        self._io_threads.close()
        for thread in self._upkeep:
            thread.close()
        self._io_threads.join()
        for thread in self._upkeep:
            thread.join(CLOSE_TIMEOUT_S)

    def store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        """Start to store blocks from `views`. Refused blocks count as stored with 0 bytes."""
        deadline_ms = self._params.store_deadline_ms
        return self._carry(TaskKind.STORE, len(blocks), self._places.to_store(blocks, views), deadline_ms)

    def load(self, blocks: Sequence[Block], views: Sequence[memoryview], restore: Restore | None = None) -> int:
        """Start to load blocks into `views`. `restore` may shorten the deadline."""
        deadline_ms = self._params.load_deadline_ms
        if restore is not None and restore.hurries(deadline_ms):
            deadline_ms = int(1000 * restore.within_s)
        return self._carry(TaskKind.LOAD, len(blocks), self._places.to_load(blocks, views), deadline_ms, restore)

    @abstractmethod
    def lookup(self, blocks: Sequence[Block]) -> int:
        """Start to look up blocks. Those without an answer at the deadline are misses."""

    @abstractmethod
    def nodes(self) -> dict[str, str]:
        """Return the breaker's state of each server or directory, by name, with its fault."""

    def refuse(self, refusal: Refusal, blocks: Sequence[Block]) -> None:
        """Count hits that are not loaded."""
        for keyspace, amount in Counter(block.keyspace for block in blocks).items():
            self.counts.refuse(refusal, amount, keyspace)

    def counters(self) -> dict[str, int]:
        return self.counts.snapshot()

    def _counted(self, medium: str, breaker: str, detail: str) -> TierState:
        """Return the part of the state that follows from counters and parameters."""
        counts, encrypts = self.counts.snapshot(), self._params.encrypts
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

    def _carry(
        self, kind: TaskKind, key_count: int, groups: Groups[Any], deadline_ms: int, restore: Restore | None = None
    ) -> int:
        """Queue the parts of a load or a store; return the task's id."""
        batches = divide(groups, key_count, self._params.workers)
        task = self._open(kind, key_count, len(batches), deadline_ms, restore)
        for (keyspace, label), batch in batches:
            part = self.parts[kind](task, keyspace, batch, self._deps)
            self._require_queued(part, self._io_threads.blocks.put(part, label))
        return task.task_id

    def _require_queued(self, part: AnyPart, refusal: Refusal | None) -> None:
        """Count a part that was not queued, for `refusal`, as failed."""
        if refusal is not None:
            part.refused(refusal)
            self._tasks.drop(part.task)

    def _answer(self, task: Task) -> None:
        if task.restore is not None:
            self.counts.observe(task.kind, self._clock() - task.restore.began_s)
        elif task.deadline_s != float("inf"):
            self.counts.observe(task.kind, self._clock() - task.deadline_s + self._deadlines_ms[task.kind] / 1000)
        self._answered(task)


AnyTier = BaseTier[Any, Any]
