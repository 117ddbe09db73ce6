"""The thread that keeps LMCache's memory within the policy.

LMCache's listener runs under its global lock, so it only queues events and wakes the thread. The thread enters them
into the index, chooses victims, and has LMCache delete them. A victim in use is checked again when its reader releases
it, and once a second, because locks of dead readers expire without an event.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata_sidecar.adapter.index.deadlines import Deadlines
from kvstrata_sidecar.adapter.index.scope_index import ScopeIndex
from kvstrata_sidecar.adapter.index.victims import Cause, Choice, Fill, Situation, choose, next_expiry_s
from kvstrata_sidecar.adapter.memory.bounds_in_force import InForce
from kvstrata_sidecar.adapter.memory.erase import MemoryEraser, Purges
from kvstrata_sidecar.adapter.memory.events import EventQueue, IndexUpdater, MemoryEvent
from kvstrata_sidecar.adapter.memory.lmcache_memory import Pool
from kvstrata_sidecar.adapter.memory.loans import Borrowed
from kvstrata_sidecar.adapter.memory.report import by_scope, drift_bytes, usage_rows
from kvstrata_sidecar.adapter.memory.turns import Turns
from kvstrata_sidecar.adapter.memory.write_back import EVICTIONS, GRACE_S, PendingWriteBack, WriteBack
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.tier.counts import EVICTION, HIT, NOBODY, Counters, Histogram
from kvstrata_sidecar.adapter.tier.interface import Block, PodTier

LOOK_S = 1.0
"""Delay until blocks in use are checked again: LMCache's locks of dead readers expire without an event."""


MARGIN_PERCENT = 1
"""Extra memory freed beyond the watermark, so that not every block needs a choice."""

FAILED_ALLOCATION_PERCENT = 10
"""The same after LMCache found no memory for a batch of blocks."""


class Evictor:
    """Keeps one pool within the policy in force. Methods besides `start` and `close` are thread-safe.

    `tier` names the CPU tier, None without one. `residue` says why copies may remain elsewhere, or is empty. `gone` is
    called with the key of every block that left the memory. `passes_on` says whether another tier admits a block
    written here; LMCache's listener reports to `pending_write_back`. `lower` returns these tiers from fast to slow:
    evicted blocks are copied to them.
    """

    def __init__(
        self,
        pool: Pool,
        enforcement: Enforcement,
        *,
        tier: str | None,
        high_watermark_percent: int,
        residue: str = "",
        gone: Callable[[Hashable], None] = lambda _: None,
        passes_on: Callable[[Any], bool] = lambda _: False,
        lower: Callable[[], Sequence[PodTier]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._enforcement = enforcement
        self._tier = tier
        self._high_share = high_watermark_percent / 100
        self._clock = clock
        self._index = ScopeIndex()
        self._purges = Purges(pool)
        self.eraser = MemoryEraser(pool, self._purges, tier=tier, residue=residue)
        self._counts: Counter[str] = Counter()
        self._evictions = Counters()
        self.traffic = Counters()
        self.borrowed = Borrowed(self._keeps)
        self.pending_write_back = PendingWriteBack(passes_on, clock)
        self._write_back = WriteBack(pool, self._index, self.traffic, lower=lower, spared=self._is_spared, clock=clock)
        self._tell_gone = gone
        self._events = EventQueue()
        self._updater = IndexUpdater(
            pool, self._index, self._events, gone=self._gone, promoted=self._count_promoted,
            used=partial(self._evictions.age, HIT), clock=clock,
        )  # fmt: skip
        self._allocation_failed = False
        self._deadlines = Deadlines()
        self._policy = InForce(enforcement, tier, self._purges)
        self._locked: dict[str, int] = {}
        self._look_at_s = clock()
        self._unfinished = False
        self._turn_lock = threading.Lock()
        self._turns = Turns("kvs-memory", self.turn, clock)

    @property
    def healthy(self) -> bool:
        return self._turns.healthy and self._pool.scrubber.healthy

    def start(self) -> None:
        self._turns.start()

    def close(self) -> None:
        self._turns.close()

    def note(self, what: MemoryEvent, keys: Sequence[Any]) -> None:
        """Queue an event; called by LMCache under its lock, so nothing else happens here."""
        if what is MemoryEvent.RESERVED and not keys:
            # LMCache reports no keys only if it had no memory for any.
            self._allocation_failed = True
        else:
            self._events.add(what, tuple(keys))
        self._turns.wake()

    def loaded(self, keys: Sequence[Any]) -> None:
        """Record a tier's load; called by LMCache under its lock, while the requester has the blocks locked."""
        came = list(keys)
        for key, pool in self.borrowed.arrived(keys, self._pool.address):
            own = self._pool.loans.adopt(key, pool) if self._pool.loans is not None else None
            if own is not None:
                self._updater.inherit_age(own, self._updater.age_s(key))
                came.append(own)
        self.note(MemoryEvent.LOADED, came)

    def policy_changed(self) -> None:
        """Apply the view in force now, not within a second."""
        self._policy.watch()
        self._turns.wake()

    def inherit_age(self, key: Hashable, age_s: float) -> None:
        """Record the age of the tokens of a block being loaded; see `IndexUpdater`."""
        self._updater.inherit_age(key, age_s)

    def confirm(self, tier: PodTier, keys: Iterable[Hashable]) -> None:
        if not tier.per_pod:  # per-pod tiers know their blocks at any time
            self._write_back.presence.confirm(tier, keys)

    def age_s(self, key: Hashable) -> float:
        return self._updater.age_s(key)

    def in_use(self, key: Hashable) -> bool:
        return self._pool.in_use(key)

    def sizes(self, blocks: Sequence[Block]) -> list[int]:
        """Return each block's bytes, 0 if no reader can find it."""
        entries = (self._pool.entry(block.key) for block in blocks)
        return [self._pool.size(entry) if entry is not None else 0 for entry in entries]

    def held_bytes(self, keyspace: str) -> int:
        scope = self._index.scope(keyspace)
        return scope.used_bytes if scope is not None else 0

    @property
    def tier(self) -> str | None:
        return self._tier

    def lendable(self, key: Any) -> bool:
        """Whether a pool's block may be lent again: overlapping readers would otherwise keep a doomed block."""
        bound = self._policy.bounds.get(key.cache_salt)
        if bound is None or bound.denied or self._purges.is_doomed(key):
            return False
        return bound.retention_s is None or self._updater.age_s(key) < bound.retention_s

    def usage(self) -> tuple[tuple[ScopeUsage, ...], int]:
        """Return the largest scopes' use, and the number of scopes left out."""
        return usage_rows(self._index, self._policy.bounds, self._tier or "")

    def states(self) -> tuple[TierState, ...]:
        if self._tier is None:
            return ()
        healthy = self.healthy
        detail = "" if healthy else "the policy of the memory cannot be enforced; see the cache server's log"
        return (TierState(self._tier, "CPU", "closed" if healthy else "open", detail),)

    def evictions(self) -> dict[tuple[str, str], int]:
        """Return evicted blocks by scope and cause; scopes outside of the policy together."""
        return by_scope(self._evictions)

    def ages(self) -> dict[str, Histogram]:
        return self._evictions.ages()

    def drift_bytes(self) -> int:
        return drift_bytes(self._pool, self._index)

    def came_and_lent(self) -> dict[tuple[str, str], int]:
        return by_scope(self.traffic)

    def counters(self) -> dict[str, int]:
        """Return counts since the start and some gauges: see docs/guides/memory.md."""
        return (
            dict(self._counts)
            | self.traffic.snapshot()
            | {
                "enforced": int(self.healthy),
                "slowest_ms": round(self._turns.slowest_s * 1000),
                "locked_bytes": sum(list(self._locked.values())),
                "overwritten_bytes": self._pool.scrubber.overwritten_bytes,
                "loans": len(self._pool.loans or ()),
            }
        )

    def turn(self) -> float:
        """Enter events, evict; return the seconds until the next turn at the latest."""
        with self._turn_lock:
            now_s = self._clock()
            # A failed turn has consumed deadlines and events, so everything is checked.
            everything, self._unfinished = self._unfinished, True
            # Doomed blocks first: the index learns of them in this turn, so no other block goes in their stead.
            self._purges.advance()
            changed = self._updater.read_events(now_s) | self._updater.compare(now_s)
            changed |= self._take_view() | self._deadlines.due(now_s)
            if everything:
                self._deadlines.clear()
                self._locked.clear()
            self.pending_write_back.forget(now_s)
            if now_s >= self._look_at_s:
                self._look_at_s = now_s + LOOK_S
                self._reclaim_abandoned()
                self._pool.return_loans()
            choice = self._choose(now_s, None if everything else changed)
            changed |= self._evict(choice)
            for keyspace in self._index.keyspaces() if everything else changed:
                self._look_again(keyspace, choice, now_s)
            self._unfinished = False
            if now_s >= self._write_back.due_s:
                self._copy_ahead(now_s)
            if self._updater.comparing:
                return 0.0
            next_s = self._deadlines.next_s()
            moments_s = [self._look_at_s, *([] if next_s is None else [next_s])]
            if changed and self._write_back.has_work:
                moments_s.append(self._write_back.due_s)
            return max(0.0, min(moments_s) - now_s)

    def _look_again(self, keyspace: str, choice: Choice, now_s: float) -> None:
        scope, bound = self._index.scope(keyspace), self._policy.bounds.get(keyspace)
        locked_bytes = choice.locked.get(keyspace, 0)
        self._locked.pop(keyspace, None)
        if locked_bytes:
            self._locked[keyspace] = locked_bytes
        again_s = now_s + LOOK_S
        moment_s = None if scope is None or bound is None else next_expiry_s(scope, bound, now_s, again_s)
        if locked_bytes or keyspace in choice.failed:
            if self.pending_write_back:
                # LMCache reports a reader's release, but not a load that takes nothing.
                again_s = now_s + GRACE_S
            moment_s = again_s if moment_s is None else min(moment_s, again_s)
        self._deadlines.plan(keyspace, moment_s)

    def _take_view(self) -> set[str]:
        differ = self._policy.take()
        if differ is None:
            return set()
        self._evictions.retain(self._policy.bounds)
        self.traffic.retain(self._policy.bounds)
        return differ

    def _reclaim_abandoned(self) -> None:
        """Free abandoned reservations, which LMCache leaves to eviction. If a block of that name exists, it would be
        deleted too: then the reservation stays until that block goes."""
        abandoned = [key for key in self._pool.abandoned() if self._pool.entry(key) is None]
        if abandoned:
            deleted, _ = self._pool.delete(abandoned)
            self._counts["abandoned"] += len(deleted)

    def _keeps(self, pool: str, chunk_hash: bytes) -> bool:
        readable = self._enforcement.readable
        # A removed pool keeps nothing.
        return self._tier is not None and pool in readable.chunks and readable.admits(pool, chunk_hash, self._tier)

    def _count_promoted(self, keyspace: str, size_bytes: int) -> None:
        view = self._enforcement.view
        scope = keyspace if view is not None and keyspace in view.keyspaces else NOBODY
        self.traffic.add("promoted_blocks", 1, scope)
        self.traffic.add("promoted_bytes", size_bytes, scope)

    def _gone(self, key: Hashable) -> None:
        self._write_back.presence.discard(key)
        self._tell_gone(key)

    def _is_spared(self, key: Hashable) -> bool:
        """Whether a block is not to be copied: in use, already on its way, or doomed."""
        pending = self.pending_write_back.waits(key, self._clock())
        return pending or self._pool.in_use(key) or self._purges.is_doomed(key)

    def _copy_ahead(self, now_s: float) -> None:
        used_bytes, total_bytes = self._pool.usage()
        room_bytes = total_bytes * self._high_share
        fill = Fill(used_bytes, room_bytes, total_bytes)
        self._write_back.look(self._policy.bounds, self._policy.guarantees(room_bytes), fill, now_s)

    def _choose(self, now_s: float, changed: set[str] | None) -> Choice:
        used_bytes, total_bytes = self._pool.usage()
        room_bytes = total_bytes * self._high_share
        need_bytes = used_bytes - room_bytes
        if self._allocation_failed:
            self._allocation_failed = False
            self._counts["allocation_failed"] += 1
            need_bytes += total_bytes * FAILED_ALLOCATION_PERCENT / 100
        elif need_bytes > 0:
            need_bytes += total_bytes * MARGIN_PERCENT / 100
        if changed is not None and not changed and need_bytes <= 0:
            return Choice()
        situation = Situation(
            self._policy.bounds, self._policy.guarantees(room_bytes), self._pool.staged_bytes(), self._pool.in_use,
            now_s, need_bytes,
            self._enforcement.readable.chunks,
            passing=lambda key: self.pending_write_back.waits(key, now_s),
        )  # fmt: skip
        return choose(self._index, situation, changed)

    def _evict(self, choice: Choice) -> set[str]:
        """Delete the victims; return the keyspaces of those that could not be deleted."""
        if not choice.victims:
            return set()
        removed: dict[Hashable, tuple[str, int]] = {}
        others: list[Hashable] = []
        for key, cause in choice.victims.items():
            kept = self._index.find(key)
            if kept is not None and cause is Cause.REMOVED:
                removed[key] = (kept.keyspace, kept.size_bytes)
            else:
                others.append(key)
        deleted = self._purges.delete(removed) | self._pool.delete(others)[0]
        now_s = self._clock()
        for key in deleted:
            cause, kept = choice.victims[key], self._index.remove(key)
            self._counts[f"evicted_{cause}"] += 1
            if kept is not None:
                if cause in EVICTIONS:
                    self._write_back.left(key, kept, now_s)
                    self._evictions.age(EVICTION, now_s - kept.computed_s)
                scope = kept.keyspace if kept.keyspace in self._policy.bounds else NOBODY
                self._evictions.add(str(cause), keyspace=scope)
        for key in choice.victims.keys() - deleted:
            kept = self._index.find(key)
            if kept is not None:
                choice.failed.add(kept.keyspace)
        return choice.failed
