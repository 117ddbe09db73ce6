"""The thread that keeps LMCache's memory within the policy.

LMCache's listener runs under the lock that all its work waits for, so it only notes what happened and wakes the thread.
The thread enters it into the book, chooses what has to go, and has LMCache delete it. What is in use is looked at again
when its reader lets go, and once a second, because LMCache's locks of readers that died expire without a word.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvstrata.contract import ContractError
from kvstrata.contract.cacheview import CacheView
from kvstrata.contract.link import PurgeAnswer, ScopeUsage, TierState
from kvstrata_sidecar.adapter.counts import NOBODY, Counters
from kvstrata_sidecar.adapter.enforcement import Enforcement

from .agenda import Agenda
from .book import Book
from .bounds import Bounds, bounds_of, scaled_guarantees
from .choice import Cause, Choice, Situation, choose, next_expiry_s
from .intake import Intake
from .notes import Note, Notes
from .pool import Pool
from .purge import Purges
from .report import usage_rows

logger = logging.getLogger(__name__)

GATHER_S = 0.005
"""How long a turn waits for more to happen: a prompt's blocks are committed one after the other."""

LOOK_S = 1.0
"""How soon what was in use is looked at again: LMCache's locks of readers that died expire without a word."""

FORGET_SHARE = 30
"""In how many looks every scope's names of evicted blocks are gone through."""

PURGE_TIMEOUT_S = 10.0
"""How long a purge may take to overwrite what it deleted before the gate is told to ask again."""

MARGIN_PERCENT = 1
"""How much more of the memory is freed than its mark asks for, so that not every block needs a choice of its own."""

FAILED_ALLOCATION_PERCENT = 10
"""The same, when LMCache found no memory for a batch of blocks."""

FAILURE_PAUSE_S = 0.1


class Governor:
    """Keeps one pool within the policy in force. `start` and `close` it; the rest may be called from any thread.

    `tier` names the CPU tier, None without one, `eviction` the order in which a scope's blocks make room. `residue`
    says why copies may be left elsewhere, or is empty. `gone` is told of every block that has left the memory.
    """

    def __init__(
        self,
        pool: Pool,
        enforcement: Enforcement,
        *,
        tier: str | None,
        high_watermark_percent: int,
        eviction: str = "LRU",
        residue: str = "",
        gone: Callable[[Hashable], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._enforcement = enforcement
        self._tier = tier
        self._high_share = high_watermark_percent / 100
        self._residue = residue
        self._clock = clock
        self._arc = eviction == "ARC"
        self._book = Book(arc=self._arc)
        self._purges = Purges(pool)
        self._counts: Counter[str] = Counter()
        self._evictions = Counters()
        self._notes = Notes()
        self._intake = Intake(pool, self._book, self._notes, gone=gone, clock=clock)
        self._allocation_failed = False
        self._agenda = Agenda()
        self._to_forget: list[str] = []
        self._view: CacheView | None = None
        self._watched: frozenset[str] = frozenset()
        self._watch_lock = threading.Lock()
        self._bounds: dict[str, Bounds] = {}
        self._guarantees: tuple[float, dict[str, float]] = (0.0, {})
        self._locked: dict[str, int] = {}
        self._look_at_s = clock()
        self._unfinished = False
        self._failures = 0
        self._slowest_s = 0.0
        self._woken_s = clock()
        self._closed = False
        self._turn_lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvs-memory", daemon=True)

    @property
    def healthy(self) -> bool:
        """Whether the policy is being enforced and freed memory comes back."""
        return self._thread.is_alive() and not self._failures and self._pool.scrubber.healthy

    def start(self) -> None:
        """Begin to enforce."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def note(self, what: Note, keys: Sequence[Any]) -> None:
        """Note an event; called by LMCache under its lock, so nothing else happens here."""
        if what is Note.RESERVED and not keys:
            # LMCache tells of no keys only when it had no memory for any.
            self._allocation_failed = True
        else:
            self._notes.add(what, tuple(keys))
        if not self._wake.is_set():
            self._woken_s = self._clock()
            self._wake.set()

    def policy_changed(self) -> None:
        """Look at the view in force now rather than within a second."""
        self._watch_view()
        self._woken_s = self._clock()
        self._wake.set()

    def inherit_age(self, key: Hashable, age_s: float) -> None:
        """Say how long ago the tokens of a block were computed that is being loaded; see `Intake`."""
        self._intake.inherit_age(key, age_s)

    def age_s(self, key: Hashable) -> float:
        """Return how long ago a block's tokens were computed, 0 for one of which nothing is known."""
        return self._intake.age_s(key)

    def purge(self, keyspaces: Sequence[str], boot: str) -> PurgeAnswer:
        """Delete and overwrite all that these keyspaces hold now; what is in use goes when it is let go.

        Raises ContractError if overwriting takes too long; the gate asks again.
        """
        self._purges.doom(set(keyspaces))
        self._purges.advance()
        with self._turn_lock:
            self._book.forget(keyspaces)
        gone_bytes, gone_blocks, waiting_bytes, waiting_blocks = self._purges.sums(keyspaces)
        if not self._pool.settle(PURGE_TIMEOUT_S):
            raise ContractError("the memory of purged blocks has not been overwritten yet")
        return PurgeAnswer(boot, gone_bytes, gone_blocks, waiting_bytes, waiting_blocks, self._residue)

    def usage(self) -> tuple[tuple[ScopeUsage, ...], int]:
        """Return the largest scopes' use, and how many scopes were left out."""
        return usage_rows(self._book, self._bounds, self._tier or "")

    def states(self) -> tuple[TierState, ...]:
        """Return the CPU tier as the gate is told of it; nothing without one."""
        if self._tier is None:
            return ()
        healthy = self.healthy
        detail = "" if healthy else "the policy of the memory cannot be enforced; see the cache server's log"
        return (TierState(self._tier, "CPU", "closed" if healthy else "open", detail),)

    def evictions(self) -> dict[tuple[str, str], int]:
        """Return how many blocks had to go, by scope and cause; scopes of no policy together."""
        scopes = self._evictions.by_scope().items()
        return {(scope, cause): count for scope, counts in scopes for cause, count in counts.items()}

    def counters(self) -> dict[str, int]:
        """Return counts since the start, and some figures: see docs/guides/memory.md."""
        return dict(self._counts) | {
            "enforced": int(self.healthy),
            "slowest_ms": round(self._slowest_s * 1000),
            "locked_bytes": sum(list(self._locked.values())),
            "overwritten_bytes": self._pool.scrubber.overwritten_bytes,
        }

    def turn(self) -> float:
        """Enter what happened, let go what has to go; return after how many seconds to look again at the latest."""
        with self._turn_lock:
            now_s = self._clock()
            # A turn that failed has struck out what was to be looked at.
            everything, self._unfinished = self._unfinished, True
            # First what is doomed: the book learns of it in this very turn, so no other block goes in its stead.
            self._purges.advance()
            changed = self._intake.read_notes(now_s) | self._intake.compare(now_s)
            changed |= self._take_view() | self._agenda.due(now_s)
            if everything:
                self._agenda.clear()
                self._locked.clear()
            if now_s >= self._look_at_s:
                self._look_at_s = now_s + LOOK_S
                self._reclaim_abandoned()
                self._forget_names(now_s)
            choice = self._choose(now_s, None if everything else changed)
            changed |= self._evict(choice)
            self._book.settle()
            for keyspace in self._book.keyspaces() if everything else changed:
                self._look_again(keyspace, choice, now_s)
            self._unfinished = False
            if self._intake.comparing:
                return 0.0
            next_s = self._agenda.next_s()
            return max(0.0, (self._look_at_s if next_s is None else min(self._look_at_s, next_s)) - now_s)

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            woken = self._wake.wait(wait_s)
            if self._closed:
                return
            # What comes while these few milliseconds pass belongs to the same turn.
            time.sleep(GATHER_S)
            since_s = self._woken_s
            self._wake.clear()
            try:
                wait_s = self.turn()
                self._failures = 0
                if woken:
                    self._slowest_s = max(self._slowest_s, self._clock() - since_s)
            except Exception:
                self._failures += 1
                if self._failures == 1:
                    logger.exception("The policy of the memory could not be enforced; it is tried again")
                wait_s = FAILURE_PAUSE_S

    def _look_again(self, keyspace: str, choice: Choice, now_s: float) -> None:
        """Plan when a scope that was just looked at has to be looked at again."""
        scope, bound = self._book.scope(keyspace), self._bounds.get(keyspace)
        locked_bytes = choice.locked.get(keyspace, 0)
        self._locked.pop(keyspace, None)
        if locked_bytes:
            self._locked[keyspace] = locked_bytes
        again_s = now_s + LOOK_S
        moment_s = None if scope is None or bound is None else next_expiry_s(scope, bound, now_s, again_s)
        if locked_bytes or keyspace in choice.failed:
            moment_s = again_s if moment_s is None else min(moment_s, again_s)
        self._agenda.plan(keyspace, moment_s)

    def _take_view(self) -> set[str]:
        """Put the view in force into effect; return the keyspaces for which it is another."""
        view = self._enforcement.view
        if view is self._view:
            return set()
        self._watch_view()
        before, self._bounds = self._bounds, bounds_of(view, self._tier)
        self._guarantees = (0.0, {})
        self._evictions.retain(self._bounds)
        self._view = view
        differ = {keyspace for keyspace, bound in self._bounds.items() if before.get(keyspace) != bound}
        return differ | (before.keys() - self._bounds.keys())

    def _watch_view(self) -> None:
        """Count what goes of keyspaces that left the policy: of each view, also of one that was replaced at once."""
        with self._watch_lock:
            view = self._enforcement.view
            before, now = self._watched, frozenset(view.keyspaces if view is not None else ())
            self._purges.watch(before - now)
            self._purges.forget(now - before)
            self._watched = now

    def _forget_names(self, now_s: float) -> None:
        """Keep no name of an evicted block for much longer than the block could have been kept; a share at a time."""
        if not self._to_forget:
            self._to_forget = list(self._bounds) if self._arc else []
        share = len(self._bounds) // FORGET_SHARE + 1
        for keyspace in self._to_forget[-share:]:
            bound = self._bounds.get(keyspace)
            if bound is not None and bound.retention_s is not None:
                self._book.forget((keyspace,), now_s - bound.retention_s)
        del self._to_forget[-share:]

    def _reclaim_abandoned(self) -> None:
        """Free what a writer reserved and never wrote: LMCache leaves that to eviction, and this is the only one.

        Where a block of that name has come all the same, it would go along: then it is left until that one goes.
        """
        abandoned = [key for key in self._pool.abandoned() if self._pool.entry(key) is None]
        if abandoned:
            deleted, _ = self._pool.delete(abandoned)
            self._counts["abandoned"] += len(deleted)

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
        if self._guarantees[0] != room_bytes:
            self._guarantees = (room_bytes, scaled_guarantees(self._bounds, room_bytes))
        situation = Situation(
            self._bounds, self._guarantees[1], self._pool.staged_bytes(), self._pool.in_use, now_s, need_bytes
        )
        return choose(self._book, situation, changed)

    def _evict(self, choice: Choice) -> set[str]:
        """Delete what was chosen; return the keyspaces of what could not be deleted."""
        if not choice.victims:
            return set()
        removed: dict[Hashable, tuple[str, int]] = {}
        others: list[Hashable] = []
        for key, cause in choice.victims.items():
            kept = self._book.find(key)
            if kept is not None and cause is Cause.REMOVED:
                removed[key] = (kept.keyspace, kept.size_bytes)
            else:
                others.append(key)
        deleted = self._purges.delete(removed) | self._pool.delete(others)[0]
        now_s = self._clock()
        for key in deleted:
            cause = choice.victims[key]
            kept = self._book.remove(key, now_s if cause in (Cause.LIMIT, Cause.ROOM) else None)
            self._counts[f"evicted_{cause}"] += 1
            if kept is not None:
                scope = kept.keyspace if kept.keyspace in self._bounds else NOBODY
                self._evictions.add(str(cause), keyspace=scope)
        for key in choice.victims.keys() - deleted:
            kept = self._book.find(key)
            if kept is not None:
                choice.failed.add(kept.keyspace)
        return choice.failed
