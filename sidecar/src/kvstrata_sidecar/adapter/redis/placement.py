"""Where the blocks of a request are in one tier.

That includes pools, which have their own keyspaces, and nodes that had no memory for a block a moment ago.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client.commands import Place
from kvstrata_sidecar.adapter.redis.client.nodes import Node
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.tier.blocks import Groups, Lent
from kvstrata_sidecar.adapter.tier.interface import Block

PlacesOf = Callable[[Block], tuple[Place, ...]]


class Places:
    """Finds the places of blocks; refused blocks are counted and left out."""

    def __init__(self, deps: TierDeps) -> None:
        self._deps = deps

    def own(self, block: Block) -> Place:
        """Return the block's place under its own keyspace."""
        return Place.at(self._deps.params.domain, block.keyspace, self._deps.member(block), block.chunk_hash)

    def first(self, block: Block) -> Place:
        """Return where a load would ask for a block first."""
        return (*self._in_pools()(block), self.own(block))[0]

    def pools(self) -> Callable[[Block], Sequence[str]]:
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
            elif storing and self._deps.full.rests(node):
                self._deps.counters.refuse(Refusal.TIER_FULL, 1, block.keyspace)
            else:
                yield number, block, node, places

    def _in_pools(self) -> PlacesOf:
        """Return a function from a block of one request to its places in pools, in order, on reachable servers."""
        deps, pools_of = self._deps, self.pools()

        def places_of(block: Block) -> tuple[Place, ...]:
            if not (pools := pools_of(block)):
                return ()
            member = deps.member(block)
            places = (Place.at(deps.params.domain, pool, member, block.chunk_hash) for pool in pools)
            return tuple(place for place in places if deps.topology.usable(place.base))

        return places_of
