"""Where the blocks of a request are in one tier, and how workers share them.

That includes pools, which have their own keyspaces, and nodes that had no memory for a block a moment ago.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstrata.contract.store.redis_keys import member_of
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.block_exchanges import BATCH_BLOCKS, BATCH_BYTES, Lent
from kvstrata_sidecar.adapter.redis.client.commands import Place
from kvstrata_sidecar.adapter.redis.client.nodes import Node
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.tier.interface import Block


class Admitted(NamedTuple):
    """A block of a request that may be asked for: its number, place and server; `others` as in Lent."""

    number: int
    place: Place
    node: Node
    others: tuple[Place, ...]


class Placing:
    """Finds the places of blocks; refused blocks are counted and left out."""

    def __init__(self, deps: TierDeps, pools: PoolPlaces) -> None:
        self._deps = deps
        self._domain, self._identity = deps.domain, deps.params.identity
        self._pools = pools

    def place(self, block: Block) -> Place:
        """Return the block's place under its own keyspace."""
        member = member_of(self._identity, block.rank, block.group, block.chunk_hash)
        return Place.at(self._domain, block.keyspace, member, block.chunk_hash)

    def first(self, block: Block) -> Place:
        """Return where a load would ask for a block first."""
        return next(iter(self._pools.of([block]).get(0, ())), None) or self.place(block)

    def own(self, blocks: Sequence[Block]) -> Mapping[tuple[str, Node], list[tuple[int, Place]]]:
        """Return the indices and places of blocks under their own keyspaces, by keyspace and server."""
        groups: dict[tuple[str, Node], list[tuple[int, Place]]] = defaultdict(list)
        for index, place, node, _ in self._admitted(blocks, NOWHERE):
            groups[place.keyspace, node].append((index, place))
        return groups

    def takes(self, block: Block) -> bool:
        if self._deps.refusal(block.keyspace) is not None:
            return False
        node = self._deps.topology.node_of(self.place(block).base)
        return node is not None and node.breaker.closed and not self._deps.full.rests(node)

    def to_store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> list[tuple[str, Node, list[Lent]]]:
        """Return the blocks to store under their own keyspaces, in parts of one keyspace and server."""
        return self._divide(blocks, views, self._admitted(blocks, self._pools.of(blocks), storing=True))

    def to_load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> list[tuple[str, Node, list[Lent]]]:
        """Return the blocks to load, from pools first, in parts of one keyspace and server."""
        return self._divide(blocks, views, self._admitted(blocks, self._pools.of(blocks)))

    def _admitted(
        self, blocks: Sequence[Block], pools: Mapping[int, tuple[Place, ...]], *, storing: bool = False
    ) -> Iterator[Admitted]:
        """Yield the blocks that may be asked for now; `pools` are their places in pools, on reachable servers."""
        refusals: dict[str, Refusal | None] = {}
        readable, tier = self._deps.enforcement.readable, self._deps.tier.name
        for index, block in enumerate(blocks):
            if block.keyspace not in refusals:
                refusals[block.keyspace] = self._deps.refusal(block.keyspace)
            refusal = refusals[block.keyspace]
            if refusal is None and storing and not readable.admits(block.keyspace, block.chunk_hash, tier):
                refusal = Refusal.NOT_IN_POOL
            if refusal is None:
                place, others = self.place(block), pools.get(index, ())
                node = self._deps.topology.node_of(place.base)
                if node is not None and not node.breaker.closed:
                    node = None
                if others and not storing:
                    if node is not None:
                        others = (*others, place)
                    place, *rest = others
                    others, node = tuple(rest), self._deps.topology.node_of(place.base)
                if node is None:
                    refusal = Refusal.BREAKER_OPEN
                elif storing and self._deps.full.rests(node):
                    refusal = Refusal.TIER_FULL
                else:
                    yield Admitted(index, place, node, others)
                    continue
            self._deps.counters.refuse(refusal, 1, block.keyspace)

    def _divide(
        self, blocks: Sequence[Block], views: Sequence[memoryview], admitted: Iterator[Admitted]
    ) -> list[tuple[str, Node, list[Lent]]]:
        """Divide blocks so that all workers have something to do."""
        groups: dict[tuple[str, Node], list[Lent]] = defaultdict(list)
        for index, place, node, others in admitted:
            block = blocks[index]
            groups[block.keyspace, node].append(Lent(index, block.key, place, views[index], others=others))
        share = -(-len(blocks) // self._deps.tier.workers)
        batches: list[tuple[str, Node, list[Lent]]] = []
        for (keyspace, node), lent in groups.items():
            size, batch = 0, list[Lent]()
            for one in lent:
                if batch and (len(batch) == min(share, BATCH_BLOCKS) or size + len(one.view) > BATCH_BYTES):
                    batches.append((keyspace, node, batch))
                    size, batch = 0, []
                batch.append(one)
                size += len(one.view)
            batches.append((keyspace, node, batch))
        return batches


NOWHERE: Mapping[int, tuple[Place, ...]] = {}


class PoolPlaces:
    """Finds places of chunks in pools."""

    def __init__(self, deps: TierDeps) -> None:
        self._deps = deps
        self._domain, self._identity = deps.domain, deps.params.identity

    def usable(self) -> Callable[[str, bytes], Sequence[str]]:
        """Return a function from a reader's chunk to the usable pools' keyspaces, for the blocks of one request."""
        readable = self._deps.enforcement.readable
        refusals: dict[str, Refusal | None] = {}

        def usable(pool: str) -> bool:
            if pool not in refusals:
                refusals[pool] = refusal = self._deps.refusal(pool)
                if refusal is not None:
                    self._deps.counters.refuse(refusal, 1, pool)
            return refusals[pool] is None

        def of(reader: str, chunk_hash: bytes) -> Sequence[str]:
            candidates = readable.candidates(reader, chunk_hash, self._deps.tier.name)
            return candidates and [pool for pool in candidates if usable(pool)]

        return of

    def of(self, blocks: Sequence[Block]) -> Mapping[int, tuple[Place, ...]]:
        """Return the reachable places in pools, in order, by the number of each block that has any."""
        if not self._deps.enforcement.readable.has_readers:
            return NOWHERE
        found: dict[int, tuple[Place, ...]] = {}
        pools_of = self.usable()
        for number, block in enumerate(blocks):
            if not (pools := pools_of(block.keyspace, block.chunk_hash)):
                continue
            member = member_of(self._identity, block.rank, block.group, block.chunk_hash)
            places = (Place.at(self._domain, pool, member, block.chunk_hash) for pool in pools)
            reachable = tuple(place for place in places if self._reachable(place))
            if reachable:
                found[number] = reachable
        return found

    def _reachable(self, place: Place) -> bool:
        node = self._deps.topology.node_of(place.base)
        return node is not None and node.breaker.closed
