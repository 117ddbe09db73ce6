"""Finds the file for a block: under its own keyspace, or under a pool's that its keyspace may read.

A pool's blocks are read from the pool and not stored again; older copies under the reader's own keyspace are needless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvstrata.contract.store.block_file import key_of, parts_of
from kvstrata_sidecar.adapter.files.file_index import FileIndex
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.interface import Block, Hot, most_of_each

Found = tuple[int, bytes]
"""A block's number in its request, and the key of its file."""

_Refusals = dict[str, Refusal | None]


class Reading(NamedTuple):
    """Readable blocks, and copies that a pool makes needless."""

    blocks: list[Found]
    needless: list[Found]


class Finder:
    """Finds the files of one tier. `refusal(keyspace, storing)` returns why a keyspace may not be used now, None if it
    may."""

    def __init__(
        self,
        identity: str,
        tier: str,
        enforcement: Enforcement,
        refusal: Callable[[str, bool], Refusal | None],
        index: FileIndex,
        counters: Counters,
    ) -> None:
        self._identity = identity
        self._tier = tier
        self._enforcement = enforcement
        self._refusal = refusal
        self._index = index
        self._counters = counters

    def key(self, block: Block) -> bytes:
        return self._key(block, block.keyspace)

    def own(self, blocks: Sequence[Block]) -> list[Found]:
        """Return the files under the blocks' own keyspaces; refused blocks are counted."""
        return [(number, self.key(block)) for number, block in self._allowed(blocks, storing=False)]

    def to_read(self, blocks: Sequence[Block]) -> Reading:
        """Return the files to read, pools' first; refused blocks are counted."""
        reading, refusals = Reading([], []), _Refusals()
        for number, block in self._allowed(blocks, storing=False):
            own, pooled = self.key(block), self._pooled(block, refusals)
            reading.blocks.append((number, pooled or own))
            if pooled is not None and self._index.readable(own):
                reading.needless.append((number, own))
        return reading

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

    def hottest(self, keyspaces: Sequence[str]) -> list[Hot]:
        """Return the most recently used blocks of this identity in keyspaces that may be used now."""
        allowed = [keyspace for keyspace in keyspaces if self._refusal(keyspace, False) is None]
        most = most_of_each(len(allowed))
        found = ((keyspace, *one) for keyspace in allowed for one in self._index.hottest(keyspace, most))
        named = ((keyspace, *parts_of(key), use, age_s) for keyspace, key, use, age_s in found)
        return [
            Hot(keyspace, rank, group, chunk_hash, use, age_s)
            for keyspace, identity, rank, group, chunk_hash, use, age_s in named
            if identity == self._identity
        ]

    def life_s(self, block: Block) -> float:
        bound = self._index.bounds(block.keyspace)
        if bound is None or bound.limit_bytes == 0:
            return 0.0
        if not self._enforcement.readable.admits(block.keyspace, block.chunk_hash, self._tier):
            return 0.0
        return float("inf") if bound.retention_s is None else float(bound.retention_s)

    def _pooled(self, block: Block, refusals: _Refusals) -> bytes | None:
        for pool in self._enforcement.readable.candidates(block.keyspace, block.chunk_hash, self._tier):
            key = self._key(block, pool)
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
            refusal = refusals[keyspace]
            if refusal is None and storing and not readable.admits(keyspace, block.chunk_hash, self._tier):
                refusal = Refusal.NOT_IN_POOL
            if refusal is None:
                yield number, block
            else:
                refused[keyspace, refusal] += 1
        for (keyspace, refusal), count in refused.items():
            self._counters.refuse(refusal, count, keyspace)

    def _key(self, block: Block, keyspace: str) -> bytes:
        return key_of(keyspace, self._identity, block.rank, block.group, block.chunk_hash)
