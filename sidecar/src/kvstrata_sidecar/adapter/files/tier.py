"""A tier of files for LMCache: lookups in the index, loads and stores by workers, answers by deadline.

A block's file is under its own keyspace, or under a pool's that its keyspace may read. A pool's blocks are read from
the pool and not stored again; older copies under the reader's own keyspace are needless.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.contract.messages.erase import ErasedTier
from kvstrata.contract.store.block_file import key_of
from kvstrata.contract.store.redis_keys import resolved
from kvstrata_sidecar.adapter.files.directories import Folder, PlacedDisk, Reaper
from kvstrata_sidecar.adapter.files.disk import Clocks, Disk
from kvstrata_sidecar.adapter.files.erase import FileEraser
from kvstrata_sidecar.adapter.files.exchanges import Files, Hands, LoadPart, StorePart
from kvstrata_sidecar.adapter.files.file_format import GcmPages, Pages, PlainPages
from kvstrata_sidecar.adapter.files.file_index import FileIndex
from kvstrata_sidecar.adapter.files.health import DiskError, Health
from kvstrata_sidecar.adapter.files.housekeeping import Housekeeper
from kvstrata_sidecar.adapter.files.space import Policy
from kvstrata_sidecar.adapter.params import AdapterParams, FileTierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.base import BaseTier
from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.interface import FILES, Block, Key
from kvstrata_sidecar.adapter.tier.tasks import AnyPart, Gain, Groups, Lent, Task, TaskKind
from kvstrata_sidecar.adapter.tier.threads import TierThreads, Upkeep

Found = tuple[int, bytes]
"""A block's number in its request, and the key of its file."""


@dataclass(eq=False)
class Finder:
    """Finds the files of one tier; refused blocks are counted and left out."""

    _files: Files

    def key(self, block: Block, pool: str = "") -> bytes:
        """Return the key of a block's file, under a pool's keyspace if one is given."""
        identity = resolved(self._files.params.identity, block.fingerprint)
        return key_of(pool or block.keyspace, identity, block.rank, block.group, block.chunk_hash)

    def to_read(self, blocks: Sequence[Block]) -> tuple[list[Found], list[Found]]:
        """Return the files to read, pools' first, and copies that a pool makes needless."""
        reading, needless, refusal_of = list[Found](), list[Found](), cache(self._files.refusal)
        for number, block in self._files.admitted(blocks):
            own, pooled = self.key(block), self._pooled(block, refusal_of)
            reading.append((number, pooled or own))
            if pooled is not None and self._files.index.readable(own):
                needless.append((number, own))
        return reading, needless

    def to_load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> Groups[bytes]:
        return _lent(blocks, views, self.to_read(blocks)[0])

    def to_store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> Groups[bytes]:
        """Return the blocks to write, without those that a pool has."""
        found: list[Found] = []
        refusal_of = cache(self._files.refusal)
        for number, block in self._files.admitted(blocks, storing=True):
            if self._pooled(block, refusal_of) is None:
                found.append((number, self.key(block)))
            else:
                self._files.counters.add("stores_in_pool", 1, block.keyspace)
        return _lent(blocks, views, found)

    def holds(self, block: Block) -> bool:
        return self._files.index.readable(self.key(block)) or self._pooled(block, self._files.refusal) is not None

    def _pooled(self, block: Block, refusal_of: Callable[[str], Refusal | None]) -> bytes | None:
        files = self._files
        for pool in files.enforcement.readable.candidates(block.keyspace, block.chunk_hash, files.tier.name):
            key = self.key(block, pool)
            if files.index.readable(key) and refusal_of(pool) is None:
                return key
        return None


class FileTier(BaseTier[Files, TierThreads]):
    """A directory of block files under the pod's enforcement. See BaseTier. `answered(task)` is called for a lookup
    before `lookup` returns. If `guarded()`, memory in `spans` is held back when LMCache frees it: then tasks are
    answered at their deadline; otherwise when the disk has finished."""

    per_pod = True
    parts: ClassVar[Mapping[TaskKind, Callable[..., AnyPart]]] = {TaskKind.STORE: StorePart, TaskKind.LOAD: LoadPart}
    _places: Finder

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
            params, tier, enforcement, Counters(), disk, index, Health(clock), clocks, spans, make_pages, make_pages()
        )
        super().__init__(files, answered, clock, guarded)
        self._places = Finder(files)
        self._keyspaces: frozenset[str] = frozenset()
        self._eraser = FileEraser(files, clock, folder)
        self._io_threads = TierThreads(files, self._tasks, clock, partial(Hands, files), (DiskError,))
        self._housekeeper = Housekeeper(files)
        reapers: list[Upkeep] = [] if folder is None else [Reaper(folder, self._retention_s)]
        self._start(self._housekeeper, *reapers)

    def lookup(self, blocks: Sequence[Block]) -> int:
        """Look blocks up; return the id of the task, which is answered already."""
        began_s = self._clock()
        keys, needless = self._places.to_read(blocks)
        task = self._tasks.open(TaskKind.LOOKUP, len(blocks), 1, float("inf"))
        found = self._files.index.present([key for _, key in keys])
        hits = [number for (number, _), there in zip(keys, found, strict=True) if there]
        counts = Counter(
            (blocks[number].keyspace, "lookup_hits" if there else "lookup_misses")
            for (number, _), there in zip(keys, found, strict=True)
        )
        for (keyspace, name), amount in counts.items():
            self.counts.add(name, amount, keyspace)
        self._tasks.begin(task)
        self._tasks.end(task, Gain(hits))
        self.counts.observe(TaskKind.LOOKUP, self._clock() - began_s)
        for keyspace, names in _by_keyspace(blocks, needless).items():
            self._io_threads.blocks.put(self._files.removal(keyspace, list(names), "copies_discarded"))
        return task.task_id

    def delete(self, blocks: Sequence[Block]) -> list[Key]:
        """Delete blocks; return the keys of those that existed. Takes at most the load deadline."""
        deleted: list[Key] = []
        give_up_at_s = self._clock() + self._params.load_deadline_ms / 1000
        own = [(number, self._places.key(block)) for number, block in self._files.admitted(blocks)]
        for keyspace, names in _by_keyspace(blocks, own).items():
            part = self._files.removal(keyspace, list(names))
            if self._io_threads.blocks.put(part) is None and part.done.wait(max(0.0, give_up_at_s - self._clock())):
                deleted += [names[key] for key in part.answer or ()]
        return deleted

    def holds(self, keyspace: str, block: Block) -> bool:
        refusal = self._files.health.refusal() or self._enforcement.refusal(keyspace, tier=self._params.name)
        return refusal is None and self._places.holds(block)

    def sizes(self, blocks: Sequence[Block]) -> list[int]:
        index = self._files.index
        return [index.size(self._places.key(block)) if self.holds(block.keyspace, block) else 0 for block in blocks]

    def erase(self, keyspaces: Sequence[str], seen: Callable[[str, bytes], None]) -> ErasedTier:
        return self._eraser.erase(keyspaces, seen)

    def kept(self, blocks: Sequence[Block]) -> int:
        """Return how many of these blocks have a file, regardless of policy."""
        return len(self._files.index.known([self._places.key(block) for block in blocks]))

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
            self.counts.retain(view.keyspaces.keys())
            self._eraser.forget(view.keyspaces.keys() - self._keyspaces)
            self._keyspaces = frozenset(view.keyspaces)
        self._housekeeper.wake()

    def usage(self) -> list[ScopeUsage]:
        return self._files.index.usage(self._params.name)

    def counters(self) -> dict[str, int]:
        return super().counters() | {"blocks": len(self._files.index)}

    def nodes(self) -> dict[str, str]:
        breaker, detail = self._files.health.breaker, self._detail()
        return {str(Path(self._params.directory)): f"{breaker.state}: {detail}" if detail else str(breaker.state)}

    def _retention_s(self, keyspace: str) -> float | None:
        bound = self._files.index.bounds(keyspace)
        return None if bound is None else bound.retention_s

    def _detail(self) -> str:
        index = self._files.index
        if (detail := self._files.health.detail) or not index.crowded:
            return detail
        return "as many blocks are there as the index has room for: the least recently used make room"


def _by_keyspace(blocks: Sequence[Block], found: Sequence[Found]) -> dict[str, dict[bytes, Key]]:
    names: dict[str, dict[bytes, Key]] = defaultdict(dict)
    for number, key in found:
        names[blocks[number].keyspace][key] = blocks[number].key
    return names


def _lent(blocks: Sequence[Block], views: Sequence[memoryview], found: Iterable[Found]) -> Groups[bytes]:
    lent: dict[tuple[str, None], list[Lent[bytes]]] = defaultdict(list)
    for number, key in found:
        lent[blocks[number].keyspace, None].append(Lent(number, blocks[number].key, key, views[number]))
    return lent
