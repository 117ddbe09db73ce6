"""Which blocks of a lookup a tier is asked for, under which keyspace, at which server.

LMCache asks every tier for all blocks of a prompt, even those in memory, and waits for the slowest. So a tier is not
asked for blocks that a faster one has. Their uses are passed on now and then, because the tier would otherwise evict
the most used blocks first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstrata.contract.store.redis_keys import bucket_of, member_of
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client.commands import Place, Sought
from kvstrata_sidecar.adapter.redis.client.nodes import Node
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.exchanges import Shares
from kvstrata_sidecar.adapter.redis.placement import PoolPlaces
from kvstrata_sidecar.adapter.redis.recent import Recent
from kvstrata_sidecar.adapter.tier.interface import Block

REMEMBER_S = 10.0
"""Time for which a chunk is asked for in the pool that had it, and nowhere else."""


class Division(NamedTuple):
    """Blocks to ask for, by reader and server, then by keyspace; `shares` has those sought in several places."""

    groups: Mapping[tuple[str, Node], Mapping[str, Sequence[Sought]]]
    shares: Shares | None


class Lookups:
    """Divides lookups of one tier by keyspace, bucket and server.

    Refused blocks are counted. `shadow` knows the blocks of faster tiers; `twice` receives blocks that their keyspace
    need not hold, because a pool has them.
    """

    def __init__(
        self, deps: TierDeps, shadow: Shadow, pools: PoolPlaces, twice: Callable[[Sequence[Block]], None]
    ) -> None:
        self._deps = deps
        self._domain, self._identity = deps.domain, deps.params.identity
        self._shadow = shadow
        self._pools = pools
        self._twice = twice
        self._found: Recent[tuple[str, bytes], str] = Recent(deps.clock, REMEMBER_S)

    def divide(self, blocks: Sequence[Block]) -> Division:
        groups: dict[tuple[str, Node], dict[str, list[Sought]]] = defaultdict(dict)
        pooled: set[int] = set()
        for reader, kept, sought in self._sought(blocks, pooled):
            node = self._deps.topology.node_of(sought.base)
            if node is None or not node.breaker.closed:
                self._deps.counters.refuse(Refusal.BREAKER_OPEN, len(sought.numbers), kept)
            else:
                groups[reader, node].setdefault(kept, []).append(sought)
        if not pooled:
            return Division(groups, None)
        asked = Counter(
            number
            for by_keyspace in groups.values()
            for some in by_keyspace.values()
            for one in some
            for number in pooled.intersection(one.numbers)
        )
        shares = Shares(
            asked,
            lambda numbers: self._twice([blocks[number] for number in numbers]),
            lambda found: self._remember(blocks, found),
        )
        return Division(groups, shares)

    def _remember(self, blocks: Sequence[Block], found: Mapping[int, str]) -> None:
        for number, pool in found.items():
            self._found.put((blocks[number].keyspace, self._member(blocks[number])), pool)

    def _member(self, block: Block) -> bytes:
        return member_of(self._identity, block.rank, block.group, block.chunk_hash).encode()

    def _sought(self, blocks: Sequence[Block], pooled: set[int]) -> list[tuple[str, str, Sought]]:
        """Return the blocks to look up, by reader, keyspace and bucket; add those also sought in pools to `pooled`."""
        refusals: dict[str, Refusal | None] = {}
        buckets: dict[tuple[str, str, int], Sought] = {}
        shadowed: list[Block] = []
        pools_of = self._pools.usable()
        for number, block in enumerate(blocks):
            _, keyspace, _, _, chunk_hash = block
            if keyspace not in refusals:
                refusals[keyspace] = self._deps.refusal(keyspace)
            if (refusal := refusals[keyspace]) is not None:
                self._deps.counters.refuse(refusal, 1, keyspace)
                continue
            if self._shadow.holds(block):
                shadowed.append(block)
                continue
            bucket = bucket_of(chunk_hash)
            member = self._member(block)
            places = [keyspace]
            if pools := pools_of(keyspace, chunk_hash):
                pool = self._found.get((keyspace, member))
                if pool is not None and pool in pools:
                    places = [pool]
                else:
                    pooled.add(number)
                    places += pools
            for kept in places:
                which = keyspace, kept, bucket
                if (sought := buckets.get(which)) is None:
                    sought = buckets[which] = Sought.at(self._domain, kept, bucket)
                sought.members.append(member)
                sought.numbers.append(number)
        self._shadow.used(shadowed)
        return [(reader, kept, sought) for (reader, kept, _), sought in buckets.items()]


HINT_INTERVAL_S = 60.0
MAX_HINTS = 65_536
"""Blocks whose use is passed on within an interval; the uses of further ones are not."""


class Shadow:
    """The blocks that faster tiers serve. For the thread of lookups alone.

    `holds` returns whether a faster tier has a block and keeps it for the present request, `place` its place in this
    tier, where uses are recorded. Blocks that memory is being warmed with are not used.
    """

    def __init__(self, deps: TierDeps, holds: Callable[[Block], bool], place: Callable[[Block], Place]) -> None:
        self.holds = holds
        self._deps = deps
        self._place = place
        self._hints: Recent[Hashable, None] = Recent(deps.clock, HINT_INTERVAL_S, MAX_HINTS)

    def used(self, blocks: Iterable[Block]) -> None:
        shadowed: Counter[str] = Counter()
        hints: Counter[str] = Counter()
        warmed = self._deps.enforcement.warmed
        for block in blocks:
            shadowed[block.keyspace] += 1
            if block.key not in warmed and self._hints.put_new(block.key, None):
                hints[block.keyspace] += 1
                self._deps.inbox.touch(self._place(block))
        for name, amounts in (("shadowed", shadowed), ("hints", hints)):
            for keyspace, amount in amounts.items():
                self._deps.count(name, amount, keyspace)
