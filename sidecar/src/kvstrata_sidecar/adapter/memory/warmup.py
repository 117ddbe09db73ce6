"""Loads recently used blocks into a new pod's memory before requests arrive: from its own files first, then Redis.

It starts when the engine has registered its layout, while the engine still initializes, and ends when the bytes are
loaded, the time is over, the memory is full or no tier has more. Blocks are loaded through LMCache, so policy, keys,
ages and budgets apply as for any load. One batch is under way at a time; loads from an absent server end at the tier's
deadline.

Scopes with a guarantee in memory come first, each up to its guarantee, scaled down if the budget is smaller than all
guarantees; the rest goes to the most recently used chunks. Chunks without all parts in a tier are left out.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvstrata.contract.messages.engine_identity import fingerprint_in
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.memory.events import MemoryEvent
from kvstrata_sidecar.adapter.memory.params import Warmup
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.policy.limits import Bounds, bounds_of
from kvstrata_sidecar.adapter.tier.interface import Hot, SlowerTier

if TYPE_CHECKING:
    from kvstrata_sidecar.adapter.memory.tier import MemoryTier

logger = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
"""Bytes under way: requests' own loads share the workers."""

BATCH_SHARE = 8
"""Largest part of the budget in one batch: policy and time are checked between batches."""

SPARE_SHARE = 0.05
"""Share of the memory, below the watermark, left to requests."""

PATIENCE_S = 5.0
"""How long to wait for an absent tier; one that counts its files is waited for."""

PAUSE_S = 0.1

ALIGNED_BYTES = 4096
"""LMCache rounds blocks up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """One part of each chunk, as registered by the engine; `counted`: a chunk is incomplete without it."""

    model: str
    rank: int
    group: int
    layout: Any
    counted: bool

    @property
    def size_bytes(self) -> int:
        layout = self.layout
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True))
        return -(-int(sum(sizes)) // ALIGNED_BYTES) * ALIGNED_BYTES


class Chunk(NamedTuple):
    """A chunk in a tier; `last_use` as in Hot."""

    keyspace: str
    chunk_hash: bytes
    last_use: float


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a scope may still take in memory: up to its limit (None without one), and within its guarantee."""

    left_bytes: int | None = None
    guaranteed_bytes: int = 0


class Loads(Protocol):
    """LMCache's parts of chunks, one for each rank and group of layers, and loads of them without a request."""

    def fingerprints(self) -> list[str]:
        """Return the fingerprints of the engines that have registered."""

    def names(self, keyspace: str, chunk_hashes: Sequence[bytes]) -> list[list[Any]] | None:
        """Return the keys of each chunk's counted parts, None before an engine registered its layout."""

    def parts(self) -> tuple[ChunkPart, ...]:
        """Return a chunk's parts; empty before an engine registered."""

    def keys(self, parts: Sequence[ChunkPart], chunks: Sequence[Chunk]) -> list[Any]:
        """Return LMCache's keys of all parts of chunks, chunk by chunk."""

    def begin(self, parts: Sequence[ChunkPart], chunks: Sequence[Chunk]) -> Any:
        """Start loading chunks, as far as tiers have them; return the handle for `over`."""

    def over(self, handle: Any, timeout_s: float) -> bool:
        """Wait for the end of a load; return whether it ended in time. Repeat until it did."""


class Warmer:
    """Warms memory up once, in a thread of its own, from `start` until it is done or closed. `tiers` returns the tiers
    behind the memory, from fast to slow, None while these are unknown."""

    def __init__(
        self,
        warmup: Warmup,
        memory: MemoryTier,
        enforcement: Enforcement,
        tiers: Callable[[], Sequence[SlowerTier] | None],
        loads: Loads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warmup = warmup
        self._memory = memory
        self._enforcement = enforcement
        self._tiers = tiers
        self._loads = loads
        self._clock = clock
        self._left_bytes = warmup.bytes
        self._batch_bytes = min(BATCH_BYTES, warmup.bytes // BATCH_SHARE)
        self._warmed: dict[Chunk, None] = {}
        self._by_scope: Counter[str] = Counter()
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvs-warm-up", daemon=True)

    @property
    def warming(self) -> bool:
        """Whether waiting is worthwhile: from the start until it is done or its time is over."""
        if self._ended_s is not None:
            return False
        return self._began_s is None or self._clock() < self._began_s + self._warmup.timeout_s

    @property
    def lasted_s(self) -> float:
        """Duration so far; 0 before the engine registered."""
        if self._began_s is None:
            return 0.0
        return (self._clock() if self._ended_s is None else self._ended_s) - self._began_s

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Start no further batch, and end the thread; a batch under way ends by itself."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(PAUSE_S * 10)

    def _run(self) -> None:
        try:
            self._warm_up()
        except Exception:
            logger.exception("The memory could not be warmed up; requests load the blocks that they need")
        finally:
            self._enforcement.warmed = frozenset()
            self._ended_s = self._clock()

    def _warm_up(self) -> None:
        while not (parts := self._loads.parts()) or (tiers := self._tiers()) is None:
            if self._closed.wait(PAUSE_S):
                return
        self._began_s = self._clock()
        waiting = list(tiers)
        while waiting and not self._is_over():
            # Judged before they are asked: a tier that is ready in between is asked again.
            worth_waiting = [tier for tier in waiting if self._worth_waiting(tier)]
            for tier in waiting:
                if (hot := self._ask(tier)) is not None:
                    waiting.remove(tier)
                    self._warm_from(tier, parts, hot)
                    break  # a faster tier may answer by now
            else:
                waiting = worth_waiting
                self._closed.wait(PAUSE_S)
        keys = self._loads.keys(parts, list(self._warmed))
        self._memory.note(MemoryEvent.ORDERED, [key for key in keys if self._memory.size(key)])
        logger.info(
            "The memory was warmed up: %d chunks, %d bytes, in %.1f s",
            len(self._warmed), self._warmup.bytes - self._left_bytes, self.lasted_s,
        )  # fmt: skip

    def _ask(self, tier: SlowerTier) -> list[Hot] | None:
        view = self._enforcement.view
        return None if view is None else tier.hottest(list(view.keyspaces))

    def _worth_waiting(self, tier: SlowerTier) -> bool:
        return tier.state().recovering or self._enforcement.view is None or self.lasted_s < PATIENCE_S

    def _warm_from(self, tier: SlowerTier, parts: Sequence[ChunkPart], hot: Iterable[Hot]) -> None:
        """Load recently used chunks of `tier`, planning again whenever the policy changes."""
        chunk_bytes = sum(part.size_bytes for part in parts)
        needed = {(part.rank, part.group) for part in parts if part.counted}
        bounds = bounds_of(self._enforcement.view, self._memory.name)
        own = fingerprint_in(parts[0].model)
        left = whole_chunks((one for one in hot if one.fingerprint == own and _young(one, bounds)), needed)
        while not self._is_over():
            view = self._enforcement.view
            left = [chunk for chunk in left if not self._there(parts, chunk)]
            chosen = share_out(left, chunk_bytes, self._left_bytes, self._rooms(view))
            if not chosen:
                return
            tried: set[Chunk] = set()
            for batch in batches(chosen, chunk_bytes, self._batch_bytes):
                if self._is_over() or self._enforcement.view is not view:
                    break
                self._load(parts, batch)
                tried.update(batch)
                if tier.state().breaker != "closed":
                    return
            left = [chunk for chunk in left if chunk not in tried]

    def _load(self, parts: Sequence[ChunkPart], chunks: Sequence[Chunk]) -> None:
        keys = self._loads.keys(parts, chunks)
        before = {key for key in keys if self._memory.size(key)}
        self._enforcement.warmed = frozenset(keys)
        handle = self._loads.begin(parts, chunks)
        while not self._loads.over(handle, 1.0):
            if self._closed.is_set():
                return
        self._enforcement.warmed = frozenset()
        for number, chunk in enumerate(chunks):
            own = keys[number * len(parts) : (number + 1) * len(parts)]
            sizes = [self._memory.size(key) for key in own if key not in before]
            size_bytes, blocks = sum(sizes), sum(size > 0 for size in sizes)
            if blocks:
                self._warmed[chunk] = None
                self._left_bytes -= size_bytes
                self._by_scope[chunk.keyspace] += size_bytes
                self._memory.counts.add("warmed_blocks", blocks, chunk.keyspace)
                self._memory.counts.add("warmed_bytes", size_bytes, chunk.keyspace)

    def _rooms(self, view: CacheView | None) -> dict[str, Room]:
        rooms: dict[str, Room] = {}
        for keyspace, bound in bounds_of(view, self._memory.name).items():
            if self._enforcement.refusal(keyspace) is not None:
                continue
            # Recent arrivals may not be counted by the memory yet.
            held_bytes = max(self._memory.held_bytes(keyspace), self._by_scope[keyspace])
            left_bytes = None if bound.limit_bytes is None else max(0, bound.limit_bytes - held_bytes)
            rooms[keyspace] = Room(left_bytes, max(0, bound.guaranteed_bytes - held_bytes))
        return rooms

    def _there(self, parts: Sequence[ChunkPart], chunk: Chunk) -> bool:
        keys = self._loads.keys(parts, [chunk])
        return all(self._memory.size(key) for key, part in zip(keys, parts, strict=True) if part.counted)

    def _is_over(self) -> bool:
        used_bytes, total_bytes = self._memory.fill()
        full = used_bytes >= (self._memory.high_share - SPARE_SHARE) * total_bytes
        return self._closed.is_set() or not self.warming or self._left_bytes <= 0 or full


def whole_chunks(hot: Iterable[Hot], needed: Collection[tuple[int, int]]) -> list[Chunk]:
    """Return the chunks of which a tier has each of the `needed` (rank, group), most recently used first. A chunk's
    last use is the earliest last use of its parts."""
    parts: dict[tuple[str, bytes], dict[tuple[int, int], float]] = defaultdict(dict)
    for one in hot:
        if (one.rank, one.group) in needed:
            parts[one.keyspace, one.chunk_hash][one.rank, one.group] = one.last_use
    whole = [
        Chunk(keyspace, chunk_hash, min(uses.values()))
        for (keyspace, chunk_hash), uses in parts.items()
        if len(uses) == len(needed)
    ]
    return sorted(whole, key=lambda chunk: chunk.last_use, reverse=True)


def share_out(chunks: Sequence[Chunk], chunk_bytes: int, budget_bytes: int, rooms: Mapping[str, Room]) -> list[Chunk]:
    """Return the chunks to load; input and result are ordered by last use, latest first.

    Each takes `chunk_bytes`. Scopes without an entry in `rooms` get nothing. Once a scope has no room left, none of its
    colder chunks is tried.
    """
    known = [chunk for chunk in chunks if chunk.keyspace in rooms]
    promised_bytes = sum(rooms[keyspace].guaranteed_bytes for keyspace in {chunk.keyspace for chunk in known})
    share = min(1.0, budget_bytes / promised_bytes) if promised_bytes else 0.0
    taken_bytes: Counter[str] = Counter()
    taken: set[int] = set()
    left_bytes = budget_bytes

    def take(number: int, chunk: Chunk, most_bytes: float) -> bool:
        nonlocal left_bytes
        room = rooms[chunk.keyspace]
        after_bytes = taken_bytes[chunk.keyspace] + chunk_bytes
        fits = room.left_bytes is None or after_bytes <= room.left_bytes
        if not fits or after_bytes > most_bytes or chunk_bytes > left_bytes:
            return False
        taken_bytes[chunk.keyspace] = after_bytes
        left_bytes -= chunk_bytes
        taken.add(number)
        return True

    for number, chunk in enumerate(known):
        take(number, chunk, rooms[chunk.keyspace].guaranteed_bytes * share)
    full: set[str] = set()
    for number, chunk in enumerate(known):
        if left_bytes < chunk_bytes:
            break
        if number not in taken and chunk.keyspace not in full and not take(number, chunk, float("inf")):
            full.add(chunk.keyspace)
    return [known[number] for number in sorted(taken)]


def batches(chunks: Sequence[Chunk], chunk_bytes: int, batch_bytes: int) -> list[Sequence[Chunk]]:
    """Divide chunks, in order, into batches of at most `batch_bytes`, but of one chunk at least."""
    size = max(1, batch_bytes // chunk_bytes)
    return [chunks[start : start + size] for start in range(0, len(chunks), size)]


def _young(one: Hot, bounds: dict[str, Bounds]) -> bool:
    bound = bounds.get(one.keyspace)
    return bound is not None and (bound.retention_s is None or one.age_s < bound.retention_s)
