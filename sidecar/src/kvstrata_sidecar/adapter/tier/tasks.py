"""Tasks that LMCache waits for, and their parts, each one exchange with a tier. A task is answered exactly once. Parts
carry the blocks of requests that policy, keys and tier admit.

A task is answered when its last part has ended. At its deadline it is cancelled: no further part may begin, and it is
answered when no part touches a buffer any more. Lookups touch no buffers of LMCache and are answered at the deadline
with the results so far. So are all tasks of a tier whose I/O cannot be aborted, if its buffers are kept from reuse.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from kvstrata.contract.messages.engine_identity import UNRESOLVED
from kvstrata_sidecar.adapter.params import AdapterParams, FileTierParams, TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.counts import HIT, Counters
from kvstrata_sidecar.adapter.tier.interface import Block, Key

CarrierT = TypeVar("CarrierT", contravariant=True)
T = TypeVar("T")
ParamsT = TypeVar("ParamsT", bound=TierParams | FileTierParams)
PlaceT = TypeVar("PlaceT")
DepsT = TypeVar("DepsT", bound="Deps")  # type: ignore[type-arg]


class TaskKind(StrEnum):
    STORE = "store"
    LOOKUP = "lookup"
    LOAD = "load"


class Restore(NamedTuple):
    """A load that a request waits for: its tokens and beginning, how long it may take, and how long their prefill."""

    tokens: int
    began_s: float
    within_s: float
    prefill_s: float

    def hurries(self, deadline_ms: int) -> bool:
        """Whether it has to end before the tier's own deadline, so that it is no failure if it does not."""
        return 1000 * self.within_s < deadline_ms


@dataclass(slots=True)
class Task:
    """One request; the table's lock guards it. `found` has a byte for each of its keys, 1 for those present. `restore`
    is set for loads that are measured."""

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
    restore: Restore | None = None

    @property
    def is_over(self) -> bool:
        """Whether no further block is begun, or renamed into place."""
        return self.cancelled or self.answered


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """The bytes that the tier confirmed, and whether the store counts as successful."""

    successful: bool
    stored_bytes: int


@dataclass(slots=True)
class Gain:
    """Results of a part so far: indices of keys found, and keys and sizes of blocks carried."""

    hits: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def carried(self, position: int, key: Key, size: int) -> None:
        self.hits.append(position)
        self.keys.append(key)
        self.sizes.append(size)


class TaskTable:
    """Tasks under way and answers not yet fetched. Thread-safe. `answered(task)` is called once for each, without
    locks, when its answer can be fetched. `lets_go` returns whether a task may be answered at its deadline while parts
    still touch its buffers."""

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
        restore: Restore | None = None,
    ) -> Task:
        """Register a task of `parts` parts; one without parts is answered at once, with no hits and no bytes."""
        with self._lock:
            self._last_id += 1
            task = Task(self._last_id, kind, deadline_s, bytearray(key_count), parts, restore=restore)
            self._tasks[task.task_id] = task
            over = self._answer_if_over(task)
        if over:
            self._answered(task)
        return task

    def begin(self, task: Task) -> bool:
        """Let a part touch its buffer; False if the task is over or cancelled and the part must be dropped."""
        with self._lock:
            if task.is_over:
                return False
            task.touching += 1
            return True

    def end(self, task: Task, gain: Gain, *, over: bool = True) -> None:
        """Record that a part touches its buffers no more, and that it is `over` or will begin again."""
        with self._lock:
            task.touching -= 1
            task.parts -= over
            if not task.answered:
                for index in gain.hits:
                    task.found[index] = 1
                task.keys += gain.keys
                task.sizes += gain.sizes
            done = self._answer_if_over(task)
        if done:
            self._answered(task)

    def drop(self, task: Task | None) -> None:
        """Count a part of a task, if it is one's, as failed that never began or was paused."""
        if task is None:
            return
        with self._lock:
            task.parts -= 1
            task.failed_parts += 1
            done = self._answer_if_over(task)
        if done:
            self._answered(task)

    def expire(self, now_s: float) -> list[Task]:
        """Cancel the tasks whose deadline has passed and return them; the caller aborts their running parts."""
        with self._lock:
            late = [task for task in self._tasks.values() if task.deadline_s <= now_s and not task.cancelled]
            for task in late:
                task.cancelled = True
            done = [task for task in late if self._answer_if_over(task)]
        for task in done:
            self._answered(task)
        return late

    def next_deadline_s(self) -> float | None:
        with self._lock:
            return min((task.deadline_s for task in self._tasks.values() if not task.cancelled), default=None)

    def pop_stores(self) -> dict[int, StoreOutcome]:
        """Return, once, all stores answered since the last call."""
        with self._lock:
            stores, self._stores = self._stores, {}
            return stores

    def pop_found(self, task_id: int) -> bytes | None:
        """Return, once, a byte for each key of an answered lookup or load; None while it is under way."""
        with self._lock:
            return self._found.pop(task_id, None)

    def _answer_if_over(self, task: Task) -> bool:
        """Publish the answer if the task is over; return whether it became so now. The caller holds the lock."""
        over = task.parts == 0 or (
            task.cancelled and (task.touching == 0 or task.kind is TaskKind.LOOKUP or self._lets_go())
        )
        if task.answered or not over:
            return False
        task.answered = True
        del self._tasks[task.task_id]
        if task.kind is TaskKind.STORE:
            stored_bytes = sum(task.sizes)
            failed = task.failed_parts > 0 or task.cancelled
            self._stores[task.task_id] = StoreOutcome(stored_bytes > 0 or not failed, stored_bytes)
        else:
            self._found[task.task_id] = bytes(task.found)
        return True


class Carrier(Protocol):
    """A worker's access to its tier."""

    def renew(self) -> None:
        """Reset the abort of the previous part: another begins."""

    def abort(self, why: str = "") -> None:
        """Abort the running exchange, where possible; `why` blames the server that it waits for. From any thread."""

    def close(self) -> None:
        """Release all resources."""


class Part(ABC, Generic[CarrierT]):
    """One exchange with a tier for one keyspace. `task` is None if LMCache does not wait for it; `size` is the bytes of
    LMCache's memory kept lent meanwhile, `pools` the keyspaces of the pools that it reads."""

    task: Task | None
    keyspace: str | None
    urgent: bool
    size: int = 0
    pools: tuple[str, ...] = ()

    @abstractmethod
    def run(self, carrier: CarrierT, gain: Gain) -> None:
        """Do the exchange. Raises the carrier's exceptions; `gain` counts even then."""

    def refused(self, refusal: Refusal) -> None:
        """Called when the exchange is not allowed (any more)."""

    def over(self, error: Exception | None) -> None:
        """Called when the part is over."""


AnyPart = Part[Any]


class Lent(NamedTuple, Generic[PlaceT]):
    """A block and the memory of LMCache that it is read from or into; `position` is its number in the request. `place`
    is where the tier has it, `others` are a load's next places, or a store's pools."""

    position: int
    key: Key
    place: PlaceT
    view: memoryview
    others: tuple[PlaceT, ...] = ()


Groups = Mapping[tuple[str, Any], Sequence[Lent[PlaceT]]]
"""Blocks to carry, by keyspace and label of the queue: in Redis their server."""


@dataclass(frozen=True, slots=True)
class Deps(ABC, Generic[ParamsT, PlaceT]):
    """Dependencies that the parts of any tier share."""

    params: AdapterParams
    tier: ParamsT
    enforcement: Enforcement
    counters: Counters

    @abstractmethod
    def refusal(self, keyspace: str, *, storing: bool = False) -> Refusal | None:
        """Return why a keyspace may not be used here now, None if it may."""

    @abstractmethod
    def keyspace_at(self, place: PlaceT) -> str:
        """Return the keyspace under which a block is kept at a place."""

    def admitted(self, blocks: Sequence[Block], *, storing: bool = False) -> Iterator[tuple[int, Block]]:
        """Yield number and block of those that policy, keys and tier admit now; the others are counted."""
        readable, refusal_of = self.enforcement.readable, cache(partial(self.refusal, storing=storing))
        for number, block in enumerate(blocks):
            refusal = Refusal.NO_FINGERPRINT if block.fingerprint == UNRESOLVED else refusal_of(block.keyspace)
            if refusal is None and storing and not readable.admits(block.keyspace, block.chunk_hash, self.tier.name):
                refusal = Refusal.NOT_IN_POOL
            if refusal is None:
                yield number, block
            else:
                self.counters.refuse(refusal, 1, block.keyspace)


@dataclass(slots=True, eq=False)
class BlocksPart(Part[CarrierT], Generic[CarrierT, PlaceT, DepsT]):
    """A load or a store of blocks for a keyspace. `blocks` are the open ones, so that a second attempt skips others."""

    task: Task
    keyspace: str
    blocks: Sequence[Lent[PlaceT]]
    deps: DepsT
    size: int = field(init=False, default=0)
    pools: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.size = sum(len(one.view) for one in self.blocks)
        kept = {self.deps.keyspace_at(place) for one in self.blocks for place in (one.place, *one.others)}
        self.pools = tuple(kept - {self.keyspace})

    def refused(self, refusal: Refusal) -> None:
        self.deps.counters.refuse(refusal, len(self.blocks), self.keyspace)

    def loaded(self, one: Lent[PlaceT], gain: Gain, age_s: float, asked_s: float | None = None) -> None:
        """Record a block that was read; its tokens were `age_s` old at `asked_s`, None for now."""
        enforcement, counters, size = self.deps.enforcement, self.deps.counters, len(one.view)
        enforcement.ages.inherit(one.key, age_s, asked_s)
        counters.age(HIT, age_s)
        gain.carried(one.position, one.key, size)
        kept = self.deps.keyspace_at(one.place)
        if enforcement.loaded_from is not None:
            enforcement.loaded_from(one.key, kept, one.view)
        pooled = kept != self.keyspace
        counters.add_all(
            self.keyspace, loaded=1, loaded_bytes=size, pool_hits=int(pooled), pool_bytes=size if pooled else 0
        )

    def settled(self, one: Lent[PlaceT], outcome: object, gain: Gain) -> bool:
        """Record the outcome of a store: True if it was stored, False if it was present, or a refusal. Return False for
        any other."""
        counters, size = self.deps.counters, len(one.view)
        if outcome is True:
            gain.carried(one.position, one.key, size)
            counters.add_all(self.keyspace, stored=1, stored_bytes=size)
        elif outcome is False:
            gain.hits.append(one.position)
            counters.add("stores_present")
        elif isinstance(outcome, Refusal):
            counters.refuse(outcome, 1, self.keyspace)
        else:
            return False
        return True


@dataclass(slots=True, eq=False)
class QuestionPart(Part[CarrierT], Generic[CarrierT, PlaceT, T]):
    """Ask about blocks of one keyspace; LMCache waits for no answer. `done` is set when it is over, `answer` stays None
    if that failed."""

    keyspace: str
    places: Sequence[PlaceT]
    question: Callable[[CarrierT, Sequence[PlaceT]], T]
    counters: Counters
    urgent: bool = True
    task: Task | None = None
    answer: T | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, carrier: CarrierT, gain: Gain) -> None:  # noqa: ARG002
        self.answer = self.question(carrier, self.places)

    def refused(self, refusal: Refusal) -> None:
        self.counters.refuse(refusal, len(self.places), self.keyspace)

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        self.done.set()
