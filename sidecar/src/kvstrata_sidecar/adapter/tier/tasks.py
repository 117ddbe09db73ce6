"""Tasks that LMCache waits for, and their parts, each one exchange with a tier. A task is answered exactly once.

A task is answered when its last part has ended, or at its deadline. A deadline does not answer at once: the task is
cancelled, so that no further part may begin, and answered when no part touches a buffer any more. Lookups touch none
of LMCache's buffers and are answered at their deadline, with what is known by then. So is everything of a tier whose
parts cannot be cut off, where somebody else sees to it that the buffers are not used anew before they are let go.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from kvstrata_sidecar.adapter.policy.enforcement import Refusal

Key = Hashable
"""LMCache's own key object, carried through untouched."""


class TaskKind(StrEnum):
    """The three things that LMCache asks for."""

    STORE = "store"
    LOOKUP = "lookup"
    LOAD = "load"


@dataclass(slots=True)
class Task:
    """One request. `found` has a byte for each of its keys, 1 for what is there now; the table's lock guards it all.

    `done` is who made it, if that was not LMCache: then it is in no answer that LMCache fetches.
    """

    task_id: int
    kind: TaskKind
    deadline_s: float
    found: bytearray
    parts: int
    touching: int = 0
    cancelled: bool = False
    answered: bool = False
    failed_parts: int = 0
    keys: list[Key] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    done: Callable[[Task], None] | None = None


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """How a store ended: the bytes that the tier confirmed, and whether that is all there was to hope for."""

    successful: bool
    stored_bytes: int


class TaskTable:
    """Tasks under way and answers not yet fetched. Safe to share between threads.

    `answered(task)` is called once for each task, without any lock, when its answer can be fetched. `lets_go` is asked
    whether a task may be answered at its deadline while parts still touch its buffers.
    """

    def __init__(self, answered: Callable[[Task], None], lets_go: Callable[[], bool] = lambda: False) -> None:
        self._answered = answered
        self._lets_go = lets_go
        self._lock = threading.Lock()
        self._last_id = 0
        self._tasks: dict[int, Task] = {}
        self._stores: dict[int, StoreOutcome] = {}
        self._found: dict[int, bytes] = {}

    def open(
        self,
        kind: TaskKind,
        key_count: int,
        parts: int,
        deadline_s: float,
        done: Callable[[Task], None] | None = None,
    ) -> Task:
        """Register a task of `parts` parts; one without parts is answered at once, with no hits and no bytes."""
        with self._lock:
            self._last_id += 1
            task = Task(self._last_id, kind, deadline_s, bytearray(key_count), parts, done=done)
            self._tasks[task.task_id] = task
            over = self._answer_if_over(task)
        if over:
            self._answered(task)
        return task

    def begin(self, task: Task) -> bool:
        """Let a part touch its buffer; False if the task is over or cancelled and the part must be forgotten."""
        with self._lock:
            if task.cancelled or task.answered:
                return False
            task.touching += 1
            return True

    def pause(self, task: Task, hits: Iterable[int] = (), keys: Sequence[Key] = (), sizes: Sequence[int] = ()) -> None:
        """Note that a part that has begun touches its buffers no more, but is not over; what it achieved counts."""
        self._end(task, False, hits, keys, sizes)

    def end(self, task: Task, hits: Iterable[int] = (), keys: Sequence[Key] = (), sizes: Sequence[int] = ()) -> None:
        """End a part that has begun: indices of keys found, keys and sizes of what was stored or loaded."""
        self._end(task, True, hits, keys, sizes)

    def drop(self, task: Task) -> None:
        """End a part that never began."""
        with self._lock:
            task.parts -= 1
            task.failed_parts += 1
            done = self._answer_if_over(task)
        if done:
            self._answered(task)

    def expire(self, now_s: float) -> list[Task]:
        """Cancel the tasks whose deadline has passed and return them; the caller aborts what still runs for them."""
        with self._lock:
            late = [task for task in self._tasks.values() if task.deadline_s <= now_s and not task.cancelled]
            for task in late:
                task.cancelled = True
            done = [task for task in late if self._answer_if_over(task)]
        for task in done:
            self._answered(task)
        return late

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline of a task that is not cancelled, None if there is none."""
        with self._lock:
            return min((task.deadline_s for task in self._tasks.values() if not task.cancelled), default=None)

    def pop_stores(self) -> dict[int, StoreOutcome]:
        """Return, once, all stores that were answered since the last call."""
        with self._lock:
            stores, self._stores = self._stores, {}
            return stores

    def pop_found(self, task_id: int) -> bytes | None:
        """Return, once, a byte for each key of an answered lookup or load; None while it is under way."""
        with self._lock:
            return self._found.pop(task_id, None)

    def count(self) -> int:
        """Return how many tasks are under way."""
        with self._lock:
            return len(self._tasks)

    def _end(self, task: Task, over: bool, hits: Iterable[int], keys: Sequence[Key], sizes: Sequence[int]) -> None:
        with self._lock:
            task.touching -= 1
            task.parts -= over
            if not task.answered:
                for index in hits:
                    task.found[index] = 1
                task.keys += keys
                task.sizes += sizes
            done = self._answer_if_over(task)
        if done:
            self._answered(task)

    def _answer_if_over(self, task: Task) -> bool:
        """Make the answer visible if the task is over; whether it became so just now. The caller holds the lock."""
        over = task.parts == 0 or (
            task.cancelled and (task.touching == 0 or task.kind is TaskKind.LOOKUP or self._lets_go())
        )
        if task.answered or not over:
            return False
        task.answered = True
        del self._tasks[task.task_id]
        if task.done is not None:
            return True
        if task.kind is TaskKind.STORE:
            stored_bytes = sum(task.sizes)
            failed = task.failed_parts > 0 or task.cancelled
            self._stores[task.task_id] = StoreOutcome(stored_bytes > 0 or not failed, stored_bytes)
        else:
            self._found[task.task_id] = bytes(task.found)
        return True


class Carrier(Protocol):
    """What one worker reaches its tier through."""

    def renew(self) -> None:
        """Forget that what was under way was cut off: another part begins."""

    def abort(self, why: str = "") -> None:
        """Cut off what is under way, where that can be done; `why` blames whoever it waits for. From any thread."""

    def close(self) -> None:
        """Give everything back."""


CarrierT = TypeVar("CarrierT", contravariant=True)


@dataclass(slots=True)
class Gain:
    """What a part has achieved so far: indices of keys found, and the keys and sizes of blocks that were carried."""

    hits: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def carried(self, key: Key, size: int) -> None:
        """Add a block."""
        self.keys.append(key)
        self.sizes.append(size)


class Part(ABC, Generic[CarrierT]):
    """One exchange with a tier, on one keyspace's behalf. `task` is None for what LMCache does not wait for.

    `size` is how many bytes of LMCache's memory it keeps lent while it waits, `pools` are the pools' keyspaces that it
    reads.
    """

    task: Task | None
    keyspace: str | None
    urgent: bool
    size: int = 0
    pools: tuple[str, ...] = ()

    @abstractmethod
    def run(self, carrier: CarrierT, gain: Gain) -> None:
        """Do the exchange. Raises what its carrier raises; what `gain` has by then counts all the same."""

    def refused(self, refusal: Refusal) -> None:
        """Learn that the exchange is not allowed (any more)."""

    def over(self, error: Exception | None) -> None:
        """Learn that the part is over, for those that no task waits for."""


AnyPart = Part[Any]
"""A part of whichever tier."""
