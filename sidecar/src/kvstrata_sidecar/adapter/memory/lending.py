"""Who is lent a pool's blocks in memory: what the view in force says, asked at each lookup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.counts import Counters


class PolicyLending:
    """Lends under `enforcement`, and counts for the reader; `lendable` and `returned` are those of `Lending`.

    `tier` names the CPU tier, None without one: then the memory is nobody's but a passage, which all take.
    """

    def __init__(
        self,
        enforcement: Enforcement,
        *,
        tier: str | None,
        lendable: Callable[[Any], bool],
        returned: Callable[[Hashable], None],
        counts: Counters,
    ) -> None:
        self._enforcement = enforcement
        self._tier = tier
        self.lendable = lendable
        self.returned = returned
        self._counts = counts

    def withheld(self, keys: Sequence[Any]) -> set[Any]:
        """Return those of the keys that their readers may not find in this tier, and count them."""
        tier = self._tier
        if tier is None:
            return set()
        asked = Counter(key.cache_salt for key in keys)
        denied = {keyspace for keyspace in asked if self._enforcement.denies(keyspace, tier)}
        for keyspace in denied:
            self._counts.refuse(Refusal.NOT_ALLOWED, asked[keyspace], keyspace)
        return {key for key in keys if key.cache_salt in denied} if denied else set()

    def lenders(self, key: Any) -> Sequence[str]:
        """Return the pools' keyspaces whose chunk the reader of `key` may read now, in the order of asking.

        Those that are not kept in memory are among them: what passes through it may be read as well.
        """
        reader = key.cache_salt
        pools = self._enforcement.readable.candidates(reader, key.chunk_hash)
        if not pools:
            return ()
        return tuple(pool for pool in pools if self._enforcement.refusal(reader, (pool,)) is None)

    def lent(self, key: Any, size_bytes: int) -> None:
        """Count a loan."""
        self._counts.add("lent_blocks", 1, key.cache_salt)
        self._counts.add("lent_bytes", size_bytes, key.cache_salt)
