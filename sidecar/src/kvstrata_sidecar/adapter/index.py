"""Index of blocks by scope, and eviction from it: shared by memory and files. Pure.

Blocks are found by key, and for each keyspace by last use and by age; scopes have times at which they must be visited
even if nothing happens in them.

Blocks are evicted in this order: those of keyspaces outside the policy; those under a pool's keyspace that are not the
pool's; those that are too old; of a scope above its limit the least recently used; if memory is above its mark, the
least recently used of the scopes above their guarantee, down to less than one block below it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata_sidecar.adapter.policy.limits import Bounds

COMPACT_ABOVE = 64
"""Stale entries that an order by age may hold in addition to as many as it has blocks."""


@dataclass(slots=True, eq=False)
class Kept:
    """One block: bytes with padding, computation on its owner's clock, last use as a count over all blocks. One that
    `is_unreadable` here, as later versions write it, is never found."""

    keyspace: str
    size_bytes: int
    computed_s: float
    used: int
    is_unreadable: bool = False


@dataclass(slots=True)
class Scope:
    """One keyspace's blocks, the least recently used first."""

    blocks: OrderedDict[Hashable, Kept] = field(default_factory=OrderedDict)
    used_bytes: int = 0
    _by_age: list[tuple[float, int, Hashable, Kept]] = field(default_factory=list)

    def add(self, key: Hashable, kept: Kept) -> None:
        self.blocks[key] = kept
        self.used_bytes += kept.size_bytes
        heapq.heappush(self._by_age, (kept.computed_s, kept.used, key, kept))
        if len(self._by_age) > 2 * len(self.blocks) + COMPACT_ABOVE:
            self._by_age = [entry for entry in self._by_age if self.blocks.get(entry[2]) is entry[3]]
            heapq.heapify(self._by_age)

    def drop(self, key: Hashable) -> None:
        self.used_bytes -= self.blocks.pop(key).size_bytes

    def computed_before(self, moment_s: float, most: int | None = None) -> list[Hashable]:
        """Return the blocks computed at `moment_s` or earlier, oldest first; at most `most` of them."""
        taken: list[tuple[float, int, Hashable, Kept]] = []
        while self._by_age and self._by_age[0][0] <= moment_s and (most is None or len(taken) < most):
            entry = heapq.heappop(self._by_age)
            if self.blocks.get(entry[2]) is entry[3]:
                taken.append(entry)
        for entry in taken:
            heapq.heappush(self._by_age, entry)
        return [entry[2] for entry in taken]

    def eldest_s(self) -> float | None:
        """Return when the oldest block was computed, None without any."""
        while self._by_age and self.blocks.get(self._by_age[0][2]) is not self._by_age[0][3]:
            heapq.heappop(self._by_age)
        return self._by_age[0][0] if self._by_age else None

    def least_used(self) -> int | None:
        """Return when the least recently used block was used, None without any."""
        return next((kept.used for kept in self.blocks.values()), None)


class ScopeIndex:
    """All blocks. Only one thread may change it; any may call `find` and `scopes`."""

    def __init__(self) -> None:
        self._scopes: dict[str, Scope] = {}
        self._blocks: dict[Hashable, Kept] = {}
        self.used_bytes = 0
        """Bytes of all blocks."""
        self.uses = 0
        """Count of all uses: the latest `Kept.used`."""
        self.last_bytes = 0
        """Size of the block that was added last."""

    def add(self, key: Hashable, keyspace: str, size_bytes: int, computed_s: float) -> None:
        """Add a block; one that is present starts again."""
        self.remove(key)
        self.uses += 1
        self.last_bytes = size_bytes
        self.used_bytes += size_bytes
        kept = Kept(keyspace, size_bytes, computed_s, self.uses)
        self._blocks[key] = kept
        scope = self._scopes.get(keyspace)
        if scope is None:
            scope = self._scopes[keyspace] = Scope()
        scope.add(key, kept)

    def touch(self, key: Hashable) -> Kept | None:
        """Make a block the most recently used, and return it; None if it is absent."""
        kept = self._blocks.get(key)
        if kept is not None:
            self.uses += 1
            kept.used = self.uses
            self._scopes[kept.keyspace].blocks.move_to_end(key)
        return kept

    def remove(self, key: Hashable) -> Kept | None:
        kept = self._blocks.pop(key, None)
        if kept is not None:
            scope = self._scopes[kept.keyspace]
            scope.drop(key)
            self.used_bytes -= kept.size_bytes
            if not scope.blocks:
                del self._scopes[kept.keyspace]
        return kept

    def find(self, key: Hashable) -> Kept | None:
        return self._blocks.get(key)

    def scope(self, keyspace: str) -> Scope | None:
        return self._scopes.get(keyspace)

    def keyspaces(self) -> list[str]:
        return list(self._scopes)

    def scopes(self) -> list[tuple[str, Scope]]:
        return list(self._scopes.items())

    def mean_bytes(self) -> float:
        """Return the mean size of a block, 0 without any."""
        return self.used_bytes / max(1, len(self))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._blocks))


def usage_rows(
    index: ScopeIndex,
    bounds: Mapping[str, Bounds],
    tier: str,
    kept_bytes: Callable[[str, int], int] = lambda _, used_bytes: used_bytes,
) -> list[ScopeUsage]:
    """Return the usage of scopes in `tier`, keyspaces outside of the policy together under an empty name. `kept_bytes`
    returns the bytes to report of a keyspace and its used bytes."""
    rows: list[ScopeUsage] = []
    outside_bytes = outside_blocks = 0
    for keyspace, scope in index.scopes():
        bound = bounds.get(keyspace)
        if bound is None:
            outside_bytes += scope.used_bytes
            outside_blocks += len(scope.blocks)
        else:
            name, guaranteed_bytes = keyspace[:SCOPE_DIGITS], bound.guaranteed_bytes or None
            used = kept_bytes(keyspace, scope.used_bytes), len(scope.blocks)
            rows.append(ScopeUsage(name, tier, *used, bound.limit_bytes, guaranteed_bytes))
    return [*rows, ScopeUsage("", tier, outside_bytes, outside_blocks, 0)] if outside_blocks else rows


class Deadlines:
    """A deadline for each keyspace, on a heap: scopes are many, and few are due."""

    def __init__(self) -> None:
        self._moments: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def plan(self, keyspace: str, moment_s: float | None) -> None:
        """Set a keyspace's deadline; None removes it."""
        if moment_s is None:
            self._moments.pop(keyspace, None)
        elif self._moments.get(keyspace) != moment_s:
            self._moments[keyspace] = moment_s
            heapq.heappush(self._heap, (moment_s, keyspace))
            if len(self._heap) > 2 * len(self._moments) + 64:
                self._heap = [(moment, name) for name, moment in self._moments.items()]
                heapq.heapify(self._heap)

    def due(self, now_s: float) -> set[str]:
        """Remove the deadlines that have passed, and return their keyspaces."""
        due: set[str] = set()
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            _, keyspace = heapq.heappop(self._heap)
            del self._moments[keyspace]
            due.add(keyspace)
        return due

    def next_s(self) -> float | None:
        while self._heap and self._moments.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def clear(self) -> None:
        self._moments.clear()
        self._heap.clear()


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
