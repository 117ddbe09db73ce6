"""Blocks that a faster tier answers for: they are not looked for in this one, and their use counts here all the same.

LMCache asks every tier for all blocks of a prompt, also for those that it has in its memory, and waits for the slowest.
A tier that is not asked for those is not waited for either. But what pods use most they would then use without a word
to the shared tier, and its order would let go of that first: so it is told of uses, of each block once in a while.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable

from kvstrata_sidecar.adapter.redis.client.commands import Place
from kvstrata_sidecar.adapter.tier.interface import Block

HINT_INTERVAL_S = 60.0
MAX_HINTS = 65_536
"""Blocks whose use is passed on within an interval; the uses of further ones are not."""


class Hints:
    """Tells whose use is passed on: each block's at most once in an interval, and of a bounded number of blocks."""

    def __init__(self, clock: Callable[[], float], interval_s: float = HINT_INTERVAL_S, limit: int = MAX_HINTS) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._limit = limit
        self._told_s: OrderedDict[Hashable, float] = OrderedDict()

    def due(self, key: Hashable) -> bool:
        """Whether this use of a block is to be passed on; if so, further ones are not for an interval."""
        now_s, told_s = self._clock(), self._told_s
        if key in told_s and now_s < told_s[key] + self._interval_s:
            return False
        while told_s and now_s >= next(iter(told_s.values())) + self._interval_s:
            told_s.popitem(last=False)
        if len(told_s) >= self._limit:
            return False
        told_s[key] = now_s
        return True


class Shadow:
    """What faster tiers answer for. Used by the thread of lookups alone.

    `holds` says whether a faster tier has a block and keeps it for the request that is asking. `touch` passes a use on
    to the order of this tier, in which `place` finds a block; `count` counts by name, amount and keyspace. What memory
    is being `warmed` with is not used.
    """

    def __init__(
        self,
        holds: Callable[[Block], bool],
        touch: Callable[[Place], None],
        place: Callable[[Block], Place],
        count: Callable[[str, int, str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        warmed: Callable[[], Collection[Hashable]] = frozenset,
    ) -> None:
        self.holds = holds
        self._touch = touch
        self._place = place
        self._count = count
        self._hints = Hints(clock)
        self._warmed = warmed

    def used(self, blocks: Iterable[Block]) -> None:
        """Note that a lookup found these blocks in a faster tier."""
        shadowed: Counter[str] = Counter()
        hints: Counter[str] = Counter()
        warmed = self._warmed()
        for block in blocks:
            shadowed[block.keyspace] += 1
            if block.key not in warmed and self._hints.due(block.key):
                hints[block.keyspace] += 1
                self._touch(self._place(block))
        for name, amounts in (("shadowed", shadowed), ("hints", hints)):
            for keyspace, amount in amounts.items():
                self._count(name, amount, keyspace)
