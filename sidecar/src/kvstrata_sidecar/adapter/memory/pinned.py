"""A scope's pinned bytes, which cannot be evicted: locked by readers, or being written. They stay within its limit.

The evictor removes a scope's other blocks above its limit. So a lookup finds no more blocks than it may lock, and a
store or a load gets memory for as many as locked blocks leave; others are misses, or are not kept.

Without room for any block (limit 0) memory is only a passage to and from slower tiers, which is not limited. A store of
blocks that slower tiers take passes as well, while less than the limit is locked.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from typing import Any

from kvstrata_sidecar.adapter.index.scope_index import ScopeIndex
from kvstrata_sidecar.adapter.policy.limits import Bounds
from kvstrata_sidecar.adapter.policy.refusal import Refusal
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.upstream.pool import Pool

CHECKED_ABOVE = 64
"""Recorded locks of a scope beyond which, and beyond twice as many as the last check left, their end is checked."""


@dataclass(slots=True, eq=False)
class Pinned:
    """Records locks of readers, and decides how much a scope may pin. Thread-safe. `bounds` returns the bounds of
    scopes, `passes_on` whether a slower tier admits a block. Locks expire without notice, so recorded ones are checked
    when they are counted."""

    _pool: Pool
    _index: ScopeIndex
    _counts: Counters
    _: KW_ONLY
    bounds: Callable[[], Mapping[str, Bounds]]
    passes_on: Callable[[Any], bool]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Never taken under LMCache's lock."""
    _locked: dict[str, dict[Any, int]] = field(default_factory=dict)
    _check_above: dict[str, int] = field(default_factory=dict)
    _loaded: deque[Sequence[Any]] = field(default_factory=deque)

    def loaded(self, keys: Sequence[Any]) -> None:
        """Record the locks of loaded blocks. Called under LMCache's lock."""
        self._loaded.append(tuple(keys))

    @contextmanager
    def unlockable(self, keys: Sequence[Any]) -> Iterator[set[Any]]:
        """Yield the blocks that a lookup may not lock, and record the locks of the others, which are taken within."""
        beyond: set[Any] = set()
        with self._lock:
            for keyspace, asked in self._limited(keys).items():
                left_bytes = self._left_bytes(keyspace, 0)
                if left_bytes is not None:
                    locked = self._locked.get(keyspace, {})
                    sizes = self._sizes(key for key in asked if key not in locked)
                    totals = accumulate(sizes.values())
                    refused = [key for key, total in zip(sizes, totals, strict=True) if total > left_bytes]
                    self._refuse(keyspace, len(refused))
                    beyond.update(refused)
            yield beyond
            self._record(key for key in keys if key not in beyond)

    def unwritable(self, keys: Sequence[Any], *, load: bool) -> set[Any]:
        """Return the blocks for which a store or a `load` gets no memory: of each scope the last."""
        refused: set[Any] = set()
        for keyspace, asked in self._limited(keys).items():
            mean_bytes = self._index.mean_bytes() or self._index.last_bytes
            if not mean_bytes:
                # The size of a block is unknown until the first is there; unlike loaded ones, stored ones can go again.
                refused.update(asked[1:] if load else ())
                continue
            with self._lock:
                left_bytes = self._left_bytes(keyspace, len(asked) * mean_bytes)
            if left_bytes is None or (left_bytes > 0 and not load and self.passes_on(asked[0])):
                continue
            beyond = asked[int(max(0, left_bytes) // mean_bytes) :]
            self._refuse(keyspace, len(beyond))
            refused.update(beyond)
        return refused

    def _limited(self, keys: Iterable[Any]) -> dict[str, list[Any]]:
        """Return the blocks of scopes with a limit above 0, by keyspace."""
        bounds, found = self.bounds(), defaultdict[str, list[Any]](list)
        for key in keys:
            bound = bounds.get(key.cache_salt)
            if bound is not None and bound.limit_bytes:
                found[key.cache_salt].append(key)
        return found

    def _left_bytes(self, keyspace: str, more_bytes: float) -> float | None:
        """Return the bytes that the scope may pin besides those it has pinned; None while it keeps within its limit
        with `more_bytes`."""
        limit_bytes, scope = self.bounds()[keyspace].limit_bytes or 0, self._index.scope(keyspace)
        staged_bytes = self._pool.staged_bytes()[keyspace]
        used_bytes = scope.used_bytes if scope is not None else 0
        if used_bytes + staged_bytes + more_bytes <= limit_bytes:
            return None
        while self._loaded:
            self._record(self._loaded.popleft())
        self._check(keyspace)
        return limit_bytes - staged_bytes - sum(self._locked.get(keyspace, {}).values())

    def _record(self, keys: Iterable[Any]) -> None:
        for keyspace, came in self._limited(keys).items():
            locked = self._locked.setdefault(keyspace, {})
            locked.update(self._sizes(came))
            if len(locked) > self._check_above.get(keyspace, CHECKED_ABOVE):
                self._check(keyspace)

    def _check(self, keyspace: str) -> None:
        """Drop the recorded locks that ended."""
        locked = {key: size for key, size in self._locked.pop(keyspace, {}).items() if self._pool.in_use(key)}
        self._check_above.pop(keyspace, None)
        if locked:
            self._locked[keyspace] = locked
            self._check_above[keyspace] = 2 * len(locked) + CHECKED_ABOVE

    def _sizes(self, keys: Iterable[Any]) -> dict[Any, int]:
        """Return the bytes of present blocks; loans are none of their readers'."""
        return {key: self._pool.size(entry) for key in keys if (entry := self._pool.entry(key)) is not None}

    def _refuse(self, keyspace: str, blocks: int) -> None:
        if blocks:
            self._counts.refuse(Refusal.OVER_BUDGET, blocks, keyspace)
