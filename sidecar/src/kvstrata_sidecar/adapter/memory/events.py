"""Events of LMCache's memory: queued by its listener, entered into the index by the evictor's turns.

Missed events are found by comparing the index with LMCache's own tables, a piece at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

from kvstrata_sidecar.adapter.index.scope_index import ScopeIndex
from kvstrata_sidecar.adapter.memory.lmcache_memory import Pool

MAX_EVENTS = 1_000_000
"""Waiting events; beyond, the index is compared with LMCache's tables."""

MAX_KNOWN_AGES = 65_536

COMPARE_S = 60.0

COMPARED_AT_ONCE = 2048
"""Blocks compared in one turn: events wait meanwhile."""


class MemoryEvent(Enum):
    WRITTEN = auto()
    LOADED = auto()
    USED = auto()
    RELEASED = auto()
    DELETED = auto()
    RESERVED = auto()
    INHERITED = auto()
    ORDERED = auto()


class EventQueue:
    """Events in order. `lost`: some did not fit, reset when a comparison begins. `add` is thread-safe, never waits."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[MemoryEvent, Sequence[Any]]] = deque()
        self.lost = False

    def add(self, what: MemoryEvent, about: Sequence[Any]) -> None:
        """Add an event and its keys; for INHERITED a key and its moment."""
        if len(self._waiting) < MAX_EVENTS:
            self._waiting.append((what, about))
        else:
            self.lost = True

    def take(self) -> Iterator[tuple[MemoryEvent, Sequence[Any]]]:
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()


class Arrivals:
    """When the tokens of arriving blocks were computed, on one clock.

    `announce` and `computed_s` are thread-safe. `follow` and `enter` are called from one thread, in the order of
    events: a block of the same name may be leaving, and the age is that of the next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._announced: dict[Hashable, float] = {}
        self._next: dict[Hashable, float] = {}

    def announce(self, key: Hashable, computed_s: float) -> None:
        """Record a block whose load is about to be answered."""
        with self._lock:
            _put(self._announced, key, computed_s)

    def computed_s(self, key: Hashable) -> float | None:
        """Return what was announced and has not been entered."""
        with self._lock:
            return self._announced.get(key)

    def follow(self, key: Hashable, computed_s: float) -> None:
        _put(self._next, key, computed_s)

    def enter(self, key: Hashable, *, out_of_order: bool = False) -> float | None:
        """Return the announced moment of a block being entered, None without one. `out_of_order`: the order of events
        is unknown, so any announcement counts."""
        computed_s = self._next.pop(key, None)
        with self._lock:
            announced_s = self._announced.get(key)
            if computed_s is None and out_of_order:
                computed_s = announced_s
            if computed_s is not None and announced_s == computed_s:
                del self._announced[key]
        return computed_s


def _put(ages: dict[Hashable, float], key: Hashable, computed_s: float) -> None:
    if len(ages) >= MAX_KNOWN_AGES:
        del ages[next(iter(ages))]
    ages[key] = computed_s


class IndexUpdater:
    """Keeps `index` in step with `pool`. `gone` is called for every block that left the memory, `promoted` with
    keyspace and bytes of every one that came from another tier to stay.

    `inherit_age` and `age_s` may be called from any thread, the rest from the evictor's turns only.
    """

    def __init__(
        self,
        pool: Pool,
        index: ScopeIndex,
        events: EventQueue,
        *,
        gone: Callable[[Hashable], None],
        promoted: Callable[[str, int], None],
        used: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._index = index
        self._events = events
        self._gone = gone
        self._promoted = promoted
        self._used = used
        self._clock = clock
        self._arrivals = Arrivals()
        self._to_compare: list[Hashable] = []
        self._compared_s = clock()

    @property
    def comparing(self) -> bool:
        return bool(self._to_compare)

    def inherit_age(self, key: Hashable, age_s: float) -> None:
        """Record the age of the tokens of a block being loaded from another tier. Called before the load is answered; a
        block without a recorded age counts as computed when it was written."""
        computed_s = self._clock() - max(0.0, age_s)
        self._arrivals.announce(key, computed_s)
        # In event order: a block of this name may be leaving, and the age is that of the next.
        self._events.add(MemoryEvent.INHERITED, (key, computed_s))

    def age_s(self, key: Hashable) -> float:
        """Return the age of a block's tokens, 0 if unknown."""
        kept = self._index.find(key)
        coming_s = self._arrivals.computed_s(key)
        # A block loaded again may go to another tier before its arrival is entered.
        known = [
            moment_s for moment_s in (kept.computed_s if kept is not None else None, coming_s) if moment_s is not None
        ]
        return max(0.0, self._clock() - min(known)) if known else 0.0

    def read_events(self, now_s: float) -> set[str]:
        """Enter queued events; return the keyspaces with new or possibly released blocks."""
        changed: set[str] = set()
        index = self._index
        for what, keys in self._events.take():
            if what is MemoryEvent.INHERITED:
                self._arrivals.follow(*keys)
                continue
            if what is MemoryEvent.DELETED:
                for key in keys:
                    index.remove(key)
                    self._left(key)
                continue
            if what is MemoryEvent.USED:
                # As LMCache's LRU: the last blocks of a prompt must be evicted first, or the rest could not be found.
                for key in reversed(keys):
                    index.touch(key)
                    if (kept := index.find(key)) is not None:
                        self._used(now_s - kept.computed_s)
                continue
            if what is MemoryEvent.ORDERED:
                for key in reversed(keys):
                    index.touch(key)
                continue
            changed.update(key.cache_salt for key in keys)
            if what in (MemoryEvent.WRITTEN, MemoryEvent.LOADED):
                for key in reversed(keys):
                    self._enter(key, now_s)
            if what is MemoryEvent.LOADED:
                self._count_promoted(keys)
        return changed

    def compare(self, now_s: float) -> set[str]:
        """Compare a piece of the index with LMCache's tables and correct it; return the keyspaces that differed."""
        if self._events.lost or now_s - self._compared_s >= COMPARE_S:
            self._compared_s, self._events.lost = now_s, False
            self._to_compare = [*self._index, *(key for key, _ in self._pool.resident())]
        changed: set[str] = set()
        for key in self._to_compare[-COMPARED_AT_ONCE:]:
            known, there = self._index.find(key) is not None, self._pool.entry(key) is not None
            if known and not there:
                self._index.remove(key)
                self._left(key)
            elif there and not known:
                self._enter(key, now_s)
            if known is not there:
                changed.add(key.cache_salt)  # type: ignore[attr-defined]
        del self._to_compare[-COMPARED_AT_ONCE:]
        return changed

    def _enter(self, key: Any, now_s: float) -> None:
        computed_s = self._arrivals.enter(key, out_of_order=self.comparing)
        entry = self._pool.entry(key)
        if entry is not None:
            age_from_s = now_s if computed_s is None else computed_s
            self._index.add(key, key.cache_salt, self._pool.size(entry), age_from_s)

    def _count_promoted(self, keys: Sequence[Any]) -> None:
        for key in keys:
            entry = self._pool.entry(key)
            if entry is not None and not entry.is_temporary:
                self._promoted(key.cache_salt, self._pool.size(entry))

    def _left(self, key: Hashable) -> None:
        if self._pool.entry(key) is None and not self._pool.coming(key):
            self._gone(key)
