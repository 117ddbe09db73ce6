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
class CapacityRequest:
    """The guarantee that one object requests on a tier.

    `requested_bytes` is its maximum, `recorded_bytes` is admitted by its status, `pending_bytes` by a status write
    under way. `is_current`: it was admitted for its present places. If not, it is charged in all of `charged_places`
    until its status is replaced, and is decided again. `is_eligible`: it may receive more than it has; if not, it
    blocks no other.
    """

    holder: Key
    since: tuple[float, str]
    requested_bytes: int
    recorded_bytes: int = 0
    pending_bytes: int = 0
    places: tuple[str, ...] = ("",)
    charged_places: tuple[str, ...] = ("",)
    is_current: bool = True
    is_eligible: bool = True

    @property
    def reserved_bytes(self) -> int:
        return max(self.recorded_bytes, self.pending_bytes)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a request is not admitted: only `free_bytes` of `place` are not reserved for others. `behind` is an older
    request that waits for the same place."""

    request: CapacityRequest
    place: str
    free_bytes: int
    behind: Key | None = None


@dataclass(frozen=True, slots=True)
class Holders:
    largest: tuple[tuple[Key, int], ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class WaitingLine:
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
        return next(((at, one) for at, one in enumerate(self.waiting) if one.request.holder == holder), None)


def line_up(requests: Iterable[CapacityRequest], rooms: Mapping[str, int]) -> WaitingLine:
    """Decide which guarantees a tier admits; `rooms` are bytes by place.

    Admitted guarantees are kept oldest first; those that no longer fit are lost. Further requests are granted oldest
    first if they fit beside all that is recorded or pending; a request that does not fit blocks younger ones, unless it
    exceeds the whole place.
    """
    ordered = sorted(requests, key=lambda request: request.since)
    kept = _still_fitting(ordered, rooms)
    reserved = dict.fromkeys(rooms, 0)
    for request in ordered:
        for place in request.charged_places:
            reserved[place] += request.reserved_bytes
    granted = dict(kept)
    closed: dict[str, Key] = {}
    waiting: list[Waiting] = []
    for request in ordered:
        if not request.is_eligible or request.requested_bytes <= kept[request.holder]:
            continue
        why = _shortage(request, closed, reserved, rooms)
        if why is None:
            granted[request.holder] = request.requested_bytes
            for place in request.places:
                own = request.reserved_bytes if place in request.charged_places else 0
                reserved[place] += max(0, request.requested_bytes - own)
            continue
        waiting.append(why)
        if all(request.requested_bytes <= rooms[place] for place in request.places):
            for place in request.places:
                closed.setdefault(place, request.holder)
    lost = frozenset(one.holder for one in ordered if kept[one.holder] < min(one.recorded_bytes, one.requested_bytes))
    places = {one.place for one in waiting}
    return WaitingLine(
        kept, granted, tuple(waiting), lost, rooms, {place: _holders(ordered, place) for place in places}
    )


def _still_fitting(ordered: Iterable[CapacityRequest], rooms: Mapping[str, int]) -> dict[Key, int]:
    used = dict.fromkeys(rooms, 0)
    kept = {}
    for request in ordered:
        size = min(request.requested_bytes, request.recorded_bytes) if request.is_current else 0
        # Another object's loss must give the same result before and after it is recorded.
        if not all(used[place] + size <= rooms[place] for place in request.places):
            size = 0
        for place in request.places:
            used[place] += size
        kept[request.holder] = size
    return kept


def _shortage(
    request: CapacityRequest, closed: Mapping[str, Key], reserved: Mapping[str, int], rooms: Mapping[str, int]
) -> Waiting | None:
    """Return why a request is not admitted, None if it is."""
    behind = None
    for place in request.places:
        left = _free_bytes(request, place, reserved, rooms)
        if left < request.requested_bytes:
            return Waiting(request, place, max(0, left), closed.get(place))
        if behind is None and place in closed:
            behind = Waiting(request, place, left, closed[place])
    return behind


def _free_bytes(request: CapacityRequest, place: str, reserved: Mapping[str, int], rooms: Mapping[str, int]) -> int:
    """Return the bytes of a place that are not reserved for objects other than `request`."""
    own = request.reserved_bytes if place in request.charged_places else 0
    return rooms[place] - (reserved[place] - own)


def _holders(ordered: Iterable[CapacityRequest], place: str) -> Holders:
    held = [(one.holder, one.reserved_bytes) for one in ordered if one.reserved_bytes and place in one.charged_places]
    return Holders(tuple(nlargest(NAMED, held, key=lambda one: one[1])), len(held))
