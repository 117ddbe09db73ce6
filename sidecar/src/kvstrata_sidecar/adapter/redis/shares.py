"""Blocks of one lookup that are asked for in several places: under the reader's own keyspace, and under pools'.

The places may be on several servers, whose answers come one by one. What is found anywhere is a hit. What is found in a
pool and under the reader's own keyspace is there twice, as from before the pool was published: the reader's goes. Where
a pool had it is remembered for a moment, in which nobody has to ask elsewhere.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

REMEMBER_S = 10.0
MAX_REMEMBERED = 65_536


class Whereabouts:
    """In which pool readers found their chunks a moment ago. Safe to share between threads.

    A chunk that leaves the pool meanwhile is a miss for that moment, also for a reader that has a copy of its own.
    """

    def __init__(self, clock: Callable[[], float], remember_s: float = REMEMBER_S, limit: int = MAX_REMEMBERED) -> None:
        self.remember_s = remember_s
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._pools: OrderedDict[tuple[str, bytes], tuple[str, float]] = OrderedDict()

    def of(self, reader: str, member: bytes, now_s: float) -> str | None:
        """Return the keyspace of the pool that had a chunk for `reader`, None if that is not known any more."""
        known = self._pools.get((reader, member))
        return known[0] if known is not None and now_s < known[1] else None

    def note(self, found: Iterable[tuple[str, bytes, str]]) -> None:
        """Remember readers, chunks and the pools that had them."""
        until_s = self._clock() + self.remember_s
        with self._lock:
            for reader, member, pool in found:
                self._pools[reader, member] = pool, until_s
                self._pools.move_to_end((reader, member))
            while len(self._pools) > self._limit:
                self._pools.popitem(last=False)


class Shares:
    """What became of these blocks, by number. Safe to share between threads.

    `asked` counts the places of each. `twice` is told once of those that are under the reader's keyspace needlessly,
    `settled` of those that a pool has, by number, when all places have answered.
    """

    def __init__(
        self,
        asked: Counter[int],
        twice: Callable[[Sequence[int]], None],
        settled: Callable[[Mapping[int, str]], None] = lambda _: None,
    ) -> None:
        self._open = asked
        self._twice = twice
        self._settled = settled
        self._own: set[int] = set()
        self._pools: dict[int, str] = {}
        self._all = frozenset(asked)
        self._lock = threading.Lock()

    def __contains__(self, number: int) -> bool:
        return number in self._all

    def told(self, numbers: Iterable[int], hits: Iterable[int], pool: str | None) -> tuple[int, int]:
        """Learn what one place said of `numbers`, a pool's keyspace or None for the reader's own; return how many
        blocks are thereby known to be hits and misses.
        """
        found = missed = 0
        settled: dict[int, str] = {}
        with self._lock:
            before = self._own & self._pools.keys()
            for number in self._all.intersection(hits):
                if pool is None:
                    self._own.add(number)
                else:
                    self._pools.setdefault(number, pool)
            twice = sorted((self._own & self._pools.keys()) - before)
            for number in self._all.intersection(numbers):
                self._open[number] -= 1
                if not self._open[number]:
                    found += (there := number in self._own or number in self._pools)
                    missed += not there
                    if number in self._pools:
                        settled[number] = self._pools[number]
        if twice:
            self._twice(twice)
        if settled:
            self._settled(settled)
        return found, missed
