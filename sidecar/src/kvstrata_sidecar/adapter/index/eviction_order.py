"""In which order a scope's blocks go: the least recently used first (LRU), or by ARC. Pure.

ARC (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003) keeps blocks that were used
once apart from those that were used again, and remembers the names of what it evicted of either. A block that comes
back shows which of the two it should have kept more of. So blocks that are read once in passing do not displace those
that are read again and again.

Two things differ from the paper. LMCache stores first and room is made afterwards, so blocks that room has yet to be
made for do not count when it is decided what goes. And it reports each stored block as used when the request that
stored it ends: that first report is no second use. A block that came from another tier is reported twice, when its load
is done and when the request ends, and counts as used again: it was computed once, and is read now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain, islice
from typing import Protocol


class Order(Protocol):
    """The order of one scope's blocks. Keys are entered once; `use`, `drop` and `evicted` are of keys that are in."""

    def add(self, key: Hashable) -> None:
        """Enter a block that came just now."""

    def use(self, key: Hashable) -> None:
        """Note that a block was used."""

    def renew(self, key: Hashable) -> None:
        """Make a block the last of its kind to go, without that being a use of it."""

    def drop(self, key: Hashable) -> None:
        """Strike out a block that went for another reason than room."""

    def evicted(self, key: Hashable, now_s: float) -> None:
        """Strike out a block that had to make room."""

    def victims(self) -> Iterator[Hashable]:
        """Return all blocks, those that should go first first. The order must not change meanwhile."""

    def eldest(self) -> Iterator[Hashable]:
        """Return some blocks of which one is the least recently used."""

    def settle(self) -> None:
        """Note that room has been made for all that came so far."""

    def forget(self, before_s: float = float("inf")) -> None:
        """Forget the names of blocks that were evicted before a moment."""


class Recency:
    """The least recently used goes first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, key: Hashable) -> None:
        """Enter a block as the most recently used."""
        self._keys[key] = None

    def use(self, key: Hashable) -> None:
        """Make a block the most recently used."""
        self._keys.move_to_end(key)

    renew = use

    def drop(self, key: Hashable) -> None:
        """Strike a block out."""
        del self._keys[key]

    def evicted(self, key: Hashable, now_s: float) -> None:  # noqa: ARG002
        """Strike a block out."""
        del self._keys[key]

    def victims(self) -> Iterator[Hashable]:
        """Return the blocks, the least recently used first."""
        return iter(self._keys)

    def eldest(self) -> Iterator[Hashable]:
        """Return the least recently used block."""
        return islice(self._keys, 1)

    def settle(self) -> None:
        """Do nothing: the order does not depend on it."""

    def forget(self, before_s: float = float("inf")) -> None:
        """Do nothing: nothing is remembered."""


class Arc:
    """ARC's lists, each with the least recently used first; of what was evicted also when that was."""

    def __init__(self) -> None:
        self.once: OrderedDict[Hashable, None] = OrderedDict()
        self.often: OrderedDict[Hashable, None] = OrderedDict()
        self.gone_once: OrderedDict[Hashable, float] = OrderedDict()
        self.gone_often: OrderedDict[Hashable, float] = OrderedDict()
        self.target = 0.0
        self._unreported: set[Hashable] = set()
        self._came = 0
        self._came_back_often = False

    def add(self, key: Hashable) -> None:
        """Enter a block; one that is remembered was used before, and tells what should have been kept."""
        ones, others = len(self.gone_once), len(self.gone_often)
        if key in self.gone_once:
            self.target = min(float(len(self)), self.target + max(others / ones, 1.0))
            del self.gone_once[key]
            self.often[key] = None
        elif key in self.gone_often:
            self.target = max(0.0, self.target - max(ones / others, 1.0))
            del self.gone_often[key]
            self.often[key] = None
            self._came_back_often = True
        else:
            self.once[key] = None
            self._unreported.add(key)
            self._came += 1
        self._trim()

    def use(self, key: Hashable) -> None:
        """Make a block the most recently used, of those that were used again unless its storing is being reported."""
        if key in self.often:
            self.often.move_to_end(key)
        elif key in self._unreported:
            self._unreported.discard(key)
            self.once.move_to_end(key)
        else:
            del self.once[key]
            self.often[key] = None

    def renew(self, key: Hashable) -> None:
        """Make a block the most recently used of those that were used once, or again, as it was."""
        (self.often if key in self.often else self.once).move_to_end(key)

    def drop(self, key: Hashable) -> None:
        """Strike a block out and do not remember it."""
        if key in self.once:
            del self.once[key]
        else:
            del self.often[key]
        self._unreported.discard(key)

    def evicted(self, key: Hashable, now_s: float) -> None:
        """Strike a block out and remember its name."""
        (self.gone_once if key in self.once else self.gone_often)[key] = now_s
        self.drop(key)
        self._trim()

    def settle(self) -> None:
        """Note that room has been made for all that came so far."""
        self._came, self._came_back_often = 0, False

    def victims(self) -> Iterator[Hashable]:
        """Return the blocks in the order in which the paper's REPLACE takes them."""
        once, often = iter(self.once), iter(self.often)
        settled = len(self.once) - self._came
        came_back_often = self._came_back_often
        for _ in range(len(self)):
            from_once = settled > 0 and (
                settled > self.target or (came_back_often and settled == self.target)
            )  # fmt: skip
            key = next(once if from_once else often, None)
            if key is None:
                key, from_once = next(often if from_once else once), not from_once
            settled -= from_once
            came_back_often = False
            yield key

    def eldest(self) -> Iterator[Hashable]:
        """Return the least recently used block of either list."""
        return chain(islice(self.once, 1), islice(self.often, 1))

    def forget(self, before_s: float = float("inf")) -> None:
        """Forget the names of blocks that were evicted before a moment."""
        for names in (self.gone_once, self.gone_often):
            while names and next(iter(names.values())) < before_s:
                names.popitem(last=False)

    def __len__(self) -> int:
        return len(self.once) + len(self.often)

    def _trim(self) -> None:
        # With those that were used once no more names than blocks fit, with all twice as many. What fits is what is in:
        # names are only there when the scope was full.
        room = len(self)
        while self.gone_once and len(self.once) + len(self.gone_once) > room:
            self.gone_once.popitem(last=False)
        while self.gone_often and room + len(self.gone_once) + len(self.gone_often) > 2 * room:
            self.gone_often.popitem(last=False)
