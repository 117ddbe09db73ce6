"""A tier of files for LMCache: lookups in the index, loads and stores by workers, answers by deadline."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata_sidecar.adapter.files.bounds_in_force import Policy
from kvstrata_sidecar.adapter.files.directories import Folder, PlacedDisk, Reaper
from kvstrata_sidecar.adapter.files.disk import Clocks, Disk
from kvstrata_sidecar.adapter.files.erase import FileEraser
from kvstrata_sidecar.adapter.files.exchanges import Files, Hands, Lent, LoadPart, RemovePart, StorePart
from kvstrata_sidecar.adapter.files.file_format import GcmPages, Pages, PlainPages
from kvstrata_sidecar.adapter.files.file_index import FileIndex
from kvstrata_sidecar.adapter.files.finder import Finder, Found
from kvstrata_sidecar.adapter.files.health import DiskError, Health
from kvstrata_sidecar.adapter.files.housekeeping import Housekeeper
from kvstrata_sidecar.adapter.params import AdapterParams, FileTierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.base import BaseTier
from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.adapter.tier.interface import FILES, Block
from kvstrata_sidecar.adapter.tier.queues import Lane
from kvstrata_sidecar.adapter.tier.tasks import Gain, Key, Restore, Task, TaskKind, TaskTable
from kvstrata_sidecar.adapter.tier.threads import CLOSE_TIMEOUT_S, TierThreads, Worker, divide


class FileThreads(TierThreads):
    """The timer, and workers of one lane."""

    reported = (DiskError,)

    def __init__(self, files: Files, tasks: TaskTable, clock: Callable[[], float]) -> None:
        super().__init__(files.tier, tasks, files.counters, clock)
        self._lane = lane = Lane()
        self.put = lane.put
        names = [f"kvs-{files.tier.name}-{number}" for number in range(1, files.tier.workers + 1)]
        self._own_workers = [Worker(name, lane, self, files.enforcement, Hands(files)) for name in names]

    def start(self) -> None:
        for thread in (*self._own_workers, self._timer):
            thread.start()

    def _workers(self) -> list[Worker]:
        return self._own_workers

    def _lanes(self) -> list[Lane]:
        return [self._lane]


class FileTier(BaseTier[FileTierParams, FileThreads]):
    """A directory of block files under the pod's enforcement. See BaseTier. `answered(task)` is called for a lookup
    before `lookup` returns. If `guarded()`, memory in `spans` is held back when LMCache frees it: then tasks are
    answered at their deadline; otherwise when the disk has finished."""

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
        super().__init__(tier, enforcement, answered, clock, guarded)
        clocks = clocks or Clocks()
        directory = Path(tier.directory)
        folder = None if tier.place is None else Folder(directory, params.domain, tier.name, tier.place)
        index = FileIndex(
            Policy(tier.name, tier.default_ttl_s),
            capacity_bytes=tier.capacity_bytes,
            max_blocks=tier.max_blocks,
            clock=clocks.now_s,
        )
        disk = disk or (Disk(directory) if folder is None else PlacedDisk(folder))
        make_pages: Callable[[], Pages] = partial(GcmPages, enforcement.keys) if tier.encrypts else PlainPages
        self._files = files = Files(
            params, tier, disk, index, Health(clock), clocks, self._counters, enforcement, spans, make_pages
        )
        self._finder = Finder(params.identity, tier.name, enforcement, self._refusal, index, self._counters)
        self._keyspaces: frozenset[str] = frozenset()
        self._eraser = FileEraser(files, clock)
        self.erase = self._eraser.erase
        self._pages = make_pages()
        self._io_threads = FileThreads(files, self._tasks, clock)
        self._housekeeper = Housekeeper(files)
        self._keepers: list[Housekeeper | Reaper] = [self._housekeeper]
        if folder is not None:
            self._keepers.append(Reaper(folder, self._retention_s))
        self._io_threads.start()
        for keeper in self._keepers:
            keeper.start()

    def store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        batches = divide(_lent(blocks, views, self._finder.to_store(blocks)), len(blocks), self._params.workers)
        task = self._open(TaskKind.STORE, len(blocks), len(batches), self._params.store_deadline_ms)
        for keyspace, batch in batches:
            self._put(StorePart(task, keyspace, batch, self._files))
        return task.task_id

    def lookup(self, blocks: Sequence[Block]) -> int:
        """Look blocks up; return the id of the task, which is answered already."""
        began_s = self._clock()
        keys, needless = self._finder.to_read(blocks)
        task = self._tasks.open(TaskKind.LOOKUP, len(blocks), 1, float("inf"))
        found = self._files.index.present([key for _, key in keys])
        hits = [number for (number, _), there in zip(keys, found, strict=True) if there]
        counts = Counter(
            (blocks[number].keyspace, "lookup_hits" if there else "lookup_misses")
            for (number, _), there in zip(keys, found, strict=True)
        )
        for (keyspace, name), amount in counts.items():
            self._counters.add(name, amount, keyspace)
        self._tasks.begin(task)
        self._tasks.end(task, Gain(hits))
        self._counters.observe(TaskKind.LOOKUP, self._clock() - began_s)
        for keyspace, names in _by_keyspace(blocks, needless).items():
            self._io_threads.put(RemovePart(keyspace, list(names), self._files, "copies_discarded"))
        return task.task_id

    def load(self, blocks: Sequence[Block], views: Sequence[memoryview], restore: Restore | None = None) -> int:
        reading, _ = self._finder.to_read(blocks)
        batches = divide(_lent(blocks, views, reading), len(blocks), self._params.workers)
        task = self._open_load(len(blocks), len(batches), restore)
        for keyspace, batch in batches:
            self._put(LoadPart(task, keyspace, batch, self._files))
        return task.task_id

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
        refusal = self._files.health.refusal() or self._enforcement.refusal(keyspace, tier=self._params.name)
        return refusal is None and self._finder.holds(block)

    def sizes(self, blocks: Sequence[Block]) -> list[int]:
        index = self._files.index
        return [index.size(self._finder.key(block)) if self.holds(block.keyspace, block) else 0 for block in blocks]

    def kept(self, blocks: Sequence[Block]) -> int:
        """Return how many of these blocks have a file, regardless of policy."""
        return len(self._files.index.known([self._finder.key(block) for block in blocks]))

    def state(self) -> TierState:
        health = self._files.health
        return replace(
            self._counted(FILES, str(health.breaker.state), self._detail()),
            full=health.full,
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

    def counters(self) -> dict[str, int]:
        return super().counters() | {"blocks": len(self._files.index)}

    @property
    def healthy(self) -> bool:
        """Whether all threads are alive. An absent disk is no fault of this process."""
        return self._closed or (self._io_threads.alive and all(one.is_alive() for one in self._keepers))

    def nodes(self) -> dict[str, str]:
        breaker, detail = self._files.health.breaker, self._detail()
        return {str(Path(self._params.directory)): f"{breaker.state}: {detail}" if detail else str(breaker.state)}

    def close(self) -> None:
        """Answer every task, end the threads; one that waits for the disk ends when the disk answers."""
        self._closed = True
        self._io_threads.close()
        for keeper in self._keepers:
            keeper.close()
        self._io_threads.join()
        for keeper in self._keepers:
            keeper.join(CLOSE_TIMEOUT_S)

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

    def _put(self, part: LoadPart | StorePart) -> None:
        self._require_queued(part, self._io_threads.put(part))


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
