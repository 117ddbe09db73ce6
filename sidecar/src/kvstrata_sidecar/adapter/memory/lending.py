"""Rights of readers to borrow pools' blocks (`upstream.loans`), and blocks of pools that slower tiers are loading."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.buffers import address_of
from kvstrata_sidecar.adapter.tier.counts import Counters

MAX_EXPECTED = 65_536
"""Expected blocks; beyond, the eldest are kept like any other block."""


@dataclass(slots=True, eq=False)
class Lending:
    """Rights of readers to borrow blocks under the policy in force. Called under LMCache's lock, except `lenders`.

    `tier` names the CPU tier, None without one: then all may read blocks in passage. `lendable` decides whether a
    pool's block may be lent again. Within `unlockable` a reader locks its own blocks. `returned` is called with the key
    of a pool's block that a reader returned.
    """

    _enforcement: Enforcement
    _counts: Counters
    _: KW_ONLY
    tier: str | None
    lendable: Callable[[Any], bool]
    unlockable: Callable[[Sequence[Any]], AbstractContextManager[set[Any]]]
    returned: Callable[[Hashable], None]

    def withheld(self, keys: Sequence[Any]) -> set[Any]:
        """Return the keys that their readers may not find in this tier, and count them."""
        tier = self.tier
        if tier is None:
            return set()
        asked = Counter(key.cache_salt for key in keys)
        denied = {keyspace for keyspace in asked if self._enforcement.denies(keyspace, tier)}
        for keyspace in denied:
            self._counts.refuse(Refusal.NOT_ALLOWED, asked[keyspace], keyspace)
        return {key for key in keys if key.cache_salt in denied} if denied else set()

    def lenders(self, key: Any) -> Sequence[str]:
        """Return the pools' keyspaces whose chunk the reader of `key` may read now, in the order of lookup. Includes
        pools that are not kept in memory: blocks that pass through it may be read as well."""
        reader = key.cache_salt
        pools = self._enforcement.readable.candidates(reader, key.chunk_hash)
        if not pools:
            return ()
        return tuple(pool for pool in pools if self._enforcement.refusal(reader, (pool,)) is None)

    def keeps(self, pool: str, chunk_hash: bytes) -> bool:
        """Whether a pool's chunk may stay in memory; a removed pool keeps nothing."""
        readable = self._enforcement.readable
        return self.tier is not None and pool in readable.chunks and readable.admits(pool, chunk_hash, self.tier)

    def lent(self, key: Any, size_bytes: int) -> None:
        self._counts.add_all(key.cache_salt, lent_blocks=1, lent_bytes=size_bytes)


class Borrowed:
    """Pools' blocks that a slower tier is loading, by reader's key. Thread-safe.

    LMCache would keep them under that key, a copy for each reader, in its budget. Instead the first arrival of a chunk
    becomes the pool's own block, lent to its reader; arrivals for other readers meanwhile, or of a pool not kept in
    memory, go with their requests.

    Only a pool's own bytes may become its block. A load may fail after its tier reported it, and the next may find the
    reader's own copy, so each load records its source and the memory that it filled.

    `keeps(keyspace, chunk_hash)`: whether a pool's chunk may stay in memory.
    """

    def __init__(self, keeps: Callable[[str, bytes], bool], limit: int = MAX_EXPECTED) -> None:
        self._keeps = keeps
        self._limit = limit
        self._lock = threading.Lock()
        self._expected: dict[Hashable, tuple[str, int | None]] = {}

    def loaded(self, key: Any, kept: str, view: memoryview) -> None:
        """Record the keyspace under which a tier found the block now in `view`; before the load is answered."""
        if kept == key.cache_salt and not self._expected:
            return
        with self._lock:
            self._expected.pop(key, None)
            if kept != key.cache_salt:
                self._expected[key] = kept, address_of(view)
                if len(self._expected) > self._limit:
                    del self._expected[next(iter(self._expected))]

    def arrived(self, keys: Iterable[Any], address: Callable[[Any], int | None]) -> list[tuple[Any, str | None]]:
        """Return, once, the keys whose blocks are a pool's, with its keyspace if it may keep them, else None. `address`
        returns where a key's block is now: at another address it is another block of that name."""
        if not self._expected:
            return []
        with self._lock:
            expected = [(key, *self._expected.pop(key)) for key in keys if key in self._expected]
        found = [(key, pool) for key, pool, filled in expected if filled is not None and address(key) == filled]
        return [(key, pool if self._keeps(pool, key.chunk_hash) else None) for key, pool in found]
