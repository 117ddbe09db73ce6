"""Finds the file for a block: under its own keyspace, or under a pool's that its keyspace may read.

A pool's blocks are read from the pool and not stored again; older copies under the reader's own keyspace are needless.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from kvstrata.contract.store.block_file import key_of
from kvstrata.contract.store.redis_keys import resolved
from kvstrata_sidecar.adapter.files.exchanges import Files
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.blocks import Groups, Lent
from kvstrata_sidecar.adapter.tier.interface import Block

Found = tuple[int, bytes]
"""A block's number in its request, and the key of its file."""


@dataclass(eq=False)
class Finder:
    """Finds the files of one tier; refused blocks are counted and left out."""

    _files: Files

    def key(self, block: Block, pool: str = "") -> bytes:
        """Return the key of a block's file, under a pool's keyspace if one is given."""
        identity = resolved(self._files.params.identity, block.fingerprint)
        return key_of(pool or block.keyspace, identity, block.rank, block.group, block.chunk_hash)

    def to_read(self, blocks: Sequence[Block]) -> tuple[list[Found], list[Found]]:
        """Return the files to read, pools' first, and copies that a pool makes needless."""
        reading, needless, refusal_of = list[Found](), list[Found](), cache(self._files.refusal)
        for number, block in self._files.admitted(blocks):
            own, pooled = self.key(block), self._pooled(block, refusal_of)
            reading.append((number, pooled or own))
            if pooled is not None and self._files.index.readable(own):
                needless.append((number, own))
        return reading, needless

    def to_load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> Groups[bytes]:
        return _lent(blocks, views, self.to_read(blocks)[0])

    def to_store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> Groups[bytes]:
        """Return the blocks to write, without those that a pool has."""
        found: list[Found] = []
        refusal_of = cache(self._files.refusal)
        for number, block in self._files.admitted(blocks, storing=True):
            if self._pooled(block, refusal_of) is None:
                found.append((number, self.key(block)))
            else:
                self._files.counters.add("stores_in_pool", 1, block.keyspace)
        return _lent(blocks, views, found)

    def holds(self, block: Block) -> bool:
        return self._files.index.readable(self.key(block)) or self._pooled(block, self._files.refusal) is not None

    def _pooled(self, block: Block, refusal_of: Callable[[str], Refusal | None]) -> bytes | None:
        files = self._files
        for pool in files.enforcement.readable.candidates(block.keyspace, block.chunk_hash, files.tier.name):
            key = self.key(block, pool)
            if files.index.readable(key) and refusal_of(pool) is None:
                return key
        return None


def _lent(blocks: Sequence[Block], views: Sequence[memoryview], found: Iterable[Found]) -> Groups[bytes]:
    lent: dict[tuple[str, None], list[Lent[bytes]]] = defaultdict(list)
    for number, key in found:
        lent[blocks[number].keyspace, None].append(Lent(number, blocks[number].key, key, views[number]))
    return lent
