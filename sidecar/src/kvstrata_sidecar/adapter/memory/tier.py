"""The server's own memory as a tier of the pod: serves runtime, metrics and link, and receives LMCache's reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata_sidecar.adapter.index import ScopeIndex, usage_rows
from kvstrata_sidecar.adapter.memory.erase import MemoryEraser
from kvstrata_sidecar.adapter.memory.events import Events, MemoryEvent
from kvstrata_sidecar.adapter.memory.evictor import Evictor, Turns
from kvstrata_sidecar.adapter.memory.lending import Borrowed, Lending
from kvstrata_sidecar.adapter.memory.pinned import Pinned
from kvstrata_sidecar.adapter.memory.write_back import Offers, PendingWriteBack
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.interface import MEMORY, Block
from kvstrata_sidecar.upstream.pool import Pool


class MemoryTier:
    """One pool under the policy in force, from `start` to `close`. Thread-safe.

    `name` is the CPU tier's, None without one. `residue` is the reason why copies may remain elsewhere, or empty.
    `gone` is called with the key of every block that left the memory. `passes_on` returns whether a tier behind it
    admits a block written here, and `store_again` has LMCache store blocks there.
    """

    per_pod = True

    def __init__(
        self,
        pool: Pool,
        enforcement: Enforcement,
        *,
        name: str | None,
        high_watermark_percent: int,
        residue: str = "",
        gone: Callable[[Hashable], None] = lambda _: None,
        passes_on: Callable[[Any], bool] = lambda _: False,
        store_again: Callable[[list[Hashable]], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._enforcement = enforcement
        self.name = name or ""
        self._clock = clock
        self.counts = counts = Counters()
        self._index = index = ScopeIndex()
        self.eraser = MemoryEraser(pool, tier=self.name, residue=residue)
        self.pending = PendingWriteBack(passes_on, clock)
        self._events = Events(pool, index, counts, left=gone, clock=clock)
        self.pinned = Pinned(
            pool, index, counts, bounds=lambda: self.evictor.bounds,
            waits=lambda key: self.pending.waits(key, clock()),
        )  # fmt: skip
        self.evictor = Evictor(
            pool, enforcement, index, self._events, self.eraser, self.pending, counts,
            tier=name, high_share=high_watermark_percent / 100, check_locks=self.pinned.check_all, clock=clock,
        )  # fmt: skip
        self._turns = Turns(self.evictor.turn, clock)
        pool.room.begin(self._turns.wake, lambda: counts.add("allocation_failed"), self.pinned.unwritable)
        self._lending = Lending(
            enforcement, counts, tier=name, lendable=self._lendable, unlockable=self.pinned.unlockable,
            returned=lambda key: self.note(MemoryEvent.RELEASED, (key,)),
        )  # fmt: skip
        self.borrowed = Borrowed(self._lending.keeps)
        self.offer = Offers(store_again, counts.add, clock).lacking
        self.inherit_age, self.age_s = self._events.inherit_age, self._events.age_s
        self.erase = self.eraser.erase
        self.start = self._turns.start

    @property
    def healthy(self) -> bool:
        return self._turns.healthy and self._pool.scrubber.healthy

    def lend(self, *, entry_of: Callable[[Any], Any], missing: object) -> None:
        """Start lending pools' blocks; see `Loans.begin`."""
        self._pool.loans.begin(self._lending, entry_of=entry_of, missing=missing, clock=self._clock)

    def close(self) -> None:
        self._turns.close()
        self._pool.room.close()

    def note(self, event: MemoryEvent, keys: Sequence[Any]) -> None:
        """Queue an event; called by LMCache under its lock, so nothing else happens here."""
        self._events.add(event, keys)
        self._turns.wake()

    # LMCache's callbacks for changes of its memory, called under its lock: `L1ManagerListener` has their names.

    def on_l1_keys_reserved_read(self, keys: list[Any]) -> None:
        """No use of the blocks, but LMCache reads written blocks to store them in other tiers."""
        self.pending.taken(keys)
        self.pinned.note(keys)

    def on_l1_keys_read_finished(self, keys: list[Any]) -> None:
        self.note(MemoryEvent.RELEASED, keys)

    def on_l1_keys_reserved_write(self, keys: list[Any]) -> None:
        self.note(MemoryEvent.RESERVED, keys)

    def on_l1_keys_write_finished(self, keys: list[Any]) -> None:
        self.pending.came(keys)
        self.pinned.note(keys)
        self.note(MemoryEvent.WRITTEN, keys)

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[Any]) -> None:
        """Record a tier's load, while the requester has the blocks locked."""
        came = list(keys)
        for key, pool in self.borrowed.arrived(keys, self._pool.address):
            own = self._pool.loans.adopt(key, pool)
            if own is not None:
                self.inherit_age(own, self.age_s(key))
                came.append(own)
        self.pinned.note(came)
        self.note(MemoryEvent.LOADED, came)

    def on_l1_keys_deleted_by_manager(self, keys: list[Any]) -> None:
        self.note(MemoryEvent.DELETED, keys)

    def on_l1_keys_accessed(self, keys: list[Any]) -> None:
        self.note(MemoryEvent.USED, [self._pool.loans.lender(key) for key in keys])

    def policy_changed(self) -> None:
        """Apply the view in force now, not within a second."""
        self.eraser.follow(self._enforcement.view)
        self._turns.wake()

    def holds(self, keyspace: str, block: Block) -> bool:  # noqa: ARG002
        """Whether a reader has the block locked: others may be evicted before they are read."""
        return self._pool.in_use(block.key)

    def sizes(self, blocks: Sequence[Block]) -> list[int]:
        entries = (self._pool.entry(block.key) for block in blocks)
        return [0 if entry is None else self._pool.size(entry) for entry in entries]

    def delete(self, blocks: Sequence[Block]) -> list[Hashable]:
        return list(self._pool.delete([block.key for block in blocks if self._pool.entry(block.key) is not None]))

    def kept(self, blocks: Sequence[Block]) -> int:
        """Return how many of these blocks exist or are being written."""
        return sum(self._pool.entry(one.key) is not None or self._pool.coming(one.key) for one in blocks)

    def fill(self) -> tuple[int, int]:
        """Return the bytes in use, and all bytes."""
        return self._pool.usage()

    def state(self) -> TierState:
        if self.healthy:
            return TierState(self.name, MEMORY, "closed")
        detail = "the policy of the memory cannot be enforced; see the cache server's log"
        return TierState(self.name, MEMORY, "open", detail)

    def usage(self) -> list[ScopeUsage]:
        return usage_rows(self._index, self.evictor.bounds, self.name, self.evictor.kept_bytes)

    def counters(self) -> dict[str, int]:
        """Return counts since the start and some gauges: see docs/concepts/memory.md."""
        return self.counts.snapshot() | {
            "enforced": int(self.healthy),
            "slowest_ms": round(self._turns.slowest_s * 1000),
            "locked_bytes": self.evictor.locked_bytes,
            "overwritten_bytes": self._pool.scrubber.overwritten_bytes,
            "loans": len(self._pool.loans),
        }

    def drift_bytes(self) -> int:
        """Return LMCache's bytes in use beyond the counted and staged blocks; negative if less."""
        return self._pool.usage()[0] - self._index.used_bytes - sum(self._pool.staged_bytes().values())

    def _lendable(self, key: Any) -> bool:
        """Whether a pool's block may be lent again: overlapping readers would otherwise keep a doomed block."""
        bound = self.evictor.bounds.get(key.cache_salt)
        if bound is None or bound.denied or self.eraser.is_doomed(key):
            return False
        return bound.retention_s is None or self.age_s(key) < bound.retention_s
