"""Which blocks must be evicted now. Pure.

In this order: blocks of keyspaces outside the policy; blocks under a pool's keyspace that are not the pool's; blocks
that are too old; of a scope above its limit the least recently used; if memory is above its mark, the least recently
used of the scopes above their guarantee, down to less than one block below it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvstrata_sidecar.adapter.index.scope_index import Kept, Scope, ScopeIndex
from kvstrata_sidecar.adapter.policy.limits import Bounds


class Cause(StrEnum):
    REMOVED = "removed"
    FOREIGN = "foreign"
    RETENTION = "retention"
    LIMIT = "limit"
    ROOM = "room"


@dataclass(slots=True)
class Choice:
    """The blocks to delete, and by keyspace the bytes that should be deleted but are locked. `failed` is set by the
    deleter: keyspaces whose victims stayed. `unfinished`: more must go than one choice may take."""

    victims: dict[Hashable, Cause] = field(default_factory=dict)
    victim_bytes: int = 0
    locked: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Situation:
    """Inputs of a choice besides the index. `guarantees` are those that fit, `staged` the bytes being written for each
    keyspace, `need_bytes` the bytes above the memory's mark (negative below it). `locked` returns whether a block is in
    use now, `passing` whether other tiers have yet to take a new block: limits and room wait for that. `chunks` are the
    hashes of each pool's keyspace; other blocks in it, such as generated ones, are foreign. `most` bounds the blocks
    chosen at once, None for all."""

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


def choose(index: ScopeIndex, situation: Situation, changed: Iterable[str] | None = None) -> Choice:
    """Return the blocks to delete. With `changed`, other keyspaces are considered for room only."""
    choice = Choice()
    left: dict[str, int] = {}
    for keyspace in index.keyspaces() if changed is None else changed:
        scope = index.scope(keyspace)
        if scope is not None:
            left[keyspace] = scope.used_bytes - _bound(choice, keyspace, scope, situation)
    need_bytes = situation.need_bytes - choice.victim_bytes
    if need_bytes > 0:
        _make_room(choice, index, situation, left, need_bytes)
    return choice


def next_expiry_s(scope: Scope, bound: Bounds, now_s: float, again_s: float) -> float | None:
    """Return when a scope's next block becomes too old, None if never; `again_s` if one is already, but is in use."""
    eldest_s = scope.eldest_s()
    if eldest_s is None or bound.retention_s is None:
        return None
    expiry_s = eldest_s + bound.retention_s
    return expiry_s if expiry_s > now_s else again_s


def _bound(choice: Choice, keyspace: str, scope: Scope, situation: Situation) -> int:
    """Choose the blocks that a scope's own bounds require to go; return their bytes."""
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
    """Choose blocks in order, all or until they reach `at_least_bytes`; return the chosen bytes."""
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

    # Thousands of scopes may exist, and few lose a block: the others' blocks are not visited.
    oldest: list[tuple[int, str, Hashable, Kept | None, Iterator[tuple[Hashable, Kept]]]] = []
    surplus: dict[str, float] = {}
    for keyspace, scope in index.scopes():
        held_bytes = left.get(keyspace, scope.used_bytes) + situation.staged.get(keyspace, 0)
        surplus[keyspace] = held_bytes - situation.guarantees.get(keyspace, 0.0)
        if surplus[keyspace] > 0 and (used := scope.least_used()) is not None:
            oldest.append((used, keyspace, None, None, candidates(scope)))
    heapq.heapify(oldest)
    while need_bytes > 0 and oldest and (situation.most is None or len(choice.victims) < situation.most):
        _, keyspace, key, kept, others = heapq.heappop(oldest)
        if kept is not None:
            choice.victims[key] = Cause.ROOM
            choice.victim_bytes += kept.size_bytes
            need_bytes -= kept.size_bytes
            surplus[keyspace] -= kept.size_bytes
        if surplus[keyspace] > 0 and (block := next(others, None)) is not None:
            heapq.heappush(oldest, (block[1].used, keyspace, *block, others))
