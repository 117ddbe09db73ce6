"""Pinned bytes of scopes, which cannot be evicted: locked by readers or by LMCache's store loop, about to be locked by
that, or being written. They stay within the scope's limit.

The evictor removes a scope's other blocks above its limit. So a lookup finds no more blocks than it may lock, and a
store or a load gets memory for as many as pinned blocks leave; others are misses, or are not kept. A request could not
load more from slower tiers either.

For scopes without room for any block memory is only a passage to and from slower tiers. Together they pin at most
`PASSAGE_SHARE` of it.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from typing import Any

from kvstrata_sidecar.adapter.index import ScopeIndex
from kvstrata_sidecar.adapter.policy.limits import Bounds
from kvstrata_sidecar.adapter.policy.refusal import Refusal
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.upstream.pool import Pool

CHECKED_ABOVE = 64
"""Recorded locks of a scope beyond which, and beyond twice as many as the last check left, their end is checked."""

PASSAGE = ""
"""In place of a keyspace: all scopes with a limit below the size of a block."""

PASSAGE_SHARE = 0.5
"""Share of the memory that blocks of these scopes may pin."""


@dataclass(slots=True, eq=False)
class Pinned:
    """Records locks, and decides how much a scope may pin. Thread-safe. `bounds` returns the bounds of scopes, `waits`
    whether LMCache has yet to lock a new block for slower tiers. Locks end and expire without notice, so recorded ones
    are checked when they are counted, and by `check_all`."""

    _pool: Pool
    _index: ScopeIndex
    _counts: Counters
    _: KW_ONLY
    bounds: Callable[[], Mapping[str, Bounds]]
    waits: Callable[[Hashable], bool]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Never taken under LMCache's lock."""
    _locked: dict[str, dict[Any, int]] = field(default_factory=dict)
    _check_above: dict[str, int] = field(default_factory=dict)
    _noted: deque[Mapping[str, list[Any]]] = field(default_factory=deque)

    def note(self, keys: Iterable[Any]) -> None:
        """Record blocks that are locked, or wait for that. Called under LMCache's lock."""
        if limited := self._limited(keys):
            self._noted.append(limited)

    @contextmanager
    def unlockable(self, keys: Sequence[Any]) -> Iterator[set[Any]]:
        """Yield the blocks that a lookup may not lock. It locks the others within."""
        beyond: set[Any] = set()
        with self._lock:
            for group, asked in self._limited(keys).items():
                left_bytes = self._left_bytes(group, 0)
                if left_bytes is not None:
                    locked = self._locked.get(group, {})
                    sizes = self._sizes(key for key in asked if key not in locked)
                    totals = accumulate(sizes.values())
                    refused = [key for key, total in zip(sizes, totals, strict=True) if total > left_bytes]
                    self._refuse(refused)
                    beyond.update(refused)
            yield beyond

    def unwritable(self, keys: Sequence[Any], *, load: bool) -> set[Any]:
        """Return the blocks for which a store or a `load` gets no memory: of each scope the last."""
        refused: set[Any] = set()
        for group, asked in self._limited(keys).items():
            mean_bytes = self._index.mean_bytes() or self._index.last_bytes
            if not mean_bytes:
                # The size of a block is unknown until the server has its first; stored ones can go again.
                refused.update(asked[1:] if load and group != PASSAGE else ())
                continue
            with self._lock:
                left_bytes = self._left_bytes(group, len(asked) * mean_bytes)
            if left_bytes is not None:
                beyond = asked[int(max(0, left_bytes) // mean_bytes) :]
                self._refuse(beyond)
                refused.update(beyond)
        return refused

    def check_all(self) -> None:
        """Drop all recorded locks that ended, also those of scopes that ask for nothing any more."""
        with self._lock:
            self._record_noted()
            for group in list(self._locked):
                self._check(group)

    def _limited(self, keys: Iterable[Any]) -> dict[str, list[Any]]:
        """Return the blocks of scopes with a limit, by keyspace or PASSAGE."""
        bounds, found = self.bounds(), defaultdict[str, list[Any]](list)
        for key in keys:
            bound = bounds.get(key.cache_salt)
            if bound is not None and bound.limit_bytes is not None:
                found[PASSAGE if self._is_passage(bound) else key.cache_salt].append(key)
        return found

    def _is_passage(self, bound: Bounds | None) -> bool:
        limit_bytes = None if bound is None else bound.limit_bytes
        return limit_bytes is not None and limit_bytes < max(1, self._index.last_bytes)

    def _left_bytes(self, group: str, more_bytes: float) -> float | None:
        """Return the bytes that scopes may pin besides those they have pinned; None while they keep within their limit
        with `more_bytes`."""
        self._record_noted()
        bounds, staged = self.bounds(), self._pool.staged_bytes()
        keyspaces: Collection[str] = (group,)
        if group == PASSAGE:
            limit_bytes = PASSAGE_SHARE * self._pool.usage()[1]
            keyspaces = {one for one in (*staged, *self._index.keyspaces()) if self._is_passage(bounds.get(one))}
        else:
            limit_bytes = bounds.get(group, Bounds()).limit_bytes or 0
        staged_bytes = sum(staged[one] for one in keyspaces)
        scopes = (self._index.scope(one) for one in keyspaces)
        # Locks are recorded before the index has the blocks.
        used_bytes = max(sum(scope.used_bytes for scope in scopes if scope is not None), self._locked_bytes(group))
        if used_bytes + staged_bytes + more_bytes <= limit_bytes:
            return None
        self._check(group)
        return limit_bytes - staged_bytes - self._locked_bytes(group)

    def _locked_bytes(self, group: str) -> int:
        return sum(self._locked.get(group, {}).values())

    def _record_noted(self) -> None:
        while self._noted:
            for group, came in self._noted.popleft().items():
                locked = self._locked.setdefault(group, {})
                locked.update(self._sizes(came))
                if len(locked) > self._check_above.get(group, CHECKED_ABOVE):
                    self._check(group)

    def _check(self, group: str) -> None:
        """Drop the recorded locks that ended."""
        recorded = self._locked.pop(group, {}).items()
        locked = {key: size for key, size in recorded if self._pool.in_use(key) or self.waits(key)}
        self._check_above.pop(group, None)
        if locked:
            self._locked[group] = locked
            self._check_above[group] = 2 * len(locked) + CHECKED_ABOVE

    def _sizes(self, keys: Iterable[Any]) -> dict[Any, int]:
        """Return the bytes of present blocks; loans are none of their readers'."""
        return {key: self._pool.size(entry) for key in keys if (entry := self._pool.entry(key)) is not None}

    def _refuse(self, keys: Iterable[Any]) -> None:
        for keyspace, blocks in Counter(key.cache_salt for key in keys).items():
            self._counts.refuse(Refusal.OVER_BUDGET, blocks, keyspace)
