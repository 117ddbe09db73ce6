"""Erases keyspaces from LMCache's memory, and reports what is left, from LMCache's own tables.

Unused blocks are deleted at once, others as soon as they are released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.contract.messages.erase import Amount, Check, ErasedTier
from kvstrata_sidecar.adapter.memory.lmcache_memory import Pool

MAX_TALLIES = 65_536
"""Keyspaces with counts; the oldest are dropped first."""

MEDIUM = "CPU"
WITHIN_S = 2.0
"""How long one check waits for memory to be overwritten; a caller that wants to wait longer asks again."""


@dataclass(slots=True)
class Tally:
    """Deletions of one keyspace, and its blocks to delete that are in use, as (entry, bytes) by key."""

    gone_bytes: int = 0
    gone_blocks: int = 0
    doomed: dict[Hashable, list[tuple[Any, int]]] = field(default_factory=dict)

    def went(self, size_bytes: int) -> None:
        self.gone_bytes += size_bytes
        self.gone_blocks += 1


class Purges:
    """Deletes doomed blocks as they are released. Thread-safe."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tallies: dict[str, Tally] = {}
        self._waiting: dict[str, Tally] = {}
        self._lock = threading.Lock()

    def doom(self, keyspaces: Collection[str]) -> None:
        """Doom all current blocks of these keyspaces, including those being written or read."""
        with self._lock:
            tallies = {keyspace: self._tally(keyspace) for keyspace in keyspaces}
            # Staged blocks first: a block moving between the tables is seen in one or in both.
            for key, entry in [*self._pool.staged(), *self._pool.resident()]:
                tally = tallies.get(key.cache_salt)
                if tally is not None:
                    entries = tally.doomed.setdefault(key, [])
                    if not any(known is entry for known, _ in entries):
                        entries.append((entry, self._pool.size(entry)))
                    self._waiting[key.cache_salt] = tally

    def watch(self, keyspaces: Iterable[str]) -> None:
        with self._lock:
            for keyspace in keyspaces:
                self._tally(keyspace)

    def forget(self, keyspaces: Iterable[str]) -> None:
        with self._lock:
            for keyspace in keyspaces:
                tally = self._tallies.get(keyspace)
                if tally is not None and not tally.doomed:
                    del self._tallies[keyspace]

    def delete(self, blocks: Mapping[Hashable, tuple[str, int]]) -> set[Hashable]:
        """Delete blocks, (keyspace, bytes) by key, of keyspaces that left the policy; return the deleted keys. Doomed
        blocks are left to `advance`, so that no block counts twice."""
        with self._lock:
            keys = [
                key
                for key, (keyspace, _) in blocks.items()
                if (tally := self._tallies.get(keyspace)) is None or key not in tally.doomed
            ]
            deleted, _ = self._pool.delete(keys)
            for key in deleted:
                keyspace, size_bytes = blocks[key]
                if keyspace in self._tallies:
                    self._tallies[keyspace].went(size_bytes)
            return deleted

    def is_doomed(self, key: Any) -> bool:
        tally = self._waiting.get(key.cache_salt)
        return tally is not None and key in tally.doomed

    def advance(self) -> None:
        with self._lock:
            doomed = [(tally, key) for tally in self._waiting.values() for key in tally.doomed]
            if doomed:
                self._pool.delete([key for _, key in doomed])
            for tally, key in doomed:
                held = []
                for entry, size_bytes in tally.doomed.pop(key):
                    if self._pool.holds(key, entry):
                        held.append((entry, size_bytes))
                    else:
                        tally.went(size_bytes)
                if held:
                    tally.doomed[key] = held
            self._waiting = {keyspace: tally for keyspace, tally in self._waiting.items() if tally.doomed}

    def gone(self, keyspaces: Iterable[str]) -> tuple[int, int]:
        with self._lock:
            tallies = [self._tallies[keyspace] for keyspace in set(keyspaces) if keyspace in self._tallies]
            return sum(tally.gone_bytes for tally in tallies), sum(tally.gone_blocks for tally in tallies)

    def _tally(self, keyspace: str) -> Tally:
        tally = self._tallies.get(keyspace)
        if tally is None:
            if len(self._tallies) >= MAX_TALLIES:
                settled = next((name for name, one in self._tallies.items() if not one.doomed), None)
                if settled is not None:
                    del self._tallies[settled]
            tally = self._tallies[keyspace] = Tally()
        return tally


class MemoryEraser:
    """Erases from one pool. `tier` names the CPU tier, None without one; `residue` says why copies may remain
    elsewhere, or is empty."""

    def __init__(self, pool: Pool, purges: Purges, *, tier: str | None, residue: str) -> None:
        self._pool = pool
        self._purges = purges
        self.tier = tier or ""
        self._residue = residue

    def erase(self, keyspaces: Collection[str], seen: Callable[[str, bytes], None]) -> ErasedTier:
        """Delete the current blocks of these keyspaces, and return what is left. Blocks in use go when they are
        released. `seen` is called with the keyspace and chunk hash of each block found."""
        names = frozenset(keyspaces)
        for key, _ in self._named(names):
            seen(key.cache_salt, key.chunk_hash)
        self._purges.doom(names)
        self._purges.advance()
        gone_bytes, gone_blocks = self._purges.gone(names)
        deleted = Amount(gone_blocks, gone_bytes)
        writing = self._sizes(self._staged(names))
        reading = self._sizes([*self._resident(names), *self._outliving(names)])
        overwritten = self._pool.settle(WITHIN_S)
        remaining = writing + reading
        checked = [Check.TABLES] if not remaining.blocks else []
        checked += [Check.OVERWRITTEN] if overwritten else []
        return ErasedTier(
            self.tier,
            MEDIUM,
            found=deleted + remaining,
            deleted=deleted,
            remaining=remaining,
            reading=reading.blocks,
            writing=writing.blocks,
            unoverwritten_bytes=0 if overwritten else max(1, self._pool.scrubber.pending_bytes),
            checked=tuple(checked),
            residue=self._residue,
        )

    def forget(self, keys: Collection[Any]) -> tuple[int, int]:
        """Delete these blocks; return how many were deleted, and how many are in use."""
        deleted, locked = self._pool.delete([key for key in keys if self._pool.entry(key) is not None])
        coming = sum(self._pool.coming(key) for key in keys)
        return len(deleted), len(locked) + coming

    def found(self, keys: Collection[Any]) -> int:
        """Return how many of these blocks a lookup finds; no use of them."""
        return sum(self._pool.entry(key) is not None for key in keys)

    def kept(self, keys: Collection[Any]) -> int:
        """Return how many of these blocks exist or are being written."""
        return sum(self._pool.entry(key) is not None or self._pool.coming(key) for key in keys)

    def _named(self, names: frozenset[str]) -> list[tuple[Any, Any]]:
        # Staged blocks first: a block moving between the tables is seen in one or in both.
        return [*self._staged(names), *self._resident(names)]

    def _staged(self, names: frozenset[str]) -> list[tuple[Any, Any]]:
        return [(key, entry) for key, entry in self._pool.staged() if key.cache_salt in names]

    def _resident(self, names: frozenset[str]) -> list[tuple[Any, Any]]:
        return [(key, entry) for key, entry in self._pool.resident() if key.cache_salt in names]

    def _outliving(self, names: frozenset[str]) -> list[tuple[Any, Any]]:
        loans = self._pool.loans
        return loans.outliving(names) if loans is not None else []

    def _sizes(self, found: list[tuple[Any, Any]]) -> Amount:
        return Amount(len(found), sum(self._pool.size(entry) for _, entry in found))
