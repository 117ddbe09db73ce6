"""A tier of files for LMCache: lookups in the index, loads and stores by workers, answers by deadline."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.contract.messages.erase import ErasedTier
from kvstrata_sidecar.adapter.files.bounds_in_force import Policy
from kvstrata_sidecar.adapter.files.directories import Folder, PlacedDisk, Reaper, ReaperThread
from kvstrata_sidecar.adapter.files.disk import Clocks, Disk
from kvstrata_sidecar.adapter.files.erase import MEDIUM, FileEraser
from kvstrata_sidecar.adapter.files.exchanges import DiscardPart, Files, Lent, LoadPart, RemovePart, StorePart, divide
from kvstrata_sidecar.adapter.files.file_format import Pages, pages_for
from kvstrata_sidecar.adapter.files.file_index import FileIndex
from kvstrata_sidecar.adapter.files.finder import Finder, Found
from kvstrata_sidecar.adapter.files.health import Health
from kvstrata_sidecar.adapter.files.housekeeping import Housekeeper
from kvstrata_sidecar.adapter.files.threads import CLOSE_TIMEOUT_S, FileThreads
from kvstrata_sidecar.adapter.params import AdapterParams, FileTierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.adapter.tier.counts import Counters, Histogram
from kvstrata_sidecar.adapter.tier.interface import Block, Hot
from kvstrata_sidecar.adapter.tier.tasks import Key, StoreOutcome, Task, TaskKind, TaskTable


class FileTier:
    """A directory of block files under the pod's enforcement. See SlowerTier.

    `answered(task)` is called from any thread, without locks, once a task's answer can be fetched; for a lookup before
    `lookup` returns. If `guarded()`, memory in `spans` is held back when LMCache frees it: then tasks are answered at
    their deadline; otherwise when the disk has finished.
    """

    per_pod = True

    def __init__(
        self,
        params: AdapterParams,
        tier: FileTierParams,
        enforcement: Enforcement,
        answered: Callable[[Task], None],
        *,
        spans: Spans,
        guarded: Callable[[], bool] = lambda: False,
        clocks: Clocks | None = None,
        clock: Callable[[], float] = time.monotonic,
        disk: Disk | None = None,
    ) -> None:
        self._params = tier
        self._enforcement = enforcement
        self._answered = answered
        self._clock = clock
        self._counters = Counters()
        self._tasks = TaskTable(self._answer, lets_go=guarded)
        self._deadlines_ms = {TaskKind.STORE: tier.store_deadline_ms, TaskKind.LOAD: tier.load_deadline_ms}
        clocks = clocks or Clocks()
        folder = None if tier.place is None else Folder(tier.directory, params.domain, tier.name, tier.place)
        index = FileIndex(
            Policy(tier.name, tier.default_ttl_s),
            capacity_bytes=tier.capacity_bytes,
            max_blocks=tier.max_blocks,
            clock=clocks.now_s,
        )
        self._files = Files(
            params.domain,
            disk or (Disk(tier.directory) if folder is None else PlacedDisk(folder)),
            index,
            Health(clock),
            clocks,
            self._counters,
            enforcement.ages,
            spans,
            tier.encrypts,
            lambda key, kept, view: enforcement.loaded_from(key, kept, view),
        )
        self._finder = Finder(params.identity, tier.name, enforcement, self._refusal, index, self._counters)
        self._keyspaces: frozenset[str] = frozenset()
        self._eraser = FileEraser(tier.name, self._files, clock)
        make_pages = pages_for(enforcement.keys, encrypt=tier.encrypts)
        self._pages: Pages = make_pages()
        self._io_threads = FileThreads(tier, self._tasks, enforcement, self._files, make_pages, self._counters, clock)
        self._housekeeper = Housekeeper(
            f"kvs-{tier.name}-housekeeper",
            self._files,
            enforcement,
            identity=params.identity,
            capacity_bytes=tier.capacity_bytes,
            floor_percent=tier.free_floor_percent,
        )
        self._reaper = (
            None if folder is None else ReaperThread(f"kvs-{tier.name}-reaper", Reaper(folder, self._retention_s))
        )
        self._closed = False
        self._io_threads.start()
        for thread in self._threads():
            thread.start()

    def store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        return self._store(blocks, views, self._params.store_deadline_ms)

    def hand_down(
        self, blocks: Sequence[Block], views: Sequence[memoryview], within_s: float, done: Callable[[Task], None]
    ) -> None:
        self._store(blocks, views, min(self._params.store_deadline_ms, int(1000 * within_s)), done)

    def life_s(self, block: Block) -> float:
        return self._finder.life_s(block)

    def takes(self, block: Block) -> bool:
        return self._refusal(block.keyspace, True) is None

    def lookup(self, blocks: Sequence[Block]) -> int:
        """Look blocks up; return the id of the task, which is answered already."""
        began_s = self._clock()
        keys, needless = self._finder.to_read(blocks)
        task = self._tasks.open(TaskKind.LOOKUP, len(blocks), 1, float("inf"))
        warmed = self._enforcement.warmed
        unused = [key for number, key in keys if blocks[number].key in warmed] if warmed else []
        found = self._files.index.present([key for _, key in keys], unused)
        hits = [number for (number, _), there in zip(keys, found, strict=True) if there]
        self._count_lookups(blocks, [number for number, _ in keys], frozenset(hits))
        self._tasks.begin(task)
        self._tasks.end(task, hits)
        self._counters.observe(str(TaskKind.LOOKUP), self._clock() - began_s)
        for keyspace, names in _by_keyspace(blocks, needless).items():
            self._io_threads.put(DiscardPart(keyspace, list(names), self._files))
        return task.task_id

    def load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        reading = self._finder.to_read(blocks).blocks
        batches = divide(_lent(blocks, views, reading), len(blocks), self._params.workers)
        task = self._open(TaskKind.LOAD, len(blocks), len(batches), self._params.load_deadline_ms)
        for keyspace, batch in batches:
            self._put(LoadPart(task, keyspace, batch, self._files))
        return task.task_id

    def pop_stores(self) -> dict[int, StoreOutcome]:
        return self._tasks.pop_stores()

    def pop_found(self, task_id: int) -> bytes | None:
        return self._tasks.pop_found(task_id)

    def delete(self, blocks: Sequence[Block]) -> list[Key]:
        """Delete blocks; return the keys of those that existed. Takes at most the load deadline."""
        deleted: list[Key] = []
        give_up_at_s = self._clock() + self._params.load_deadline_ms / 1000
        for keyspace, names in _by_keyspace(blocks, self._finder.own(blocks)).items():
            part = RemovePart(keyspace, list(names), self._files)
            if self._io_threads.put(part) is None and part.done.wait(max(0.0, give_up_at_s - self._clock())):
                deleted += [names[key] for key in part.removed]
        return deleted

    def holds(self, keyspace: str, block: Block) -> bool:
        allowed = self._enforcement.refusal(keyspace, tier=self._params.name) is None
        if self._files.health.refusal() is not None or not allowed:
            return False
        return self._finder.holds(block)

    def sizes(self, blocks: Sequence[Block]) -> list[int]:
        index = self._files.index
        return [index.size(self._finder.key(block)) if self.holds(block.keyspace, block) else 0 for block in blocks]

    def hottest(self, keyspaces: Sequence[str]) -> list[Hot] | None:
        """Return the most recently used blocks of these keyspaces; None until all files are counted."""
        health = self._files.health
        return None if health.recovering or health.refusal() is not None else self._finder.hottest(keyspaces)

    def erase(self, keyspaces: Sequence[str], seen: Callable[[str, bytes], None]) -> ErasedTier:
        return self._eraser.erase(keyspaces, seen)

    def kept(self, blocks: Sequence[Block]) -> int:
        """Return how many of these blocks have a file, regardless of policy."""
        return len(self._files.index.known([self._finder.key(block) for block in blocks]))

    def state(self) -> TierState:
        counts, health = self._counters.snapshot(), self._files.health
        return TierState(
            name=self._params.name,
            medium=MEDIUM,
            breaker=str(health.breaker.state),
            detail=self._detail(),
            stored=counts.get("stored", 0),
            loaded=counts.get("loaded", 0),
            refused=counts.get("refused", 0),
            errors=counts.get("errors", 0),
            full=health.full,
            encrypted=self._params.encrypts,
            keyless=self._enforcement.keyless() if self._params.encrypts else 0,
            capacity_bytes=self._params.capacity_bytes,
            used_bytes=self._files.index.used_bytes,
            read_only=health.read_only,
            recovering=health.recovering,
            floor_reached=self._housekeeper.floor_reached,
        )

    def policy_changed(self) -> None:
        view = self._enforcement.view
        self._files.index.follow(view)
        if view is not None:
            self._counters.retain(view.keyspaces.keys())
            self._eraser.forget(view.keyspaces.keys() - self._keyspaces)
            self._keyspaces = frozenset(view.keyspaces)
        self._housekeeper.wake()

    def usage(self) -> list[ScopeUsage]:
        return self._files.index.usage(self._params.name)

    def by_scope(self) -> Mapping[str, Mapping[str, int]]:
        return self._counters.by_scope()

    def latencies(self) -> Mapping[str, Histogram]:
        return self._counters.latencies()

    def ages(self) -> Mapping[str, Histogram]:
        return self._counters.ages()

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot() | {"blocks": len(self._files.index)}

    @property
    def healthy(self) -> bool:
        """Whether all threads are alive. An absent disk is no fault of this process."""
        return self._closed or (self._io_threads.alive and all(one.is_alive() for one in self._threads()))

    def nodes(self) -> dict[str, str]:
        breaker, detail = self._files.health.breaker, self._detail()
        return {str(self._params.directory): f"{breaker.state}: {detail}" if detail else str(breaker.state)}

    def close(self) -> None:
        """Answer every task, end the threads; one that waits for the disk ends when the disk answers."""
        self._closed = True
        self._io_threads.close()
        self._housekeeper.close()
        if self._reaper is not None:
            self._reaper.close()
        self._io_threads.join()
        for thread in self._threads():
            thread.join(CLOSE_TIMEOUT_S)

    def _threads(self) -> list[threading.Thread]:
        return [self._housekeeper] if self._reaper is None else [self._housekeeper, self._reaper]

    def _retention_s(self, keyspace: str) -> float | None:
        bound = self._files.index.bounds(keyspace)
        return None if bound is None else bound.retention_s

    def _detail(self) -> str:
        index = self._files.index
        if (detail := self._files.health.detail) or not index.crowded:
            return detail
        return "as many blocks are there as the index has room for: the least recently used make room"

    def _refusal(self, keyspace: str, storing: bool) -> Refusal | None:
        return (
            self._enforcement.refusal(keyspace, tier=self._params.name)
            or self._pages.refusal(keyspace)
            or self._files.health.refusal(storing=storing)
        )

    def _count_lookups(self, blocks: Sequence[Block], asked: Sequence[int], hits: frozenset[int]) -> None:
        counts: Counter[tuple[str, str]] = Counter(
            (blocks[number].keyspace, "lookup_hits" if number in hits else "lookup_misses") for number in asked
        )
        for (keyspace, name), amount in counts.items():
            self._counters.add(name, amount, keyspace)

    def _store(
        self,
        blocks: Sequence[Block],
        views: Sequence[memoryview],
        deadline_ms: int,
        done: Callable[[Task], None] | None = None,
    ) -> int:
        batches = divide(_lent(blocks, views, self._finder.to_store(blocks)), len(blocks), self._params.workers)
        task = self._open(TaskKind.STORE, len(blocks), len(batches), deadline_ms, done)
        for keyspace, batch in batches:
            self._put(StorePart(task, keyspace, batch, self._files))
        return task.task_id

    def _open(
        self,
        kind: TaskKind,
        key_count: int,
        parts: int,
        deadline_ms: int,
        done: Callable[[Task], None] | None = None,
    ) -> Task:
        # A task without parts has no deadline; `_answer` relies on it.
        deadline_s = self._clock() + deadline_ms / 1000 if parts else float("inf")
        task = self._tasks.open(kind, key_count, parts, deadline_s, done)
        if parts:
            self._io_threads.wake_by(deadline_s)
        return task

    def _put(self, part: LoadPart | StorePart) -> None:
        refusal = self._io_threads.put(part)
        if refusal is not None:
            part.refused(refusal)
            if part.task is not None:
                self._tasks.drop(part.task)

    def _answer(self, task: Task) -> None:
        if task.done is not None:
            task.done(task)
            return
        if task.deadline_s != float("inf"):
            lasted_s = self._clock() - task.deadline_s + self._deadlines_ms[task.kind] / 1000
            self._counters.observe(str(task.kind), lasted_s)
        self._answered(task)


def _lent(blocks: Sequence[Block], views: Sequence[memoryview], found: Sequence[Found]) -> dict[str, list[Lent]]:
    lent: dict[str, list[Lent]] = defaultdict(list)
    for number, key in found:
        lent[blocks[number].keyspace].append(Lent(number, blocks[number].key, key, views[number]))
    return lent


def _by_keyspace(blocks: Sequence[Block], found: Sequence[Found]) -> dict[str, dict[bytes, Key]]:
    names: dict[str, dict[bytes, Key]] = defaultdict(dict)
    for number, key in found:
        names[blocks[number].keyspace][key] = blocks[number].key
    return names
