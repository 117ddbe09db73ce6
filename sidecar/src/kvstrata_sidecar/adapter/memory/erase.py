"""Erases keyspaces from LMCache's memory, and reports the remaining blocks, from LMCache's own tables.

Unused blocks are deleted at once, others as soon as they are released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.contract.messages.erase import Amount, Check, ErasedTier
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.index import Kept
from kvstrata_sidecar.adapter.tier.interface import MEMORY
from kvstrata_sidecar.upstream.pool import Pool

MAX_TALLIES = 65_536
"""Keyspaces with counts; the oldest are dropped first."""

WITHIN_S = 2.0
"""How long one check waits for memory to be overwritten; a caller that wants to wait longer asks again."""


@dataclass(slots=True)
class Tally:
    """Deletions of one keyspace, and its blocks to delete that are in use, as (entry, bytes) by key."""

    gone: Amount = field(default_factory=Amount)
    doomed: dict[Hashable, list[tuple[Any, int]]] = field(default_factory=dict)


class MemoryEraser:
    """Erases from one pool, deletes doomed blocks as they are released, and counts deletions of keyspaces from when
    they left the policy. Thread-safe. `tier` names the CPU tier, empty without one; `residue` is the reason why copies
    may remain elsewhere, or empty."""

    def __init__(self, pool: Pool, *, tier: str, residue: str) -> None:
        self._pool = pool
        self._tier = tier
        self._residue = residue
        self._lock = threading.Lock()
        self._tallies: dict[str, Tally] = {}
        self._waiting: dict[str, Tally] = {}
        self._allowed: frozenset[str] = frozenset()

    def erase(self, keyspaces: Collection[str], seen: Callable[[str, bytes], None]) -> ErasedTier:
        """Delete the current blocks of these keyspaces, and return the rest. Blocks in use go when they are
        released. `seen` is called with the keyspace and chunk hash of each block found."""
        names, pool = frozenset(keyspaces), self._pool
        for key in self._doom(names):
            seen(key.cache_salt, key.chunk_hash)
        self.advance()
        with self._lock:
            deleted = sum((self._tallies[name].gone for name in names & self._tallies.keys()), Amount())
        writing = self._amount(pool.staged(), names)
        reading = self._amount(pool.resident(), names) + self._amount(pool.loans.outliving(), names)
        overwritten = pool.settle(WITHIN_S)
        remaining = writing + reading
        checked = [Check.TABLES] if not remaining.blocks else []
        checked += [Check.OVERWRITTEN] if overwritten else []
        return ErasedTier(
            self._tier,
            MEMORY,
            found=deleted + remaining,
            deleted=deleted,
            remaining=remaining,
            reading=reading.blocks,
            writing=writing.blocks,
            unoverwritten_bytes=0 if overwritten else max(1, pool.scrubber.pending_bytes),
            checked=tuple(checked),
            residue=self._residue,
        )

    def follow(self, view: CacheView | None) -> None:
        """Count deletions of keyspaces that left the policy; called for each view, even one replaced at once."""
        with self._lock:
            before, self._allowed = self._allowed, frozenset(view.keyspaces if view is not None else ())
            for keyspace in before - self._allowed:
                self._tally(keyspace)
            for keyspace in self._allowed - before:
                if keyspace not in self._waiting:
                    self._tallies.pop(keyspace, None)

    def delete(self, blocks: Mapping[Hashable, Kept]) -> set[Hashable]:
        """Delete blocks of keyspaces that left the policy; return the deleted keys. Doomed blocks are left to
        `advance`, so that no block counts twice."""
        with self._lock:
            deleted = self._pool.delete([key for key in blocks if not self.is_doomed(key)])
            for key in deleted:
                tally = self._tallies.get(blocks[key].keyspace)
                if tally is not None:
                    tally.gone += Amount(1, blocks[key].size_bytes)
            return deleted

    def is_doomed(self, key: Any) -> bool:
        tally = self._waiting.get(key.cache_salt)
        return tally is not None and key in tally.doomed

    def advance(self) -> None:
        """Delete doomed blocks that were released."""
        with self._lock:
            doomed = [(tally, key) for tally in self._waiting.values() for key in tally.doomed]
            self._pool.delete([key for _, key in doomed])
            for tally, key in doomed:
                held = []
                for entry, size_bytes in tally.doomed.pop(key):
                    if self._pool.holds(key, entry):
                        held.append((entry, size_bytes))
                    else:
                        tally.gone += Amount(1, size_bytes)
                if held:
                    tally.doomed[key] = held
            self._waiting = {keyspace: tally for keyspace, tally in self._waiting.items() if tally.doomed}

    def _doom(self, keyspaces: frozenset[str]) -> list[Any]:
        """Doom all current blocks of these keyspaces, including those being written or read; return their keys."""
        found: list[Any] = []
        with self._lock:
            tallies = {keyspace: self._tally(keyspace) for keyspace in keyspaces}
            # Staged blocks first: a block moving between the tables is seen in one or in both.
            for key, entry in [*self._pool.staged(), *self._pool.resident()]:
                tally = tallies.get(key.cache_salt)
                if tally is not None:
                    found.append(key)
                    entries = tally.doomed.setdefault(key, [])
                    if not any(known is entry for known, _ in entries):
                        entries.append((entry, self._pool.size(entry)))
                    self._waiting[key.cache_salt] = tally
        return found

    def _amount(self, found: list[tuple[Any, Any]], names: frozenset[str]) -> Amount:
        sizes = [self._pool.size(entry) for key, entry in found if key.cache_salt in names]
        return Amount(len(sizes), sum(sizes))

    def _tally(self, keyspace: str) -> Tally:
        tally = self._tallies.get(keyspace)
        if tally is None:
            if len(self._tallies) >= MAX_TALLIES:
                settled = next((name for name, one in self._tallies.items() if not one.doomed), None)
                if settled is not None:
                    del self._tallies[settled]
            tally = self._tallies[keyspace] = Tally()
        return tally
