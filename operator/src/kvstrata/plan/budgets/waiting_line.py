"""Who may have which guarantee of one tier: pure arithmetic over claims, without the objects behind them.

What was admitted stands before what asks; who asks is served by age, and nobody is passed by a younger one that wants
room in the same place (ADR 0026). A *place* is where guarantees add up: all of a tier that pods share, or a pod of one
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest

from kvstrata.model.refs import Key

NAMED = 3
"""How many of those that hold a place a sentence names."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One object's part in the line for a tier.

    `wanted_bytes` is what it may have at most, `recorded_bytes` what status says is admitted, `pending_bytes` what a
    write that is under way will say. `stands` is whether that was admitted for the places that it is about now: if not,
    it is charged in all `charged` until the record is replaced, and asks anew. `asks` is whether it may be given more
    than it has; who may not keeps nobody waiting.
    """

    holder: Key
    since: tuple[float, str]
    wanted_bytes: int
    recorded_bytes: int = 0
    pending_bytes: int = 0
    places: tuple[str, ...] = ("",)
    charged: tuple[str, ...] = ("",)
    stands: bool = True
    asks: bool = True

    @property
    def reserved_bytes(self) -> int:
        """What others must leave alone."""
        return max(self.recorded_bytes, self.pending_bytes)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why an object has not what it asks for: `free_bytes` of `place` are not reserved for others.

    `behind` is an older one that waits for the same place.
    """

    ask: Ask
    place: str
    free_bytes: int
    behind: Key | None = None


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds a place: the largest with what is reserved for them, and how many there are."""

    largest: tuple[tuple[Key, int], ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """What follows for one tier.

    `kept` is what stands of what was admitted, `granted` what each is to have as soon as its status says so, `waiting`
    those that have less than they ask for, eldest first, and `lost` those whose record does not stand. `rooms` and
    `holders` are by place.
    """

    kept: Mapping[Key, int]
    granted: Mapping[Key, int]
    waiting: tuple[Waiting, ...]
    lost: frozenset[Key]
    rooms: Mapping[str, int]
    holders: Mapping[str, Holders] = field(default_factory=dict)

    def position(self, holder: Key) -> tuple[int, Waiting] | None:
        """Return the place in the line of one that waits, from 0, and why; None for who does not wait."""
        return next(((at, one) for at, one in enumerate(self.waiting) if one.ask.holder == holder), None)


def line_up(asks: Iterable[Ask], rooms: Mapping[str, int]) -> Line:
    """Return who has what of a tier whose places have `rooms` bytes.

    Of what was admitted, the eldest is kept first, and who does not fit any more beside those loses its own. Then who
    asks for more gets it, eldest first, if it fits beside all that is recorded or under way; where it does not, the
    younger ones wait as well. One that would not fit even alone holds up nobody.
    """
    ordered = sorted(asks, key=lambda ask: ask.since)
    kept = _kept(ordered, rooms)
    reserved = dict.fromkeys(rooms, 0)
    for ask in ordered:
        for place in ask.charged:
            reserved[place] += ask.reserved_bytes
    granted = dict(kept)
    closed: dict[str, Key] = {}
    waiting: list[Waiting] = []
    for ask in ordered:
        if not ask.asks or ask.wanted_bytes <= kept[ask.holder]:
            continue
        why = _why_not(ask, closed, reserved, rooms)
        if why is None:
            granted[ask.holder] = ask.wanted_bytes
            for place in ask.places:
                own = ask.reserved_bytes if place in ask.charged else 0
                reserved[place] += max(0, ask.wanted_bytes - own)
            continue
        waiting.append(why)
        if all(ask.wanted_bytes <= rooms[place] for place in ask.places):
            for place in ask.places:
                closed.setdefault(place, ask.holder)
    lost = frozenset(ask.holder for ask in ordered if kept[ask.holder] < min(ask.recorded_bytes, ask.wanted_bytes))
    places = {one.place for one in waiting}
    return Line(kept, granted, tuple(waiting), lost, rooms, {place: _holders(ordered, place) for place in places})


def _kept(ordered: Iterable[Ask], rooms: Mapping[str, int]) -> dict[Key, int]:
    used = dict.fromkeys(rooms, 0)
    kept = {}
    for ask in ordered:
        size = min(ask.wanted_bytes, ask.recorded_bytes) if ask.stands else 0
        # What is kept beside one that lost its own must not depend on whether that was written down before.
        if not all(used[place] + size <= rooms[place] for place in ask.places):
            size = 0
        for place in ask.places:
            used[place] += size
        kept[ask.holder] = size
    return kept


def _why_not(
    ask: Ask, closed: Mapping[str, Key], reserved: Mapping[str, int], rooms: Mapping[str, int]
) -> Waiting | None:
    """Return why one that asks for more does not get it, None if it does."""
    behind = None
    for place in ask.places:
        left = _left(ask, place, reserved, rooms)
        if left < ask.wanted_bytes:
            return Waiting(ask, place, max(0, left), closed.get(place))
        if behind is None and place in closed:
            behind = Waiting(ask, place, left, closed[place])
    return behind


def _left(ask: Ask, place: str, reserved: Mapping[str, int], rooms: Mapping[str, int]) -> int:
    """Return what of a place is not reserved for others than `ask`."""
    own = ask.reserved_bytes if place in ask.charged else 0
    return rooms[place] - (reserved[place] - own)


def _holders(ordered: Iterable[Ask], place: str) -> Holders:
    held = [(ask.holder, ask.reserved_bytes) for ask in ordered if ask.reserved_bytes and place in ask.charged]
    return Holders(tuple(nlargest(NAMED, held, key=lambda one: one[1])), len(held))
