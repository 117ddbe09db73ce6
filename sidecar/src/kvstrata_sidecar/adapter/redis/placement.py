"""Where the blocks of a request are in one tier: under which keyspace, at which server.

That includes pools, which have their own keyspaces, and nodes that had no memory for a block a moment ago.

LMCache asks every tier for all blocks of a prompt, even those in memory, and waits for the slowest. So a tier is not
asked for blocks that a faster one has. Their uses are passed on now and then, because the tier would otherwise evict
the most used blocks first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from kvstrata.contract.store.redis_keys import bucket_of
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client.commands import Place, Sought, base_of
from kvstrata_sidecar.adapter.redis.client.nodes import Node
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.exchanges import Shares
from kvstrata_sidecar.adapter.redis.recent import Recent
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import Groups, Lent

REMEMBER_S = 10.0
"""Time for which a chunk is asked for in the pool that had it, and nowhere else, and not where it was unreadable."""

HINT_INTERVAL_S = 60.0
MAX_HINTS = 65_536
"""Blocks whose use is passed on within an interval; the uses of further ones are not."""

PlacesOf = Callable[[Block], tuple[Place, ...]]


@dataclass(eq=False)
class Places:
    """Finds the places of blocks; refused blocks are counted and left out. `held_faster` returns whether a faster tier
    has a block and keeps it for the present request; `twice` receives blocks that their keyspace need not hold, because
    a pool has them."""

    _deps: TierDeps
    _held_faster: Callable[[Block], bool]
    _twice: Callable[[Sequence[Block]], None]

    def __post_init__(self) -> None:
        self._found: Recent[tuple[str, bytes], str] = Recent(self._deps.clock, REMEMBER_S)
        self._hints: Recent[Hashable, None] = Recent(self._deps.clock, HINT_INTERVAL_S, MAX_HINTS)

    def own(self, block: Block) -> Place:
        """Return the block's place under its own keyspace."""
        return Place.at(self._deps.params.domain, block.keyspace, self._deps.member(block), block.chunk_hash)

    def first(self, block: Block) -> Place:
        """Return where a load would ask for a block first."""
        return (*self._in_pools()(block), self.own(block))[0]

    def by_node(self, blocks: Sequence[Block]) -> Mapping[tuple[str, Node], list[tuple[int, Place]]]:
        """Return the indices and places of blocks under their own keyspaces, by keyspace and server."""
        groups: dict[tuple[str, Node], list[tuple[int, Place]]] = defaultdict(list)
        for index, _, node, (place,) in self._reachable(blocks, lambda block: (self.own(block),)):
            groups[place.keyspace, node].append((index, place))
        return groups

    def to_store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> Groups[Place]:
        """Return the blocks to store under their own keyspaces; `others` are their places in pools."""
        in_pools = self._in_pools()
        return self._groups(blocks, views, lambda block: (self.own(block), *in_pools(block)), storing=True)

    def to_load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> Groups[Place]:
        """Return the blocks to load, from pools first."""
        in_pools = self._in_pools()

        def places_of(block: Block) -> tuple[Place, ...]:
            own = self.own(block)
            return (*in_pools(block), own) if self._deps.topology.usable(own.base) else in_pools(block)

        return self._groups(blocks, views, places_of)

    def to_look_up(
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

    def _groups(
        self, blocks: Sequence[Block], views: Sequence[memoryview], places_of: PlacesOf, *, storing: bool = False
    ) -> Groups[Place]:
        groups: dict[tuple[str, Node], list[Lent[Place]]] = defaultdict(list)
        for index, block, node, (place, *others) in self._reachable(blocks, places_of, storing=storing):
            groups[block.keyspace, node].append(Lent(index, block.key, place, views[index], tuple(others)))
        return groups

    def _reachable(
        self, blocks: Sequence[Block], places_of: PlacesOf, *, storing: bool = False
    ) -> Iterator[tuple[int, Block, Node, tuple[Place, ...]]]:
        """Yield the blocks that may be asked for now: number, block, the server of its first place, and its places."""
        for number, block in self._deps.admitted(blocks, storing=storing):
            places = places_of(block)
            node = self._deps.topology.usable(places[0].base) if places else None
            if node is None:
                self._deps.counters.refuse(Refusal.BREAKER_OPEN, 1, block.keyspace)
            elif storing and self._deps.clock() < (node.full_until_s or 0.0):
                self._deps.counters.refuse(Refusal.TIER_FULL, 1, block.keyspace)
            else:
                yield number, block, node, places

    def _in_pools(self) -> PlacesOf:
        """Return a function from a block of one request to its places in pools, in order, on reachable servers."""
        deps, pools_of = self._deps, self._pools()

        def places_of(block: Block) -> tuple[Place, ...]:
            if not (pools := pools_of(block)):
                return ()
            member = deps.member(block)
            places = (Place.at(deps.params.domain, pool, member, block.chunk_hash) for pool in pools)
            return tuple(place for place in places if deps.topology.usable(place.base))

        return places_of

    def _pools(self) -> Callable[[Block], Sequence[str]]:
        """Return a function from a block of one request to the keyspaces of usable pools that may have it."""
        readable, tier = self._deps.enforcement.readable, self._deps.tier.name

        @cache
        def usable(pool: str) -> bool:
            refusal = self._deps.refusal(pool)
            if refusal is not None:
                self._deps.counters.refuse(refusal, 1, pool)
            return refusal is None

        return lambda block: [
            pool for pool in readable.candidates(block.keyspace, block.chunk_hash, tier) if usable(pool)
        ]

    def _remember(self, blocks: Sequence[Block], found: Mapping[int, str]) -> None:
        for number, pool in found.items():
            self._found.put((blocks[number].keyspace, self._deps.member(blocks[number]).encode()), pool)

    def _sought(self, blocks: Sequence[Block], pooled: set[int]) -> Mapping[tuple[str, str, int], Sought]:
        """Return the blocks to look up, by reader, keyspace and bucket; add those also sought in pools to `pooled`."""
        buckets: dict[tuple[str, str, int], Sought] = {}
        shadowed: list[Block] = []
        pools_of = self._pools()
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
                self._deps.inbox.touch(self.first(block))
        for (name, keyspace), amount in counts.items():
            self._deps.counters.add(name, amount, keyspace)
