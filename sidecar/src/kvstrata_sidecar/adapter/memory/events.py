"""LMCache's events: queued by its listener, entered into the index by the evictor's turns.

Missed events are found by comparing the index with LMCache's own tables, a piece at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import Any

from kvstrata_sidecar.adapter.index import ScopeIndex
from kvstrata_sidecar.adapter.tier.counts import HIT, Counters
from kvstrata_sidecar.upstream.pool import Pool

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


@dataclass(eq=False)
class Events:
    """Keeps `index` in step with `pool`. `left` is called for every block that left the memory. `read` and `compare`
    belong to the evictor's turns. The rest is thread-safe and never waits: LMCache's listener runs under its global
    lock."""

    _pool: Pool
    _index: ScopeIndex
    _counts: Counters
    _: KW_ONLY
    left: Callable[[Hashable], None]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._waiting: deque[tuple[MemoryEvent, Sequence[Any]]] = deque()
        self._lost = False
        self._lock = threading.Lock()
        self._announced: dict[Hashable, float] = {}
        self._next: dict[Hashable, float] = {}
        self._to_compare: list[Hashable] = []
        self._compared_s = self.clock()

    @property
    def comparing(self) -> bool:
        return bool(self._to_compare)

    def add(self, event: MemoryEvent, keys: Sequence[Any]) -> None:
        """Queue an event and its keys; for INHERITED a key and its moment."""
        if len(self._waiting) < MAX_EVENTS:
            self._waiting.append((event, tuple(keys)))
        else:
            self._lost = True

    def inherit_age(self, key: Hashable, age_s: float) -> None:
        """Record the age of the tokens of a block being loaded from another tier. Called before the load is answered; a
        block without a recorded age counts as computed when it was written."""
        computed_s = self.clock() - max(0.0, age_s)
        with self._lock:
            _put(self._announced, key, computed_s)
        # In event order: a block of this name may be leaving, and the age is that of the next.
        self.add(MemoryEvent.INHERITED, (key, computed_s))

    def age_s(self, key: Hashable) -> float:
        """Return the age of a block's tokens, 0 if unknown."""
        kept = self._index.find(key)
        with self._lock:
            computed_s = self._announced.get(key)
        # A block loaded again may go to another tier before its arrival is entered.
        if kept is not None:
            computed_s = kept.computed_s if computed_s is None else min(computed_s, kept.computed_s)
        return 0.0 if computed_s is None else max(0.0, self.clock() - computed_s)

    def read(self, now_s: float, scope_of: Callable[[str], str]) -> set[str]:
        """Enter queued events; return the keyspaces with new or possibly released blocks. `scope_of` returns the scope
        for which a keyspace's blocks that came from another tier to stay are counted."""
        changed: set[str] = set()
        for _ in range(len(self._waiting)):
            event, keys = self._waiting.popleft()
            if event is MemoryEvent.INHERITED:
                _put(self._next, *keys)
            elif event is MemoryEvent.DELETED:
                for key in keys:
                    self._remove(key)
            elif event is MemoryEvent.USED:
                # As LMCache's LRU: the last blocks of a prompt must be evicted first, or the rest could not be found.
                for key in reversed(keys):
                    kept = self._index.touch(key)
                    if kept is not None:
                        self._counts.age(HIT, now_s - kept.computed_s)
            else:
                changed.update(key.cache_salt for key in keys)
                if event is MemoryEvent.WRITTEN or event is MemoryEvent.LOADED:
                    for key in reversed(keys):
                        entry = self._enter(key, now_s)
                        if event is MemoryEvent.LOADED and entry is not None and not entry.is_temporary:
                            size_bytes = self._pool.size(entry)
                            self._counts.add_all(scope_of(key.cache_salt), promoted_blocks=1, promoted_bytes=size_bytes)
        return changed

    def compare(self, now_s: float) -> set[str]:
        """Compare a piece of the index with LMCache's tables and correct it; return the keyspaces that differed."""
        if self._lost or now_s - self._compared_s >= COMPARE_S:
            self._compared_s, self._lost = now_s, False
            self._to_compare = [*self._index, *(key for key, _ in self._pool.resident())]
        changed: set[str] = set()
        for key in self._to_compare[-COMPARED_AT_ONCE:]:
            known, there = self._index.find(key) is not None, self._pool.entry(key) is not None
            if known and not there:
                self._remove(key)
            elif there and not known:
                self._enter(key, now_s)
            if known is not there:
                changed.add(key.cache_salt)  # type: ignore[attr-defined]
        del self._to_compare[-COMPARED_AT_ONCE:]
        return changed

    def _enter(self, key: Any, now_s: float) -> Any:
        """Add a block to the index, if LMCache still has it; return its entry, None without one."""
        computed_s = self._next.pop(key, None)
        with self._lock:
            announced_s = self._announced.get(key)
            if computed_s is None and self.comparing:
                # The order of events is unknown, so any announcement counts.
                computed_s = announced_s
            if computed_s is not None and announced_s == computed_s:
                del self._announced[key]
        entry = self._pool.entry(key)
        if entry is not None:
            self._index.add(key, key.cache_salt, self._pool.size(entry), now_s if computed_s is None else computed_s)
        return entry

    def _remove(self, key: Hashable) -> None:
        self._index.remove(key)
        if self._pool.entry(key) is None and not self._pool.coming(key):
            self.left(key)


def _put(ages: dict[Hashable, float], key: Hashable, computed_s: float) -> None:
    if len(ages) >= MAX_KNOWN_AGES:
        del ages[next(iter(ages))]
    ages[key] = computed_s
