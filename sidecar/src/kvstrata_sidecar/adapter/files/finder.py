"""Finds the file for a block: under its own keyspace, or under a pool's that its keyspace may read.

A pool's blocks are read from the pool and not stored again; older copies under the reader's own keyspace are needless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstrata.contract.messages.engine_identity import UNRESOLVED
from kvstrata.contract.store.block_file import key_of
from kvstrata.contract.store.redis_keys import resolved
from kvstrata_sidecar.adapter.files.file_index import FileIndex
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.interface import Block

Found = tuple[int, bytes]
"""A block's number in its request, and the key of its file."""

_Refusals = dict[str, Refusal | None]


@dataclass(eq=False)
class Finder:
    """Finds the files of one tier. `refusal(keyspace, storing)` returns why a keyspace may not be used now, None if it
    may."""

    _identity: str
    _tier: str
    _enforcement: Enforcement
    _refusal: Callable[[str, bool], Refusal | None]
    _index: FileIndex
    _counters: Counters

    def key(self, block: Block, pool: str = "") -> bytes:
        """Return the key of a block's file, under a pool's keyspace if one is given."""
        identity = resolved(self._identity, block.fingerprint)
        return key_of(pool or block.keyspace, identity, block.rank, block.group, block.chunk_hash)

    def own(self, blocks: Sequence[Block]) -> list[Found]:
        """Return the files under the blocks' own keyspaces; refused blocks are counted."""
        return [(number, self.key(block)) for number, block in self._allowed(blocks, storing=False)]

    def to_read(self, blocks: Sequence[Block]) -> tuple[list[Found], list[Found]]:
        """Return the files to read, pools' first, and copies that a pool makes needless; refused blocks are counted."""
        reading, needless, refusals = list[Found](), list[Found](), _Refusals()
        for number, block in self._allowed(blocks, storing=False):
            own, pooled = self.key(block), self._pooled(block, refusals)
            reading.append((number, pooled or own))
            if pooled is not None and self._index.readable(own):
                needless.append((number, own))
        return reading, needless

    def to_store(self, blocks: Sequence[Block]) -> list[Found]:
        """Return the files to write; refused blocks and those that a pool has are counted."""
        found: list[Found] = []
        left_out: Counter[str] = Counter()
        refusals = _Refusals()
        for number, block in self._allowed(blocks, storing=True):
            if self._pooled(block, refusals) is None:
                found.append((number, self.key(block)))
            else:
                left_out[block.keyspace] += 1
        for keyspace, count in left_out.items():
            self._counters.add("stores_in_pool", count, keyspace)
        return found

    def holds(self, block: Block) -> bool:
        return self._index.readable(self.key(block)) or self._pooled(block, {}) is not None

    def _pooled(self, block: Block, refusals: _Refusals) -> bytes | None:
        for pool in self._enforcement.readable.candidates(block.keyspace, block.chunk_hash, self._tier):
            key = self.key(block, pool)
            if not self._index.readable(key):
                continue
            if pool not in refusals:
                refusals[pool] = self._refusal(pool, False)
            if refusals[pool] is None:
                return key
        return None

    def _allowed(self, blocks: Sequence[Block], *, storing: bool) -> Iterator[tuple[int, Block]]:
        refusals = _Refusals()
        refused: Counter[tuple[str, Refusal]] = Counter()
        readable = self._enforcement.readable
        for number, block in enumerate(blocks):
            keyspace = block.keyspace
            if keyspace not in refusals:
                refusals[keyspace] = self._refusal(keyspace, storing)
            refusal = Refusal.NO_FINGERPRINT if block.fingerprint == UNRESOLVED else refusals[keyspace]
            if refusal is None and storing and not readable.admits(keyspace, block.chunk_hash, self._tier):
                refusal = Refusal.NOT_IN_POOL
            if refusal is None:
                yield number, block
            else:
                refused[keyspace, refusal] += 1
        for (keyspace, refusal), count in refused.items():
            self._counters.refuse(refusal, count, keyspace)
