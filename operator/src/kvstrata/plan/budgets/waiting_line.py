"""Admission of guarantees on one tier: pure arithmetic over claims (ADR 0013).

Admitted guarantees come first. Requests are then admitted oldest first; a younger request never overtakes an older one
that waits for the same place. A *place* is where guarantees add up: all of a shared tier, or a pod of one model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest

from kvstrata.model.refs import Key

NAMED = 3


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """The guarantee that one object requests on a tier.

    `admitted_bytes`: recorded in its status; `pending_bytes`: in a status write that is not confirmed yet.
    `is_current`: whether it was admitted for the places that it names now. If not, it keeps its charge in
    `charged_places` until its status is replaced, and is decided again. `is_eligible`: whether it may receive more than
    it holds. An ineligible request blocks no other.
    """

    holder: Key
    since: tuple[float, str]
    requested_bytes: int
    admitted_bytes: int = 0
    pending_bytes: int = 0
    places: tuple[str, ...] = ("",)
    charged_places: tuple[str, ...] = ("",)
    is_current: bool = True
    is_eligible: bool = True

    def reserved_in(self, place: str) -> int:
        return max(self.admitted_bytes, self.pending_bytes) if place in self.charged_places else 0


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
    """Objects with bytes of one place: those with most of them, and how many there are."""

    largest: tuple[tuple[Key, int], ...]
    count: int


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """The result for one tier.

    `kept` is still admitted, `granted` takes effect when status shows it, `waiting` have less than they request, oldest
    first, and `lost` are admitted guarantees that no longer fit. `capacity_bytes` and `holders` are by place.
    """

    kept: Mapping[Key, int]
    granted: Mapping[Key, int]
    waiting: tuple[Waiting, ...]
    lost: frozenset[Key]
    capacity_bytes: Mapping[str, int]
    holders: Mapping[str, Holders]

    def position(self, holder: Key) -> tuple[int, Waiting] | None:
        """Return the position of a waiting object, from 0, and the reason; None if it does not wait."""
        return next(((at, one) for at, one in enumerate(self.waiting) if one.request.holder == holder), None)


def decide_admission(requests: Iterable[CapacityRequest], capacity_bytes: Mapping[str, int]) -> WaitingLine:
    """Decide which guarantees a tier admits.

    1. Keep admitted guarantees, oldest first, as long as they fit; the rest are `lost`.
    2. Admit further requests, oldest first, if they fit beside everything that is admitted or pending.
    3. A request that does not fit waits and closes its places to younger ones, unless it exceeds the place's whole
       capacity: such a request can never be admitted and blocks no other.
    """
    ordered = sorted(requests, key=lambda request: request.since)
    kept = _still_fitting(ordered, capacity_bytes)
    reserved = {place: sum(request.reserved_in(place) for request in ordered) for place in capacity_bytes}
    granted = dict(kept)
    blocked_by: dict[str, Key] = {}
    waiting: list[Waiting] = []
    for request in ordered:
        if not request.is_eligible or request.requested_bytes <= kept[request.holder]:
            continue
        free = {p: capacity_bytes[p] - reserved[p] + request.reserved_in(p) for p in request.places}
        shortage = _shortage(request, blocked_by, free)
        if shortage is None:
            granted[request.holder] = request.requested_bytes
            for place in request.places:
                reserved[place] += max(0, request.requested_bytes - request.reserved_in(place))
            continue
        waiting.append(shortage)
        if all(request.requested_bytes <= capacity_bytes[place] for place in request.places):
            for place in request.places:
                blocked_by.setdefault(place, request.holder)
    lost = frozenset(one.holder for one in ordered if kept[one.holder] < min(one.admitted_bytes, one.requested_bytes))
    holders = {place: _holders(ordered, place) for place in {one.place for one in waiting}}
    return WaitingLine(kept, granted, tuple(waiting), lost, capacity_bytes, holders)


def _still_fitting(ordered: Iterable[CapacityRequest], capacity_bytes: Mapping[str, int]) -> dict[Key, int]:
    used = dict.fromkeys(capacity_bytes, 0)
    kept = {}
    for request in ordered:
        size = min(request.requested_bytes, request.admitted_bytes) if request.is_current else 0
        # Another object's loss must give the same result before and after it is recorded.
        if not all(used[place] + size <= capacity_bytes[place] for place in request.places):
            size = 0
        for place in request.places:
            used[place] += size
        kept[request.holder] = size
    return kept


def _shortage(request: CapacityRequest, blocked_by: Mapping[str, Key], free: Mapping[str, int]) -> Waiting | None:
    """Return why a request is not admitted, None if it is; `free` are the bytes of its places that no other object
    has reserved."""
    behind = None
    for place, free_bytes in free.items():
        if free_bytes < request.requested_bytes:
            return Waiting(request, place, max(0, free_bytes), blocked_by.get(place))
        if behind is None and place in blocked_by:
            behind = Waiting(request, place, free_bytes, blocked_by[place])
    return behind


def _holders(ordered: Iterable[CapacityRequest], place: str) -> Holders:
    held = [(one.holder, size) for one in ordered if (size := one.reserved_in(place))]
    return Holders(tuple(nlargest(NAMED, held, key=lambda one: one[1])), len(held))
