"""One shared tier as LMCache uses it: tasks in, parts out, answers by deadline.

Nothing here blocks its caller but `delete` and `close`: LMCache's two loops serve all tenants, so a blocked call would
stall them all.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.contract.bundle import TierBudget
from kvstrata.contract.keys import BlockKey
from kvstrata.contract.link import TierState

from .breaker import Breaker
from .dial import dial
from .enforcement import Enforcement, Refusal
from .ledger import Ledgers
from .params import AdapterParams, TierParams
from .parts import Counters, DeletePart, LoadPart, LookupPart, ProbePart, Shared, StorePart
from .protocol import WRITE_WINDOW_MS, Bounds, Place, Terms
from .resp import Connection
from .sealer import Sealer
from .sealer_gcm import sealers
from .sweeper import Sweeper, SweeperHooks
from .tasks import Key, StoreOutcome, Task, TaskKind, TaskTable
from .wire import AccessError, TransportError
from .workers import Lane, Part, Worker, WorkerHooks

MEDIUM = "Redis"
FULL_PAUSE_S = 1.0
"""How long stores rest after the tier said that it has no memory: its answer costs the transfer of a whole block."""

PROBE_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 1.0
SWEEP_INTERVAL_S = 60.0
TOKEN_BYTES = 9


@dataclass(frozen=True, slots=True)
class Block:
    """What LMCache names one block by, and its own key object `key`, which is handed back untouched."""

    key: Key
    keyspace: str
    rank: int
    group: int
    chunk_hash: bytes


class Tier:
    """A Redis tier under the pod's enforcement.

    `answered(task)` is called from any thread, without locks, once a task's answer can be fetched by `pop_stores` or
    `pop_found`. The threads start with the object and end with `close`. `sealer` returns the calling thread's own, by
    default what `tier` asks for; `window_ms` is how long a value lives that is not committed.
    """

    def __init__(
        self,
        params: AdapterParams,
        tier: TierParams,
        enforcement: Enforcement,
        answered: Callable[[Task], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        sealer: Callable[[], Sealer] | None = None,
        window_ms: int = WRITE_WINDOW_MS,
        sweep_interval_s: float = SWEEP_INTERVAL_S,
    ) -> None:
        self._domain, self._identity = params.domain, params.identity
        self._params = tier
        self._enforcement = enforcement
        self._clock = clock
        self._tasks = TaskTable(answered)
        self._breaker = Breaker(clock)
        self._counters = Counters()
        self._full = False
        self._full_until_s = 0.0
        self._lookups = Lane(tier.queue_limit)
        self._blocks = Lane(tier.queue_limit)
        self._arc = tier.eviction == "ARC"
        ledgers = Ledgers(self._domain, self._counters.add, clock, window_ms, arc=self._arc)
        self._sweeper = Sweeper(
            f"kvs-{tier.name}-sweeper",
            self._domain,
            enforcement,
            ledgers,
            SweeperHooks(
                self._connect,
                lambda: self._breaker.closed,
                self._retention_ms,
                self._bounds,
                self._counters.add,
            ),
            token=secrets.token_hex(TOKEN_BYTES).encode(),
            interval_s=sweep_interval_s,
            clock=clock,
            jitter=random.random,
            arc=self._arc,
        )
        self._shared = Shared(
            counters=self._counters,
            ledgers=ledgers,
            sweeper=self._sweeper,
            ages=enforcement.ages,
            window_ms=window_ms,
            retention_ms=self._retention_ms,
            terms=self._terms,
            room=self._room,
            sealer=sealer or sealers(enforcement.keys, encrypt=tier.encrypts),
        )
        hooks = WorkerHooks(self._connect, self._usable, self._succeeded, self._failed)
        lanes = [self._lookups, *[self._blocks] * tier.workers]
        self._workers = [
            Worker(f"kvs-{tier.name}-{number}", lane, self._tasks, enforcement, hooks)
            for number, lane in enumerate(lanes)
        ]
        self._wake = threading.Condition()
        self._wake_at_s = 0.0
        self._closed = False
        self._timer = threading.Thread(target=self._keep_time, name=f"kvs-{tier.name}-timer", daemon=True)
        for thread in self._threads:
            thread.start()

    def store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        """Begin to store blocks from `views`; return the task's id. What is refused counts as stored with 0 bytes."""
        allowed: list[tuple[Block, memoryview]] = []
        for block, view in zip(blocks, views, strict=True):
            refusal = self._store_refusal(block)
            if refusal is None:
                allowed.append((block, view))
            else:
                self._counters.refuse(refusal)
        task = self._open(TaskKind.STORE, len(blocks), len(allowed), self._params.store_deadline_ms)
        for block, view in allowed:
            self._put(
                self._blocks,
                StorePart(
                    task=task,
                    keyspace=block.keyspace,
                    key=block.key,
                    place=self._place(block),
                    view=view,
                    shared=self._shared,
                    token=secrets.token_hex(TOKEN_BYTES).encode(),
                ),
            )
        return task.task_id

    def lookup(self, blocks: Sequence[Block]) -> int:
        """Begin to look blocks up; return the task's id. Whatever is not known by the deadline is a miss."""
        by_keyspace: dict[str, list[int]] = defaultdict(list)
        for index, block in enumerate(blocks):
            by_keyspace[block.keyspace].append(index)
        allowed: dict[str, list[int]] = {}
        for keyspace, indices in by_keyspace.items():
            refusal = self._refusal(keyspace)
            if refusal is None:
                allowed[keyspace] = indices
            else:
                self._counters.refuse(refusal, len(indices))
        task = self._open(TaskKind.LOOKUP, len(blocks), len(allowed), self._params.lookup_deadline_ms)
        for keyspace, indices in allowed.items():
            places = [self._place(blocks[index]) for index in indices]
            self._put(self._lookups, LookupPart(task, keyspace, indices, places, self._shared))
        return task.task_id

    def load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        """Begin to load blocks into `views`; return the task's id. Nothing touches a view once it is answered."""
        allowed: list[int] = []
        for index, block in enumerate(blocks):
            refusal = self._refusal(block.keyspace)
            if refusal is None:
                allowed.append(index)
            else:
                self._counters.refuse(refusal)
        task = self._open(TaskKind.LOAD, len(blocks), len(allowed), self._params.load_deadline_ms)
        for index in allowed:
            block = blocks[index]
            self._put(
                self._blocks,
                LoadPart(task, block.keyspace, index, block.key, self._place(block), views[index], self._shared),
            )
        return task.task_id

    def pop_stores(self) -> dict[int, StoreOutcome]:
        """Return, once, the stores answered since the last call."""
        return self._tasks.pop_stores()

    def pop_found(self, task_id: int) -> bytes | None:
        """Return, once, a byte for each block of a lookup or load, 1 for a hit; None while it is under way."""
        return self._tasks.pop_found(task_id)

    def delete(self, blocks: Sequence[Block]) -> list[Key]:
        """Delete blocks and return the keys of those that were there. It takes the load deadline at most."""
        by_keyspace: dict[str, list[Block]] = defaultdict(list)
        for block in blocks:
            by_keyspace[block.keyspace].append(block)
        deleted: list[Key] = []
        give_up_at_s = self._clock() + self._params.load_deadline_ms / 1000
        for keyspace, group in by_keyspace.items():
            if self._refusal(keyspace) is not None:
                continue
            part = DeletePart(keyspace, [self._place(block) for block in group], self._counters)
            if not self._lookups.put(part):
                continue
            if not part.done.wait(max(0.0, give_up_at_s - self._clock())):
                self._abort(lambda current, part=part: current is part)  # type: ignore[misc]
                continue
            deleted += [block.key for block, there in zip(group, part.deleted, strict=False) if there]
        return deleted

    def state(self) -> TierState:
        """Return what the pod reports about this tier."""
        counts = self._counters.snapshot()
        return TierState(
            name=self._params.name,
            medium=MEDIUM,
            breaker=str(self._breaker.state),
            detail=self._breaker.detail or self._full_detail(),
            stored=counts.get("stored", 0),
            loaded=counts.get("loaded", 0),
            refused=counts.get("refused", 0),
            errors=counts.get("errors", 0),
            full=self._full,
            encrypted=self._params.encrypts,
            keyless=self._enforcement.keyless() if self._params.encrypts else 0,
        )

    def counters(self) -> dict[str, int]:
        """Return all counts of this tier."""
        return self._counters.snapshot()

    @property
    def healthy(self) -> bool:
        """Whether all threads are alive. A tier that is away is no fault of this process."""
        return self._closed or all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Abort what is under way, answer every task, end the threads."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for part in (*self._lookups.close(), *self._blocks.close()):
            if part.task is not None:
                self._tasks.drop(part.task)
            part.over(TransportError("the tier was closed"))
        self._tasks.expire(float("inf"))
        self._abort(lambda _: True)
        self._sweeper.close()
        for thread in self._threads:
            # One that is connecting cannot be hurried; it touches nothing of LMCache's and ends by itself.
            thread.join(CLOSE_TIMEOUT_S)

    def _open(self, kind: TaskKind, key_count: int, parts: int, deadline_ms: int) -> Task:
        deadline_s = self._clock() + deadline_ms / 1000
        task = self._tasks.open(kind, key_count, parts, deadline_s)
        if parts:
            self._wake_by(deadline_s)
        return task

    def _put(self, lane: Lane, part: Part) -> None:
        if not lane.put(part):
            part.refused(Refusal.QUEUE_FULL)
            if part.task is not None:
                self._tasks.drop(part.task)

    @property
    def _threads(self) -> tuple[threading.Thread, ...]:
        return (*self._workers, self._timer, self._sweeper)

    def _place(self, block: Block) -> Place:
        key = BlockKey(self._domain, block.keyspace, self._identity, block.rank, block.group, block.chunk_hash)
        return Place.of(key)

    def _refusal(self, keyspace: str) -> Refusal | None:
        refusal = self._enforcement.refusal(keyspace)
        if refusal is None and not self._breaker.closed:
            return Refusal.BREAKER_OPEN
        if refusal is None and keyspace in self._sweeper.revoked:
            return Refusal.REVOKED
        return self._shared.sealer().refusal(keyspace) if refusal is None else refusal

    def _store_refusal(self, block: Block) -> Refusal | None:
        refusal = self._refusal(block.keyspace)
        if refusal is None and self._clock() < self._full_until_s:
            return Refusal.TIER_FULL
        return refusal

    def _terms(self, key: Key, keyspace: str) -> Terms:
        """Return under what a block may be stored now."""
        retention_ms = self._retention_ms(keyspace)
        return Terms(
            life_ms=1000 * self._params.default_ttl_s if retention_ms is None else retention_ms,
            age_ms=int(1000 * self._enforcement.ages.age_s(key)),
            bounds=self._bounds(keyspace),
            arc=self._arc,
        )

    def _retention_ms(self, keyspace: str) -> int | None:
        retention_s = self._enforcement.retention_s(keyspace, self._params.name)
        return None if retention_s is None else 1000 * retention_s

    def _bounds(self, keyspace: str) -> Bounds | None:
        """Return what a scope may use, None if that is not bounded."""
        budget = self._enforcement.budget(keyspace, self._params.name) or TierBudget(self._params.name)
        capacity = self._params.capacity_bytes
        if capacity is None:
            return None if budget.limit_bytes is None else Bounds(budget.limit_bytes)
        limit = capacity if budget.limit_bytes is None else min(capacity, budget.limit_bytes)
        return Bounds(limit, budget.guaranteed_bytes or 0, capacity)

    def _room(self, left: bool) -> None:
        """Note whether the tier took a block or had no memory for it."""
        self._full = not left
        if not left:
            self._full_until_s = self._clock() + FULL_PAUSE_S

    def _full_detail(self) -> str:
        return "the tier is out of memory: it refuses blocks" if self._full else ""

    def _connect(self) -> Connection:
        problems: list[TransportError] = []
        for endpoint in self._params.endpoints:
            try:
                return dial(
                    endpoint,
                    tls=self._params.tls,
                    username=self._params.username,
                    password_file=self._params.password_file,
                    connect_timeout_s=self._params.connect_timeout_ms / 1000,
                    io_timeout_s=self._params.io_timeout_ms / 1000,
                )
            except TransportError as error:
                problems.append(error)
        raise next((problem for problem in problems if isinstance(problem, AccessError)), problems[0])

    def _usable(self, part: Part) -> bool:
        return isinstance(part, ProbePart) or self._breaker.closed

    def _succeeded(self, part: Part) -> None:
        if not isinstance(part, ProbePart):
            self._breaker.succeeded()

    def _failed(self, part: Part, error: Exception) -> None:
        self._counters.add("errors")
        if not isinstance(part, ProbePart):
            self._breaker.failed(str(error), fatal=isinstance(error, AccessError))
            self._wake_by(self._clock())

    def _probed(self, error: Exception | None) -> None:
        if error is None:
            self._breaker.probe_succeeded()
        else:
            self._breaker.probe_failed(str(error))
        self._wake_by(self._clock())

    def _abort(self, which: Callable[[Part], bool]) -> None:
        for worker in self._workers:
            worker.abort(which)

    def _wake_by(self, moment_s: float) -> None:
        """See that the timer looks at its clock at `moment_s` at the latest."""
        with self._wake:
            if moment_s < self._wake_at_s:
                self._wake_at_s = moment_s
                self._wake.notify_all()

    def _keep_time(self) -> None:
        """Cancel what is late and send the breaker's probes, until the tier is closed."""
        while True:
            self._expire()
            if self._breaker.begin_probe():
                probe = ProbePart(PROBE_TIMEOUT_S, self._probed)
                if not self._lookups.put(probe):
                    self._breaker.probe_failed("the queue is full")
            with self._wake:
                if self._closed:
                    return
                now_s = self._clock()
                probe_in_s = self._breaker.probe_in_s()
                moments = [self._tasks.next_deadline_s(), None if probe_in_s is None else now_s + probe_in_s]
                self._wake_at_s = min((moment for moment in moments if moment is not None), default=float("inf"))
                if self._wake_at_s > now_s:
                    self._wake.wait(None if self._wake_at_s == float("inf") else self._wake_at_s - now_s)

    def _expire(self) -> None:
        for task in self._tasks.expire(self._clock()):
            self._counters.add(f"late_{task.kind}")
            self._breaker.failed(f"a {task.kind} took longer than its deadline")
            self._lookups.forget(task)
            self._blocks.forget(task)
            self._abort(lambda part, task=task: part.task is task)  # type: ignore[misc]
