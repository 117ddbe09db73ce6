"""Admission of guarantees on one tier: pure arithmetic over claims (ADR 0026).

Admitted guarantees come first. Requests are then admitted oldest first; a younger request never overtakes an older one
that waits for the same place. A *place* is where guarantees add up: all of a shared tier, or a pod of one model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest

from kvstrata.model.refs import Key

NAMED = 3


@dataclass(frozen=True, slots=True)
class Ask:
    """The guarantee that one object requests on a tier.

    `wanted_bytes` is its maximum, `recorded_bytes` is admitted by its status, `pending_bytes` by a status write under
    way. `stands`: it was admitted for its present places. If not, it is charged in all of `charged` until its status is
    replaced, and is decided again. `asks`: it may receive more than it has; if not, it blocks no other.
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
        return max(self.recorded_bytes, self.pending_bytes)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a request is not admitted: only `free_bytes` of `place` are not reserved for others. `behind` is an older
    request that waits for the same place."""

    ask: Ask
    place: str
    free_bytes: int
    behind: Key | None = None


@dataclass(frozen=True, slots=True)
class Holders:
    largest: tuple[tuple[Key, int], ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """The result for one tier.

    `kept` is still admitted, `granted` takes effect when status says so, `waiting` have less than they request, oldest
    first, and `lost` are records that no longer fit. `rooms` (bytes) and `holders` are by place.
    """

    kept: Mapping[Key, int]
    granted: Mapping[Key, int]
    waiting: tuple[Waiting, ...]
    lost: frozenset[Key]
    rooms: Mapping[str, int]
    holders: Mapping[str, Holders] = field(default_factory=dict)

    def position(self, holder: Key) -> tuple[int, Waiting] | None:
        """Return the position of a waiting object, from 0, and the reason; None if it does not wait."""
        return next(((at, one) for at, one in enumerate(self.waiting) if one.ask.holder == holder), None)


def line_up(asks: Iterable[Ask], rooms: Mapping[str, int]) -> Line:
    """Decide which guarantees a tier admits; `rooms` are bytes by place.

    Admitted guarantees are kept oldest first; those that no longer fit are lost. Further requests are granted oldest
    first if they fit beside all that is recorded or pending; a request that does not fit blocks younger ones, unless it
    exceeds the whole place.
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
        # Another object's loss must give the same result before and after it is recorded.
        if not all(used[place] + size <= rooms[place] for place in ask.places):
            size = 0
        for place in ask.places:
            used[place] += size
        kept[ask.holder] = size
    return kept


def _why_not(
    ask: Ask, closed: Mapping[str, Key], reserved: Mapping[str, int], rooms: Mapping[str, int]
) -> Waiting | None:
    """Return why a request is not admitted, None if it is."""
    behind = None
    for place in ask.places:
        left = _left(ask, place, reserved, rooms)
        if left < ask.wanted_bytes:
            return Waiting(ask, place, max(0, left), closed.get(place))
        if behind is None and place in closed:
            behind = Waiting(ask, place, left, closed[place])
    return behind


def _left(ask: Ask, place: str, reserved: Mapping[str, int], rooms: Mapping[str, int]) -> int:
    """Return the bytes of a place that are not reserved for objects other than `ask`."""
    own = ask.reserved_bytes if place in ask.charged else 0
    return rooms[place] - (reserved[place] - own)


def _holders(ordered: Iterable[Ask], place: str) -> Holders:
    held = [(ask.holder, ask.reserved_bytes) for ask in ordered if ask.reserved_bytes and place in ask.charged]
    return Holders(tuple(nlargest(NAMED, held, key=lambda one: one[1])), len(held))
