"""Which blocks have to go now, and which will have to next. Pure.

In this order: blocks of keyspaces outside of the policy; blocks under a pool's keyspace that are none of the pool's;
blocks that are too old; of a scope that is above its limit the least recently used; and, when the memory is above its
mark, the least recently used of the scopes that are above their guarantee. So one scope's scan costs nobody else a
guaranteed block.
Memory goes by whole blocks: a scope may end up below its guarantee by less than one of its blocks.

The next to go are named so that what no slower tier has of them can be copied before: those that `choose` names when it
is asked for more than there is need for, and those whose time in memory ends soon by a shorter retention.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvstrata_sidecar.adapter.index.bounds import Bounds
from kvstrata_sidecar.adapter.index.scope_index import Kept, Scope, ScopeIndex

NEAR_SHARE = 0.05
"""How close to its mark, or to its limit, a memory or scope is that will soon evict, and how far it is looked ahead."""

AHEAD_BYTES = 64 << 20
"""How far it is looked ahead at least; but through half of a scope at most."""

SOON_S = 10.0
"""How long before its retention in memory ends a block is looked at."""

MOST = 2048
"""Blocks that are named at once for want of room, and as many for other reasons: naming them takes time."""


class Cause(StrEnum):
    """Why a block goes."""

    REMOVED = "removed"
    FOREIGN = "foreign"
    RETENTION = "retention"
    LIMIT = "limit"
    ROOM = "room"


@dataclass(slots=True)
class Choice:
    """The blocks to delete, and by keyspace the bytes that should go but are locked.

    `failed` is for whoever deletes: keyspaces of victims that did not go. `unfinished` is whether more blocks
    have to go than may be chosen at once.
    """

    victims: dict[Hashable, Cause] = field(default_factory=dict)
    victim_bytes: int = 0
    locked: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    unfinished: bool = False

    @property
    def locked_bytes(self) -> int:
        """All that is locked."""
        return sum(self.locked.values())


@dataclass(frozen=True, slots=True)
class Situation:
    """What a choice depends on besides the index.

    `guarantees` are those that can be kept, `staged` the bytes that are being written for each keyspace, `locked` tells
    whether a block is in use now, `need_bytes` is how much is above the memory's mark (or less than nothing). `chunks`
    are the hashes of each pool's keyspace: what else comes under it is foreign, such as what was generated. `passing`
    tells whether other tiers have yet to take a block that came just now: limits and room wait for that. `most` is how
    many blocks may be chosen at once, None for all that have to go.
    """

    bounds: Mapping[str, Bounds]
    guarantees: Mapping[str, float]
    staged: Mapping[str, int]
    locked: Callable[[Hashable], bool]
    now_s: float
    need_bytes: float
    chunks: Mapping[str, frozenset[bytes]] = field(default_factory=dict)
    passing: Callable[[Hashable], bool] = lambda _: False
    most: int | None = None

    def spared(self, key: Hashable) -> bool:
        """Whether a block cannot make room now."""
        return self.locked(key) or self.passing(key)


class Fill(NamedTuple):
    """How full the memory is: bytes in use, up to its mark, in all."""

    used_bytes: int
    room_bytes: float
    total_bytes: int


def choose(index: ScopeIndex, situation: Situation, changed: Iterable[str] | None = None) -> Choice:
    """Return what has to go. With `changed`, only these keyspaces are looked at for anything but room."""
    choice = Choice()
    left: dict[str, int] = {}
    keyspaces = [keyspace for keyspace, _ in index.scopes()] if changed is None else changed
    for keyspace in keyspaces:
        scope = index.scope(keyspace)
        if scope is not None:
            left[keyspace] = scope.used_bytes - _bound(choice, keyspace, scope, situation)
    need_bytes = situation.need_bytes - choice.victim_bytes
    if need_bytes > 0:
        _make_room(choice, index, situation, left, need_bytes)
    return choice


def next_expiry_s(scope: Scope, bound: Bounds, now_s: float, again_s: float) -> float | None:
    """Return when a scope's next block becomes too old, None if none ever does; `again_s` if one is already.

    That one is in use, and goes when it is let go: looking at it all the time would not help.
    """
    eldest_s = scope.eldest_s()
    if eldest_s is None or bound.retention_s is None:
        return None
    expiry_s = eldest_s + bound.retention_s
    return expiry_s if expiry_s > now_s else again_s


def next_victims(
    index: ScopeIndex,
    bounds: Mapping[str, Bounds],
    guarantees: Mapping[str, float],
    fill: Fill,
    leaving: Mapping[str, int],
    spared: Callable[[Hashable], bool],
    now_s: float,
) -> dict[Hashable, Cause]:
    """Return the blocks that go next, the first of each cause first.

    `leaving` are the bytes, by keyspace, of blocks that are being copied already; `spared` tells them and whatever else
    is in use.
    """
    tight = {
        keyspace: bound
        for keyspace, scope in index.scopes()
        if keyspace in bounds
        and (bound := _tightened(bounds[keyspace], scope.used_bytes, scope.eldest_s(), leaving.get(keyspace, 0), now_s))
    }
    named: dict[Hashable, Cause] = {}
    if tight:
        named |= choose(index, Situation(tight, {}, {}, spared, now_s, 0.0, most=MOST), tight).victims
    if fill.used_bytes > fill.room_bytes - NEAR_SHARE * fill.total_bytes:
        ahead_bytes = max(AHEAD_BYTES, NEAR_SHARE * fill.total_bytes) - sum(leaving.values())
        need_bytes = max(0.0, fill.used_bytes - fill.room_bytes) + ahead_bytes
        room = choose(index, Situation(bounds, guarantees, {}, spared, now_s, need_bytes, most=MOST), ())
        named |= {key: cause for key, cause in room.victims.items() if key not in named}
    return named


def _bound(choice: Choice, keyspace: str, scope: Scope, situation: Situation) -> int:
    """Choose what a scope's own bounds demand; return its bytes."""
    bound = situation.bounds.get(keyspace)
    if bound is None:
        return _take(choice, situation, scope.blocks.items(), Cause.REMOVED, situation.locked)
    taken_bytes = 0
    chunks = situation.chunks.get(keyspace)
    if chunks is not None:
        foreign = ((key, kept) for key, kept in scope.blocks.items() if getattr(key, "chunk_hash", None) not in chunks)
        taken_bytes += _take(choice, situation, foreign, Cause.FOREIGN, situation.locked)
    if bound.retention_s is not None:
        old = scope.computed_before(situation.now_s - bound.retention_s, situation.most)
        blocks = ((key, scope.blocks[key]) for key in old)
        taken_bytes += _take(choice, situation, blocks, Cause.RETENTION, situation.locked)
        choice.unfinished |= len(old) == situation.most
    if bound.limit_bytes is not None:
        excess_bytes = scope.used_bytes + situation.staged.get(keyspace, 0) - taken_bytes - bound.limit_bytes
        if excess_bytes > 0:
            taken_bytes += _take(choice, situation, scope.blocks.items(), Cause.LIMIT, situation.spared, excess_bytes)
    return taken_bytes


def _take(
    choice: Choice,
    situation: Situation,
    blocks: Iterable[tuple[Hashable, Kept]],
    cause: Cause,
    locked: Callable[[Hashable], bool],
    at_least_bytes: float | None = None,
) -> int:
    """Choose blocks in their order, all or until they make up `at_least_bytes`; return the bytes that were chosen."""
    taken_bytes = 0
    for key, kept in blocks:
        if at_least_bytes is not None and taken_bytes >= at_least_bytes:
            break
        if key in choice.victims:
            continue
        if situation.most is not None and len(choice.victims) >= situation.most:
            choice.unfinished = True
            break
        if locked(key):
            choice.locked[kept.keyspace] = choice.locked.get(kept.keyspace, 0) + kept.size_bytes
            continue
        choice.victims[key] = cause
        taken_bytes += kept.size_bytes
    choice.victim_bytes += taken_bytes
    return taken_bytes


def _make_room(
    choice: Choice, index: ScopeIndex, situation: Situation, left: Mapping[str, int], need_bytes: float
) -> None:
    def candidates(scope: Scope) -> Iterator[tuple[Hashable, Kept]]:
        for key, kept in scope.blocks.items():
            if key not in choice.victims and not situation.spared(key):
                yield key, kept

    # Scopes may be thousands, and few of them lose a block: the others' blocks are not looked at.
    oldest: list[tuple[int, str, Hashable, Kept | None]] = []
    oldest += [
        (used, keyspace, None, None) for keyspace, scope in index.scopes() if (used := scope.least_used()) is not None
    ]
    heapq.heapify(oldest)
    orders: dict[str, Iterator[tuple[Hashable, Kept]]] = {}
    surplus: dict[str, float] = {}

    def offer(keyspace: str) -> None:
        if surplus[keyspace] > 0 and (block := next(orders[keyspace], None)) is not None:
            heapq.heappush(oldest, (block[1].used, keyspace, *block))

    def begin(keyspace: str) -> None:
        scope = index.scope(keyspace)
        if scope is not None:
            held_bytes = left.get(keyspace, scope.used_bytes) + situation.staged.get(keyspace, 0)
            surplus[keyspace] = held_bytes - situation.guarantees.get(keyspace, 0.0)
            orders[keyspace] = candidates(scope)
            offer(keyspace)

    while need_bytes > 0 and oldest and (situation.most is None or len(choice.victims) < situation.most):
        _, keyspace, key, kept = heapq.heappop(oldest)
        if kept is None:
            begin(keyspace)
            continue
        choice.victims[key] = Cause.ROOM
        choice.victim_bytes += kept.size_bytes
        need_bytes -= kept.size_bytes
        surplus[keyspace] -= kept.size_bytes
        offer(keyspace)


def _tightened(
    bound: Bounds, used_bytes: int, eldest_s: float | None, leaving_bytes: int, now_s: float
) -> Bounds | None:
    """Return bounds under which a scope's next victims would have to go now, None if none is near."""
    limit_bytes = retention_s = None
    # What may keep nothing at all is taken up for the slower tiers as it comes.
    if bound.limit_bytes and used_bytes > (1 - NEAR_SHARE) * bound.limit_bytes:
        most_bytes = max(1, bound.limit_bytes // 2)
        ahead_bytes = min(most_bytes, max(AHEAD_BYTES, int(NEAR_SHARE * bound.limit_bytes))) - leaving_bytes
        limit_bytes = used_bytes - ahead_bytes if ahead_bytes > 0 else None
    if bound.retention_s is not None and eldest_s is not None and eldest_s + bound.retention_s - SOON_S <= now_s:
        retention_s = max(0, bound.retention_s - int(SOON_S))
    return None if limit_bytes is None and retention_s is None else Bounds(limit_bytes, 0, retention_s)
