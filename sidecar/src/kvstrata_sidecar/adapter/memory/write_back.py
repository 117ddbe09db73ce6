"""Blocks that slower tiers have yet to copy.

LMCache writes a new block to all tiers; until that begins, the block must not be evicted (`PendingWriteBack`).

A pool's blocks lost by a shared tier would not come back: a request that needs them finds them in memory and writes
nothing. Such blocks are offered to the tier again (`Offers`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

GRACE_S = 0.25
"""How long a block waits for LMCache's own copy to begin."""

PATIENCE_S = 10.0
"""How long a block is lacking before it is offered: a new block is still on its way."""

MAX_POOLS = 128
"""Pools' keyspaces with recorded lacking blocks."""


class PendingWriteBack:
    """Written blocks that LMCache has not locked yet for its copies to other tiers. `came` and `taken` never wait.
    Thread-safe.

    LMCache first reports a written block, and then locks it to store it in other tiers. A block that must go at once,
    as in a scope without room in memory, could be deleted in between and reach no tier. `passes_on`: whether a tier
    behind the memory admits a block.
    """

    def __init__(self, passes_on: Callable[[Any], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._passes_on = passes_on
        self._clock = clock
        self._lock = threading.Lock()
        self._came_s: dict[Hashable, float] = {}

    def came(self, keys: Iterable[Hashable]) -> None:
        if passing := [key for key in keys if self._passes_on(key)]:
            now_s = self._clock()
            with self._lock:
                for key in passing:
                    # Reinsert at the end: the order is that of arrival.
                    self._came_s.pop(key, None)
                    self._came_s[key] = now_s

    def taken(self, keys: Iterable[Hashable]) -> None:
        """Record that blocks were locked, by any reader: a locked block cannot be deleted."""
        if self._came_s:
            with self._lock:
                for key in keys:
                    self._came_s.pop(key, None)

    def waits(self, key: Hashable, now_s: float) -> bool:
        """Whether LMCache's copy of a block has not begun."""
        came_s = self._came_s.get(key)
        return came_s is not None and now_s < came_s + GRACE_S

    def forget(self, now_s: float) -> None:
        """Drop blocks whose copy did not begin in time."""
        if self._came_s:
            with self._lock:
                while self._came_s:
                    key, came_s = next(iter(self._came_s.items()))
                    if now_s < came_s + GRACE_S:
                        break
                    del self._came_s[key]

    def __bool__(self) -> bool:
        return bool(self._came_s)


@dataclass(slots=True, eq=False)
class Offers:
    """Offers lacking blocks whenever a caller asks for the holdings of tiers. Thread-safe. `offer` has LMCache store
    blocks of its memory in all tiers behind it."""

    _offer: Callable[[list[Hashable]], object]
    _count: Callable[[str, int, str], None]
    _clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _since_s: OrderedDict[str, dict[Hashable, float]] = field(default_factory=OrderedDict)

    def lacking(self, keyspace: str, keys: Sequence[Hashable]) -> None:
        """Record a pool's blocks that are in memory and not in another of its tiers."""
        with self._lock:
            before, now_s = self._since_s.pop(keyspace, {}), self._clock()
            since_s = {key: before.get(key, now_s) for key in keys}
            due = [key for key, moment_s in since_s.items() if now_s >= moment_s + PATIENCE_S]
            since_s.update(dict.fromkeys(due, now_s))
            if since_s:
                self._since_s[keyspace] = since_s
            if len(self._since_s) > MAX_POOLS:
                self._since_s.popitem(last=False)
        if due:
            self._count("offered_again", len(due), keyspace)
            self._offer(due)
