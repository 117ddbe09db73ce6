"""Pools' blocks that a slower tier is loading for a reader.

They come under the reader's key, and LMCache would keep them there: a copy for each reader, in its own budget. What
comes first of a chunk becomes the pool's own block instead, lent to the reader that asked; what comes of it meanwhile
for others, or of a pool that is not kept in memory, goes with their requests.

Nothing but a pool's own bytes may become its block. A load may end in vain after its tier told of it, and the next one
may find the reader's own copy, so each load tells where it came from, and what counts is the memory that it filled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from kvstrata_sidecar.adapter.tier.buffers import address_of

MAX_EXPECTED = 65_536
"""Blocks of which it is remembered; beyond, the eldest are kept like any other block."""


class Borrowed:
    """Keys whose next arrival is a pool's. Safe to share between threads.

    `keeps(keyspace, chunk_hash)` says whether a pool's chunk may stay in memory.
    """

    def __init__(self, keeps: Callable[[str, bytes], bool], limit: int = MAX_EXPECTED) -> None:
        self._keeps = keeps
        self._limit = limit
        self._lock = threading.Lock()
        self._expected: OrderedDict[Hashable, tuple[str, int | None]] = OrderedDict()

    def loaded(self, key: Any, kept: str, view: memoryview) -> None:
        """Note under which keyspace a tier found a block, which is in `view` now; before the load is answered."""
        if kept != key.cache_salt:
            self.expect(key, kept, address_of(view))
        elif self._expected:
            with self._lock:
                self._expected.pop(key, None)

    def expect(self, key: Hashable, keyspace: str, address: int | None) -> None:
        """Note that a block of a pool's keyspace is at this address, and about to arrive under a reader's key."""
        with self._lock:
            self._expected[key] = keyspace, address
            self._expected.move_to_end(key)
            if len(self._expected) > self._limit:
                self._expected.popitem(last=False)

    def arrived(self, keys: Iterable[Any], address: Callable[[Any], int | None]) -> list[tuple[Any, str | None]]:
        """Return, once, which of these keys' blocks are a pool's, and its keyspace where it may keep them.

        `address` tells where a key's block is: what is elsewhere than it was loaded is another block of that name.
        """
        if not self._expected:
            return []
        with self._lock:
            expected = [(key, *self._expected.pop(key)) for key in keys if key in self._expected]
        found = [(key, pool) for key, pool, filled in expected if filled is not None and address(key) == filled]
        return [(key, pool if self._keeps(pool, key.chunk_hash) else None) for key, pool in found]
