"""Erases keyspaces from LMCache's memory and says what is left of them there, by a look at its tables of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from kvstrata.contract.messages.erase import Amount, Check, ErasedTier
from kvstrata_sidecar.adapter.memory.erase import Purges
from kvstrata_sidecar.adapter.memory.lmcache_memory import Pool

MEDIUM = "CPU"
WITHIN_S = 2.0
"""How long one look may wait for memory to be overwritten; whoever wants to wait longer asks again."""


class MemoryEraser:
    """Erases from one pool.

    `tier` names the CPU tier, None without one; `residue` says why copies may be left elsewhere, or is empty.
    """

    def __init__(self, pool: Pool, purges: Purges, *, tier: str | None, residue: str) -> None:
        self._pool = pool
        self._purges = purges
        self.tier = tier or ""
        self._residue = residue

    def erase(self, keyspaces: Collection[str], seen: Callable[[str, bytes], None]) -> ErasedTier:
        """Delete what these keyspaces have now, and return what is left. What is in use goes when it is let go.

        `seen` is told the keyspace and the chunk's hash of each block that was there.
        """
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
        """Delete these blocks; return how many went, and how many somebody uses."""
        deleted, locked = self._pool.delete([key for key in keys if self._pool.entry(key) is not None])
        coming = sum(self._pool.coming(key) for key in keys)
        return len(deleted), len(locked) + coming

    def found(self, keys: Collection[Any]) -> int:
        """Return how many of these blocks a lookup finds, without that being a use of them."""
        return sum(self._pool.entry(key) is not None for key in keys)

    def kept(self, keys: Collection[Any]) -> int:
        """Return of how many of these blocks there is something, to be read or being written."""
        return sum(self._pool.entry(key) is not None or self._pool.coming(key) for key in keys)

    def _named(self, names: frozenset[str]) -> list[tuple[Any, Any]]:
        # First what is being written: a block on its way from one table to the other is seen in one or in both.
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
