"""Evicts blocks from LMCache's memory: those that the policy no longer allows, and those that must make room.

A thread repeats `Evictor.turn`. A victim in use is checked again when its reader releases it, and once a second,
because locks of dead readers expire without an event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.index import Cause, Choice, Deadlines, ScopeIndex, Situation, choose, next_expiry_s
from kvstrata_sidecar.adapter.memory.erase import MemoryEraser
from kvstrata_sidecar.adapter.memory.events import Events
from kvstrata_sidecar.adapter.memory.write_back import GRACE_S, PendingWriteBack
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.policy.limits import Bounds, bounds_of, scaled_guarantees
from kvstrata_sidecar.adapter.tier.counts import EVICTION, NO_SCOPE, Counters
from kvstrata_sidecar.upstream.pool import Pool

logger = logging.getLogger(__name__)

EVICTIONS = frozenset({Cause.LIMIT, Cause.ROOM, Cause.RETENTION})

GATHER_S = 0.005
"""How long a turn waits for more events: a prompt's blocks are committed one after the other."""

FAILURE_PAUSE_S = 0.1

LOOK_S = 1.0
"""Delay until blocks in use are checked again."""

MARGIN_PERCENT = 1
"""Extra memory freed beyond the watermark, so that not every block needs a choice."""

PASSAGE_S = 10.0
"""How long bytes above a scope's limit count as passing through: to slower tiers, or to a reader."""

OVERWRITTEN_WITHIN_S = 0.1
"""How long a batch that waits for room waits for evicted blocks to be overwritten: their memory is free only then."""


@dataclass(eq=False)
class Evictor:
    """Keeps `pool` within the policy in force. `tier` names the CPU tier, None without one; blocks are evicted above
    `high_share` of the memory. `check_locks` is called once a second."""

    _pool: Pool
    _enforcement: Enforcement
    _index: ScopeIndex
    _events: Events
    _eraser: MemoryEraser
    _pending: PendingWriteBack
    _counts: Counters
    _: KW_ONLY
    tier: str | None
    high_share: float
    check_locks: Callable[[], object]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._view: CacheView | None = None
        self.bounds: Mapping[str, Bounds] = {}
        """Of the scopes, as of the last turn."""
        self._guarantees: tuple[float, Mapping[str, float]] = (0.0, {})
        self._deadlines = Deadlines()
        self._locked: dict[str, int] = {}
        self._above_limit: dict[str, tuple[float, int]] = {}
        self._look_at_s = self.clock()
        self._unfinished = False

    @property
    def locked_bytes(self) -> int:
        """Bytes that should be deleted but are in use."""
        return sum(list(self._locked.values()))

    def kept_bytes(self, keyspace: str, used_bytes: int) -> int:
        """Return a scope's used bytes without those that pass through."""
        bound, now_s = self.bounds.get(keyspace), self.clock()
        since_s, _ = self._above_limit.get(keyspace, (now_s, 0))
        if bound is None or bound.limit_bytes is None or now_s - since_s >= PASSAGE_S:
            return used_bytes
        return min(used_bytes, bound.limit_bytes)

    def turn(self) -> float:
        """Read events, apply the policy, evict; return the seconds until the next turn at the latest."""
        batches = self._pool.room.take()
        try:
            return self._turn(sum(batch.blocks for batch in batches))
        finally:
            if batches:
                self._pool.settle(OVERWRITTEN_WITHIN_S)
            for batch in batches:
                batch.answered.set()

    def _turn(self, waiting: int) -> float:
        """Take a turn that makes room for `waiting` blocks, too."""
        now_s = self.clock()
        # A failed turn has consumed deadlines and events, so everything is checked.
        everything, self._unfinished = self._unfinished, True
        # Doomed blocks first: the index learns of them in this turn, so no other block goes in their stead.
        self._eraser.advance()
        changed = self._apply_policy() | self._events.read(now_s, self._scope) | self._events.compare(now_s)
        changed |= self._deadlines.due(now_s)
        if everything:
            self._deadlines.clear()
            self._locked.clear()
        self._pending.forget(now_s)
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._reclaim_abandoned()
            self._pool.return_loans()
            self.check_locks()
        choice = self._choose(now_s, None if everything else changed, waiting)
        changed |= self._evict(choice)
        for keyspace in self._index.keyspaces() if everything else changed:
            self._schedule(keyspace, choice, now_s)
        self._unfinished = False
        if self._events.comparing:
            return 0.0
        next_s = self._deadlines.next_s()
        return max(0.0, (self._look_at_s if next_s is None else min(self._look_at_s, next_s)) - now_s)

    def _apply_policy(self) -> set[str]:
        """Apply the view in force; return the keyspaces whose bounds changed."""
        view = self._enforcement.view
        if view is self._view:
            return set()
        self._eraser.follow(view)
        before, self.bounds = self.bounds, bounds_of(view, self.tier)
        self._guarantees = (0.0, {})
        self._view = view
        self._counts.retain(self.bounds)
        return {one for one in before.keys() | self.bounds.keys() if before.get(one) != self.bounds.get(one)}

    def _reclaim_abandoned(self) -> None:
        """Free abandoned reservations, which LMCache leaves to eviction. If a block of that name exists, it would be
        deleted too: then the reservation stays until that block goes."""
        abandoned = [key for key in self._pool.abandoned() if self._pool.entry(key) is None]
        if abandoned:
            self._counts.add("abandoned", len(self._pool.delete(abandoned)))

    def _choose(self, now_s: float, changed: set[str] | None, waiting: int) -> Choice:
        used_bytes, total_bytes = self._pool.usage()
        room_bytes = total_bytes * self.high_share
        waiting_bytes = waiting * self._index.mean_bytes()
        need_bytes = max(used_bytes - room_bytes, used_bytes + waiting_bytes - total_bytes)
        if need_bytes > 0:
            need_bytes += total_bytes * MARGIN_PERCENT / 100
        if changed is not None and not changed and need_bytes <= 0:
            return Choice()
        situation = Situation(
            self.bounds, self._guaranteed(room_bytes), self._pool.staged_bytes(), self._pool.in_use, now_s, need_bytes,
            self._enforcement.readable.chunks, passing=lambda key: self._pending.waits(key, now_s),
        )  # fmt: skip
        return choose(self._index, situation, changed)

    def _evict(self, choice: Choice) -> set[str]:
        """Delete the victims; return the keyspaces of those that could not be deleted."""
        if not choice.victims:
            return set()
        found = {key: kept for key in choice.victims if (kept := self._index.find(key)) is not None}
        removed = {key: kept for key, kept in found.items() if choice.victims[key] is Cause.REMOVED}
        deleted = self._eraser.delete(removed) | self._pool.delete([key for key in found if key not in removed])
        now_s = self.clock()
        for key, kept in found.items():
            if key not in deleted:
                choice.failed.add(kept.keyspace)
                continue
            self._index.remove(key)
            cause = choice.victims[key]
            if cause in EVICTIONS:
                self._counts.age(EVICTION, now_s - kept.computed_s)
            self._counts.add(f"evicted_{cause}", 1, self._scope(kept.keyspace))
        return choice.failed

    def _schedule(self, keyspace: str, choice: Choice, now_s: float) -> None:
        """Plan when a scope is checked again although nothing happens in it."""
        scope, bound = self._index.scope(keyspace), self.bounds.get(keyspace)
        limit_bytes = None if bound is None else bound.limit_bytes
        if scope is not None and limit_bytes is not None and scope.used_bytes > limit_bytes:
            _, newest = self._above_limit.get(keyspace, (0.0, -1))
            # In a passage, blocks of other requests are another excess.
            if newest < 0 or (not limit_bytes and (scope.least_used() or 0) > newest):
                self._above_limit[keyspace] = now_s, self._index.uses
        else:
            self._above_limit.pop(keyspace, None)
        self._locked.pop(keyspace, None)
        locked_bytes = choice.locked.get(keyspace, 0)
        if locked_bytes:
            self._locked[keyspace] = locked_bytes
        again_s = now_s + LOOK_S
        moment_s = None if scope is None or bound is None else next_expiry_s(scope, bound, now_s, again_s)
        if locked_bytes or keyspace in choice.failed:
            if self._pending:
                # LMCache reports a reader's release, but not a load that takes nothing.
                again_s = now_s + GRACE_S
            moment_s = again_s if moment_s is None else min(moment_s, again_s)
        self._deadlines.plan(keyspace, moment_s)

    def _guaranteed(self, room_bytes: float) -> Mapping[str, float]:
        """Return guaranteed bytes by keyspace, scaled down if they do not fit."""
        if self._guarantees[0] != room_bytes:
            self._guarantees = (room_bytes, scaled_guarantees(self.bounds, room_bytes))
        return self._guarantees[1]

    def _scope(self, keyspace: str) -> str:
        """Return the scope to count for: keyspaces outside of the policy are counted together."""
        return keyspace if keyspace in self.bounds else NO_SCOPE


class Turns:
    """A thread that calls `turn`, which returns the seconds until its next call at the latest, from `start` to `close`.
    A failed turn is repeated."""

    def __init__(self, turn: Callable[[], float], clock: Callable[[], float]) -> None:
        self._turn = turn
        self._clock = clock
        self._failures = 0
        self._woken_s = clock()
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvs-memory", daemon=True)
        self.start = self._thread.start
        self.slowest_s = 0.0
        """The longest time from a call of `wake` to the end of its turn."""

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and not self._failures

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        """Request a turn. Thread-safe, and fast."""
        if not self._wake.is_set():
            self._woken_s = self._clock()
            self._wake.set()

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            woken = self._wake.wait(wait_s)
            if self._closed:
                return
            time.sleep(GATHER_S)
            since_s = self._woken_s
            self._wake.clear()
            try:
                wait_s = self._turn()
                self._failures = 0
                if woken:
                    self.slowest_s = max(self.slowest_s, self._clock() - since_s)
            except Exception:
                self._failures += 1
                if self._failures == 1:
                    logger.exception("The policy of the memory could not be enforced; it is tried again")
                wait_s = FAILURE_PAUSE_S
