"""Where pools keep what a reader asks for, in one tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstrata.contract.store.redis_keys import member_of
from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.redis.client.commands import Place
from kvstrata_sidecar.adapter.redis.client.nodes import Topology
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.interface import Block

NOWHERE: Mapping[int, tuple[Place, ...]] = {}


class PoolPlaces:
    """Finds the places of chunks in pools that their reader may read and that are kept in the tier named `tier`.

    `refusal` returns why a pool's keyspace may not be used now, None if it may.
    """

    def __init__(
        self,
        params: AdapterParams,
        tier: str,
        topology: Topology,
        enforcement: Enforcement,
        refusal: Callable[[str], Refusal | None],
        counters: Counters,
    ) -> None:
        self._domain, self._identity, self._tier = params.domain, params.identity, tier
        self._topology = topology
        self._enforcement = enforcement
        self._refusal = refusal
        self._counters = counters

    def usable(self) -> Callable[[str, bytes], Sequence[str]]:
        """Return what tells the pools' keyspaces that may have a reader's chunk, for the blocks of one request."""
        readable = self._enforcement.readable
        refusals: dict[str, Refusal | None] = {}

        def usable(pool: str) -> bool:
            if pool not in refusals:
                refusals[pool] = refusal = self._refusal(pool)
                if refusal is not None:
                    self._counters.refuse(refusal, 1, pool)
            return refusals[pool] is None

        def of(reader: str, chunk_hash: bytes) -> Sequence[str]:
            candidates = readable.candidates(reader, chunk_hash, self._tier)
            return candidates and [pool for pool in candidates if usable(pool)]

        return of

    def of(self, blocks: Sequence[Block]) -> Mapping[int, tuple[Place, ...]]:
        """Return the places to ask, in order, of the blocks that have any, by their number; servers that are away are
        left out.
        """
        if not self._enforcement.readable.anybody_reads:
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
        node = self._topology.node_of(place.base)
        return node is not None and node.breaker.closed
