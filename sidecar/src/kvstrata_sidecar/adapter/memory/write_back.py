"""Copies of blocks in slower tiers: pending copies by LMCache, and copies of blocks that leave memory.

LMCache writes a new block to all tiers (`PendingWriteBack`), so the next slower tier has most blocks that leave memory.
It lacks blocks loaded from a tier behind it, and those written while it was away, full or busy. Such blocks are copied
ahead of eviction (`WriteBack`), which never waits for the copy.

A pool's blocks lost by a shared tier would not come back: a request that needs them finds them in memory and writes
nothing. Such blocks are offered to the tier again (`Offers`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstrata_sidecar.adapter.index.scope_index import Kept, ScopeIndex
from kvstrata_sidecar.adapter.index.victims import Cause, Fill, next_victims
from kvstrata_sidecar.adapter.memory.presence import PresenceCache
from kvstrata_sidecar.adapter.policy.limits import Bounds
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.interface import Block, SlowerTier, block_of
from kvstrata_sidecar.adapter.tier.tasks import Task
from kvstrata_sidecar.upstream.pool import Pool, Reserved

logger = logging.getLogger(__name__)

LOOK_S = 0.2

IN_FLIGHT_BYTES = 64 << 20
"""Bytes copied at once, if more than a block."""

IN_FLIGHT_SHARE = 0.05
"""The same as a share of the memory: blocks being copied cannot be evicted."""

SCOPE_SHARE = 0.5
"""The same as a share of a scope's limit."""

WITHIN_S = 30.0
"""Deadline of a copy."""

LOCK_SHARE = 0.5
"""The same as a share of the lifetime of LMCache's lock that the copy holds."""

WORTHWHILE_S = 0.5
"""A block that would live no longer in the slower tier is not copied."""

ENOUGH_S = 2.0
"""Nor is one that leaves memory sooner: an interrupted copy counts as the tier's fault."""

TRUST_S = 60.0
"""How long a tier's presence answer is trusted."""

RETRY_S = 5.0

EVICTIONS = frozenset({Cause.LIMIT, Cause.ROOM, Cause.RETENTION})

GRACE_S = 0.25
"""How long a block waits for LMCache's own copy to begin."""

PATIENCE_S = 10.0
"""How long a block is lacking before it is offered: a new block is still on its way."""

MAX_POOLS = 128
"""Pools' keyspaces with recorded lacking blocks."""


class WriteBack:
    """Copies blocks that are about to leave `pool`. `look` and `left` are the evictor's; the rest is thread-safe.

    `lower` returns the tiers behind the memory from fast to slow, `passes_on` whether one of them admits a block, and
    `is_doomed` whether a block is being erased.
    """

    def __init__(
        self,
        pool: Pool,
        index: ScopeIndex,
        counts: Counters,
        *,
        lower: Callable[[], Sequence[SlowerTier]],
        passes_on: Callable[[Any], bool],
        is_doomed: Callable[[Any], bool],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._index = index
        self._counts = counts
        self._lower = lower
        self._is_doomed = is_doomed
        self._clock = clock
        self.pending = PendingWriteBack(passes_on, clock)
        self.presence = PresenceCache(clock)
        self._lock = threading.Lock()
        self._in_flight: Counter[str] = Counter()
        self._copying: dict[int, Sequence[Reserved]] = {}
        self._tried_s: dict[Hashable, float] = {}
        self.due_s = clock()

    @property
    def has_work(self) -> bool:
        return bool(self._lower())

    def look(self, bounds: Mapping[str, Bounds], guarantees: Mapping[str, float], fill: Fill, now_s: float) -> None:
        """Start copying the next victims that a slower tier lacks, within the bounds of copies under way."""
        self.due_s = now_s + LOOK_S
        if not self._lower():
            return
        self._tried_s = {key: moment_s for key, moment_s in self._tried_s.items() if now_s < moment_s + RETRY_S}
        with self._lock:
            in_flight = Counter(self._in_flight)
        most_bytes = min(IN_FLIGHT_BYTES, IN_FLIGHT_SHARE * fill.total_bytes)
        if in_flight.total() >= most_bytes:
            return
        batches: dict[tuple[int, bool], list[tuple[Hashable, float]]] = defaultdict(list)
        tiers: dict[int, SlowerTier] = {}
        victims = next_victims(self._index, bounds, guarantees, fill, in_flight, self._is_spared, now_s)
        for key, cause in victims.items():
            kept = self._index.find(key)
            bound = None if kept is None else bounds.get(kept.keyspace)
            if cause not in EVICTIONS or kept is None or bound is None or key in self._tried_s:
                continue
            remaining_s = WITHIN_S if bound.retention_s is None else kept.computed_s + bound.retention_s - now_s
            if remaining_s < ENOUGH_S or not _fits(in_flight, kept, bound, most_bytes):
                continue
            # An expiring block matters only if it outlives its time here; others if they live at all.
            age_s = now_s - kept.computed_s + (remaining_s if cause is Cause.RETENTION else 0.0)
            tier, is_open = self._target(block_of(key), age_s, TRUST_S)
            if tier is None or not is_open:
                continue
            in_flight[kept.keyspace] += kept.size_bytes
            tiers[id(tier)] = tier
            batches[id(tier), cause is Cause.RETENTION].append((key, remaining_s))
        for (number, _), batch in batches.items():
            within_s = min(WITHIN_S, LOCK_SHARE * self._pool.read_lock_s, *(remaining_s for _, remaining_s in batch))
            self._begin(tiers[number], [key for key, _ in batch], within_s, now_s)

    def left(self, key: Any, kept: Kept, now_s: float) -> None:
        """Count an evicted block that could live in a slower tier and is in none known."""
        if self._lower() and self._target(block_of(key), now_s - kept.computed_s, float("inf"))[0] is not None:
            self._counts.add("left_uncopied_blocks", 1, kept.keyspace)

    def _is_spared(self, key: Hashable) -> bool:
        """Whether a block is not to be copied: in use, already on its way, or doomed."""
        return self.pending.waits(key, self._clock()) or self._pool.in_use(key) or self._is_doomed(key)

    def _target(self, block: Block, age_s: float, trust_s: float) -> tuple[SlowerTier | None, bool]:
        """Return where a block of that age should be copied to, and whether that tier takes it now. None if a slower
        tier has it, or it may live in none."""
        closed: SlowerTier | None = None
        for tier in self._lower():
            if tier.life_s(block) < age_s + WORTHWHILE_S:
                continue
            since_s = self.presence.age_s(tier, block.key)
            if tier.holds(block.keyspace, block) or (not tier.per_pod and since_s is not None and since_s < trust_s):
                return None, False
            if tier.takes(block):
                return tier, True
            closed = closed or tier
        return closed, False

    def _begin(self, tier: SlowerTier, keys: Sequence[Hashable], within_s: float, now_s: float) -> None:
        self._tried_s.update(dict.fromkeys(keys, now_s))
        reserved = self._pool.reserve(keys)
        if not reserved:
            return
        with self._lock:
            self._copying[id(reserved)] = reserved
            for one in reserved:
                self._in_flight[one.key.cache_salt] += one.size_bytes
        blocks, views = [block_of(one.key) for one in reserved], [one.view for one in reserved]
        try:
            tier.hand_down(blocks, views, within_s, lambda task: self._ended(tier, reserved, task))
        except Exception:
            logger.exception("Blocks that leave the memory could not be handed down")
            self._let_go(reserved)

    def _ended(self, tier: SlowerTier, reserved: Sequence[Reserved], task: Task) -> None:
        """Record the end of a copy; called from the tier's threads."""
        try:
            self.presence.confirm(tier, [one.key for one, there in zip(reserved, task.found, strict=True) if there])
            for key, size_bytes in zip(task.keys, task.sizes, strict=True):
                keyspace = key.cache_salt  # type: ignore[attr-defined]
                self._counts.add("handed_down_blocks", 1, keyspace)
                self._counts.add("handed_down_bytes", size_bytes, keyspace)
        finally:
            self._let_go(reserved)

    def _let_go(self, reserved: Sequence[Reserved]) -> None:
        with self._lock:
            if self._copying.pop(id(reserved), None) is None:
                return
            for one in reserved:
                self._in_flight[one.key.cache_salt] -= one.size_bytes
            self._in_flight = +self._in_flight
        try:
            self._pool.let_go(reserved)
        except Exception:
            logger.exception("Blocks that were copied to a slower tier stay locked until LMCache's lock ends")


class PendingWriteBack:
    """Written blocks that LMCache has not locked yet for its copies to other tiers. `came` and `taken` never wait.
    Thread-safe.

    LMCache first reports a written block, and then locks it to store it in other tiers. A block that must go at once,
    as in a scope without room in memory, could be deleted in between and reach no tier. `passes_on`: whether a tier
    behind the memory admits a block.
    """

    def __init__(self, passes_on: Callable[[Any], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._passes_on = passes_on
        self._clock = clock
        self._lock = threading.Lock()
        self._came_s: dict[Hashable, float] = {}

    def came(self, keys: Iterable[Hashable]) -> None:
        if passing := [key for key in keys if self._passes_on(key)]:
            now_s = self._clock()
            with self._lock:
                for key in passing:
                    # Reinsert at the end: the order is that of arrival.
                    self._came_s.pop(key, None)
                    self._came_s[key] = now_s

    def taken(self, keys: Iterable[Hashable]) -> None:
        """Record that blocks were locked, by any reader: a locked block cannot be deleted."""
        if self._came_s:
            with self._lock:
                for key in keys:
                    self._came_s.pop(key, None)

    def waits(self, key: Hashable, now_s: float) -> bool:
        """Whether LMCache's copy of a block has not begun."""
        came_s = self._came_s.get(key)
        return came_s is not None and now_s < came_s + GRACE_S

    def forget(self, now_s: float) -> None:
        """Drop blocks whose copy did not begin in time."""
        if self._came_s:
            with self._lock:
                while self._came_s:
                    key, came_s = next(iter(self._came_s.items()))
                    if now_s < came_s + GRACE_S:
                        break
                    del self._came_s[key]

    def __bool__(self) -> bool:
        return bool(self._came_s)


@dataclass(slots=True, eq=False)
class Offers:
    """Offers lacking blocks whenever a caller asks for the holdings of tiers. Thread-safe. `offer` has LMCache store
    blocks of its memory in all tiers behind it."""

    _offer: Callable[[list[Hashable]], object]
    _count: Callable[[str, int, str], None]
    _clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _since_s: OrderedDict[str, dict[Hashable, float]] = field(default_factory=OrderedDict)

    def lacking(self, keyspace: str, keys: Sequence[Hashable]) -> None:
        """Record a pool's blocks that are in memory and not in another of its tiers."""
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


def _fits(in_flight: Counter[str], kept: Kept, bound: Bounds, most_bytes: float) -> bool:
    total_bytes = in_flight.total()
    if total_bytes and total_bytes + kept.size_bytes > most_bytes:
        return False
    scope_bytes = in_flight[kept.keyspace] + kept.size_bytes
    return bound.limit_bytes is None or scope_bytes <= SCOPE_SHARE * bound.limit_bytes
