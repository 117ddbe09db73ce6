"""Blocks of pools that the memory has and a tier behind it has lost, or never took: they are offered to it again.

LMCache stores a block in other tiers once, when it was written. A request that computes a pool's tokens anew finds them
in memory and writes nothing, so what a shared tier lost would never come back there.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

PATIENCE_S = 10.0
"""How long a block is lacking before it is offered: what was just written is on its way."""

MAX_POOLS = 128
"""Pools' keyspaces of which it is remembered since when they lack what."""


class Offers:
    """Offers what is lacking whenever somebody asks what tiers hold. Safe to share between threads.

    `offer` has LMCache store blocks that are in its memory in all tiers behind it; `count` is told how many.
    """

    def __init__(
        self,
        offer: Callable[[list[Hashable]], object],
        count: Callable[[str, int, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._offer = offer
        self._count = count
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s: OrderedDict[str, dict[Hashable, float]] = OrderedDict()

    def lacking(self, keyspace: str, keys: Sequence[Hashable]) -> None:
        """Learn what memory has of a pool now and another tier of the pool has not."""
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
