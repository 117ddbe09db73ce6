"""Evicts blocks from LMCache's memory: those that the policy no longer allows, and those that must make room.

A thread repeats `Evictor.turn`. A victim in use is checked again when its reader releases it, and once a second,
because locks of dead readers expire without an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.index.deadlines import Deadlines
from kvstrata_sidecar.adapter.index.scope_index import ScopeIndex
from kvstrata_sidecar.adapter.index.victims import Cause, Choice, Fill, Situation, choose, next_expiry_s
from kvstrata_sidecar.adapter.memory.erase import MemoryEraser
from kvstrata_sidecar.adapter.memory.events import Events
from kvstrata_sidecar.adapter.memory.lmcache_memory import Pool
from kvstrata_sidecar.adapter.memory.write_back import EVICTIONS, GRACE_S, WriteBack
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.policy.limits import Bounds, bounds_of, scaled_guarantees
from kvstrata_sidecar.adapter.tier.counts import EVICTION, NO_SCOPE, Counters

LOOK_S = 1.0
"""Delay until blocks in use are checked again."""

MARGIN_PERCENT = 1
"""Extra memory freed beyond the watermark, so that not every block needs a choice."""

FAILED_ALLOCATION_PERCENT = 10
"""The same after LMCache found no memory for a batch of blocks."""


class Evictor:
    """Keeps `pool` within the policy in force. `tier` names the CPU tier, None without one; blocks are evicted above
    `high_share` of the memory."""

    def __init__(
        self,
        pool: Pool,
        enforcement: Enforcement,
        index: ScopeIndex,
        events: Events,
        eraser: MemoryEraser,
        write_back: WriteBack,
        counts: Counters,
        *,
        tier: str | None,
        high_share: float,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._enforcement = enforcement
        self._index = index
        self._events = events
        self._eraser = eraser
        self._write_back = write_back
        self._counts = counts
        self._tier = tier
        self._high_share = high_share
        self._clock = clock
        self._view: CacheView | None = None
        self.bounds: Mapping[str, Bounds] = {}
        """Of the scopes, as of the last turn."""
        self._guarantees: tuple[float, Mapping[str, float]] = (0.0, {})
        self._deadlines = Deadlines()
        self._locked: dict[str, int] = {}
        self._look_at_s = clock()
        self._unfinished = False

    @property
    def locked_bytes(self) -> int:
        """Bytes that should be deleted but are in use."""
        return sum(list(self._locked.values()))

    def turn(self) -> float:
        """Read events, apply the policy, evict; return the seconds until the next turn at the latest."""
        now_s = self._clock()
        # A failed turn has consumed deadlines and events, so everything is checked.
        everything, self._unfinished = self._unfinished, True
        # Doomed blocks first: the index learns of them in this turn, so no other block goes in their stead.
        self._eraser.advance()
        changed = self._apply_policy() | self._read_events(now_s) | self._deadlines.due(now_s)
        if everything:
            self._deadlines.clear()
            self._locked.clear()
        self._write_back.pending.forget(now_s)
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._reclaim_abandoned()
            self._pool.return_loans()
        choice = self._choose(now_s, None if everything else changed)
        changed |= self._evict(choice)
        for keyspace in self._index.keyspaces() if everything else changed:
            self._schedule(keyspace, choice, now_s)
        self._unfinished = False
        if now_s >= self._write_back.due_s:
            fill = self._fill()
            self._write_back.look(self.bounds, self._guaranteed(fill.room_bytes), fill, now_s)
        if self._events.comparing:
            return 0.0
        next_s = self._deadlines.next_s()
        moments_s = [self._look_at_s, *([] if next_s is None else [next_s])]
        if changed and self._write_back.has_work:
            moments_s.append(self._write_back.due_s)
        return max(0.0, min(moments_s) - now_s)

    def _apply_policy(self) -> set[str]:
        """Apply the view in force; return the keyspaces whose bounds changed."""
        view = self._enforcement.view
        if view is self._view:
            return set()
        self._eraser.follow(view)
        before, self.bounds = self.bounds, bounds_of(view, self._tier)
        self._guarantees = (0.0, {})
        self._view = view
        self._counts.retain(self.bounds)
        return {one for one in before.keys() | self.bounds.keys() if before.get(one) != self.bounds.get(one)}

    def _read_events(self, now_s: float) -> set[str]:
        changed, promoted = self._events.read(now_s)
        for keyspace, size_bytes in promoted:
            self._counts.add("promoted_blocks", 1, self._scope(keyspace))
            self._counts.add("promoted_bytes", size_bytes, self._scope(keyspace))
        return changed | self._events.compare(now_s)

    def _reclaim_abandoned(self) -> None:
        """Free abandoned reservations, which LMCache leaves to eviction. If a block of that name exists, it would be
        deleted too: then the reservation stays until that block goes."""
        abandoned = [key for key in self._pool.abandoned() if self._pool.entry(key) is None]
        if abandoned:
            self._counts.add("abandoned", len(self._pool.delete(abandoned)[0]))

    def _choose(self, now_s: float, changed: set[str] | None) -> Choice:
        used_bytes, room_bytes, total_bytes = self._fill()
        need_bytes = used_bytes - room_bytes
        if self._events.allocation_failed:
            self._events.allocation_failed = False
            self._counts.add("allocation_failed")
            need_bytes += total_bytes * FAILED_ALLOCATION_PERCENT / 100
        elif need_bytes > 0:
            need_bytes += total_bytes * MARGIN_PERCENT / 100
        if changed is not None and not changed and need_bytes <= 0:
            return Choice()
        situation = Situation(
            self.bounds, self._guaranteed(room_bytes), self._pool.staged_bytes(), self._pool.in_use, now_s, need_bytes,
            self._enforcement.readable.chunks, passing=lambda key: self._write_back.pending.waits(key, now_s),
        )  # fmt: skip
        return choose(self._index, situation, changed)

    def _evict(self, choice: Choice) -> set[str]:
        """Delete the victims; return the keyspaces of those that could not be deleted."""
        if not choice.victims:
            return set()
        found = {key: kept for key in choice.victims if (kept := self._index.find(key)) is not None}
        removed = {key: kept for key, kept in found.items() if choice.victims[key] is Cause.REMOVED}
        deleted = self._eraser.delete(removed) | self._pool.delete([key for key in found if key not in removed])[0]
        now_s = self._clock()
        for key, kept in found.items():
            if key not in deleted:
                choice.failed.add(kept.keyspace)
                continue
            self._index.remove(key)
            cause = choice.victims[key]
            if cause in EVICTIONS:
                self._write_back.left(key, kept, now_s)
                self._counts.age(EVICTION, now_s - kept.computed_s)
            self._counts.add(f"evicted_{cause}", 1, self._scope(kept.keyspace))
        return choice.failed

    def _schedule(self, keyspace: str, choice: Choice, now_s: float) -> None:
        """Plan when a scope is checked again although nothing happens in it."""
        scope, bound = self._index.scope(keyspace), self.bounds.get(keyspace)
        self._locked.pop(keyspace, None)
        locked_bytes = choice.locked.get(keyspace, 0)
        if locked_bytes:
            self._locked[keyspace] = locked_bytes
        again_s = now_s + LOOK_S
        moment_s = None if scope is None or bound is None else next_expiry_s(scope, bound, now_s, again_s)
        if locked_bytes or keyspace in choice.failed:
            if self._write_back.pending:
                # LMCache reports a reader's release, but not a load that takes nothing.
                again_s = now_s + GRACE_S
            moment_s = again_s if moment_s is None else min(moment_s, again_s)
        self._deadlines.plan(keyspace, moment_s)

    def _fill(self) -> Fill:
        used_bytes, total_bytes = self._pool.usage()
        return Fill(used_bytes, total_bytes * self._high_share, total_bytes)

    def _guaranteed(self, room_bytes: float) -> Mapping[str, float]:
        """Return guaranteed bytes by keyspace, scaled down if they do not fit."""
        if self._guarantees[0] != room_bytes:
            self._guarantees = (room_bytes, scaled_guarantees(self.bounds, room_bytes))
        return self._guarantees[1]

    def _scope(self, keyspace: str) -> str:
        """Return the scope to count for: keyspaces outside of the policy are counted together."""
        return keyspace if keyspace in self.bounds else NO_SCOPE
