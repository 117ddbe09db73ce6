"""Which blocks of a lookup a tier is asked for, under which keyspace, at which server.

LMCache asks every tier for all blocks of a prompt, even those in memory, and waits for the slowest. So a tier is not
asked for blocks that a faster one has. Their uses are passed on now and then, because the tier would otherwise evict
the most used blocks first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstrata.contract.store.redis_keys import bucket_of
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client.commands import Sought, base_of
from kvstrata_sidecar.adapter.redis.client.nodes import Node
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.exchanges import Shares
from kvstrata_sidecar.adapter.redis.placement import Places
from kvstrata_sidecar.adapter.redis.recent import Recent
from kvstrata_sidecar.adapter.tier.interface import Block

REMEMBER_S = 10.0
"""Time for which a chunk is asked for in the pool that had it, and nowhere else, and not where it was unreadable."""

HINT_INTERVAL_S = 60.0
MAX_HINTS = 65_536
"""Blocks whose use is passed on within an interval; the uses of further ones are not."""


@dataclass(eq=False)
class Lookups:
    """Divides lookups of one tier by keyspace, bucket and server; refused blocks are counted. `held_faster` returns
    whether a faster tier has a block and keeps it for the present request; `twice` receives blocks that their keyspace
    need not hold, because a pool has them."""

    _deps: TierDeps
    _places: Places
    _held_faster: Callable[[Block], bool]
    _twice: Callable[[Sequence[Block]], None]

    def __post_init__(self) -> None:
        self._found: Recent[tuple[str, bytes], str] = Recent(self._deps.clock, REMEMBER_S)
        self._hints: Recent[Hashable, None] = Recent(self._deps.clock, HINT_INTERVAL_S, MAX_HINTS)

    def divide(
        self, blocks: Sequence[Block]
    ) -> tuple[Mapping[tuple[str, Node], Mapping[str, Sequence[Sought]]], Shares | None]:
        """Return the blocks to ask for, by reader and server, then by keyspace; and the shares of those sought in
        several places, if any."""
        groups: dict[tuple[str, Node], dict[str, list[Sought]]] = defaultdict(dict)
        pooled: set[int] = set()
        asked: Counter[int] = Counter()
        for (reader, kept, _), sought in self._sought(blocks, pooled).items():
            node = self._deps.topology.usable(sought.base)
            if node is None:
                self._deps.counters.refuse(Refusal.BREAKER_OPEN, len(sought.numbers), kept)
            else:
                groups[reader, node].setdefault(kept, []).append(sought)
                asked.update(pooled.intersection(sought.numbers))
        if not pooled:
            return groups, None
        return groups, Shares(
            asked,
            lambda numbers: self._twice([blocks[number] for number in numbers]),
            lambda found: self._remember(blocks, found),
        )

    def _remember(self, blocks: Sequence[Block], found: Mapping[int, str]) -> None:
        for number, pool in found.items():
            self._found.put((blocks[number].keyspace, self._deps.member(blocks[number]).encode()), pool)

    def _sought(self, blocks: Sequence[Block], pooled: set[int]) -> Mapping[tuple[str, str, int], Sought]:
        """Return the blocks to look up, by reader, keyspace and bucket; add those also sought in pools to `pooled`."""
        buckets: dict[tuple[str, str, int], Sought] = {}
        shadowed: list[Block] = []
        pools_of = self._places.pools()
        for number, block in self._deps.admitted(blocks):
            if self._held_faster(block):
                shadowed.append(block)
                continue
            bucket, member = bucket_of(block.chunk_hash), self._deps.member(block).encode()
            keyspaces = [block.keyspace]
            if pools := pools_of(block):
                pool = self._found.get((block.keyspace, member))
                if pool is not None and pool in pools:
                    keyspaces = [pool]
                else:
                    pooled.add(number)
                    keyspaces += pools
            for kept in keyspaces:
                if self._deps.unread.get((kept, member)):
                    continue
                which = block.keyspace, kept, bucket
                if (sought := buckets.get(which)) is None:
                    sought = buckets[which] = Sought(base_of(self._deps.params.domain, kept, bucket), [], [])
                sought.members.append(member)
                sought.numbers.append(number)
        self._pass_on(shadowed)
        return buckets

    def _pass_on(self, shadowed: Iterable[Block]) -> None:
        """Record uses of blocks that a faster tier serves."""
        counts: Counter[tuple[str, str]] = Counter()
        for block in shadowed:
            counts["shadowed", block.keyspace] += 1
            if self._hints.put_new(block.key, None):
                counts["hints", block.keyspace] += 1
                self._deps.inbox.touch(self._places.first(block))
        for (name, keyspace), amount in counts.items():
            self._deps.counters.add(name, amount, keyspace)
