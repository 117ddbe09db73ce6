"""The exchanges that a tier makes besides loads and stores: look up, delete, probe; and what all have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvstrata_sidecar.adapter.policy.ages import Ages
from kvstrata_sidecar.adapter.policy.enforcement import LoadedFrom, Refusal
from kvstrata_sidecar.adapter.redis.budget.leases import Ledgers
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import Place, Sought, Terms
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Topology, key_of
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.redis.revoked import RevokedSet
from kvstrata_sidecar.adapter.redis.shares import Shares
from kvstrata_sidecar.adapter.redis.sweep.sweeper import Sweeper
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.part import Gain, Part
from kvstrata_sidecar.adapter.tier.sealer import Sealer
from kvstrata_sidecar.adapter.tier.tasks import Key, Task


@dataclass(frozen=True, slots=True)
class Shared:
    """What the parts of one tier have in common.

    `retention_ms` is what the policy allows, `terms` under what a new block is stored now: both are asked at the last
    moment, because a part may have waited. `room` is told whether there was memory for a block where it belongs.
    `sealer` returns the calling thread's own. `loaded_from` is told of each block that was loaded, `warmed` returns
    what memory is being warmed with.
    """

    counters: Counters
    ledgers: Ledgers
    sweeper: Sweeper
    ages: Ages
    window_ms: int
    retention_ms: Callable[[str], int | None]
    terms: Callable[[str], Terms]
    room: Callable[[Place, bool], None]
    sealer: Callable[[], Sealer]
    revoked: RevokedSet
    loaded_from: LoadedFrom
    warmed: Callable[[], Collection[Key]]

    def refuse(self, keyspace: str, refusal: Refusal, amount: int = 1) -> None:
        """Count blocks that the tier may not be used for, and have the scope looked at if it can be repaired."""
        self.counters.refuse(refusal, amount, keyspace)
        if refusal is Refusal.RETENTION:
            self.sweeper.urge(keyspace)


@dataclass(slots=True, eq=False)
class LookupPart(Part[ClusterTransport]):
    """Ask which blocks are there, numbered as in LMCache's request: `sought` by the keyspace that they are kept under.

    `shares` knows the blocks that are asked for in several places, if there are any.
    """

    task: Task | None
    keyspace: str
    sought: Mapping[str, Sequence[Sought]]
    shared: Shared
    shares: Shares | None = None
    urgent: bool = True
    pools: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.pools = tuple(kept for kept in self.sought if kept != self.keyspace)

    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        """Look all of them up in one pipeline."""
        shared = self.shared
        asked: dict[str, Sequence[Sought]] = {}
        for kept, sought in self.sought.items():
            refusal = shared.revoked.refusal(transport, kept)
            if refusal is None:
                asked[kept] = sought
            elif kept == self.keyspace:
                self.refused(refusal)
                return
            else:
                shared.refuse(kept, refusal, _amount(sought))
        told = protocol.lookup_each(transport, [(sought, shared.retention_ms(kept)) for kept, sought in asked.items()])
        sights = dict(zip(asked, told, strict=True))
        for kept, sight in sights.items():
            for refusal, amount in sight.refused.items():
                shared.refuse(kept, refusal, amount)
            gain.hits += sight.hits
        hits, amount = len(gain.hits), sum(map(_amount, asked.values()))
        if (shares := self.shares) is not None:
            hits = sum(number not in shares for number in gain.hits)
            amount = sum(number not in shares for sought in asked.values() for number in _numbers(sought))
        self._count(hits, max(0, amount - hits - sum(sum(sight.refused.values()) for sight in told)))
        self._tell({kept: sight.hits for kept, sight in sights.items()})

    def refused(self, refusal: Refusal) -> None:
        """Count the blocks."""
        self.shared.counters.refuse(refusal, _amount(self.sought.get(self.keyspace, ())), self.keyspace)
        self._tell({})

    def _tell(self, hits: Mapping[str, Sequence[int]]) -> None:
        """Enter what was found of blocks that are asked for elsewhere, too, and count those that are thereby known."""
        if self.shares is not None:
            for kept, sought in self.sought.items():
                pool = None if kept == self.keyspace else kept
                self._count(*self.shares.told(_numbers(sought), hits.get(kept, ()), pool))

    def _count(self, hits: int, misses: int) -> None:
        for name, amount in (("lookup_hits", hits), ("lookup_misses", misses)):
            if amount:
                self.shared.counters.add(name, amount, self.keyspace)


@dataclass(slots=True, eq=False)
class DeletePart(Part[ClusterTransport]):
    """Delete blocks of one keyspace; `done` is set when it is over and `deleted` says which were there."""

    keyspace: str
    places: Sequence[Place]
    counters: Counters
    task: Task | None = None
    urgent: bool = True
    deleted: list[bool] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, transport: ClusterTransport, gain: Gain) -> None:  # noqa: ARG002
        """Delete them in one pipeline."""
        self.deleted = protocol.discard(transport, self.places)

    def refused(self, refusal: Refusal) -> None:
        """Count the blocks."""
        self.counters.refuse(refusal, len(self.places), self.keyspace)

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        """Release whoever waits."""
        self.done.set()


@dataclass(slots=True, eq=False)
class DiscardPart(DeletePart):
    """Delete a reader's own copies of what a pool has; nobody waits for it."""

    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        """Delete them in one pipeline."""
        DeletePart.run(self, transport, gain)
        self.counters.add("copies_discarded", sum(self.deleted), self.keyspace)


@dataclass(slots=True, eq=False)
class ProbePart(Part[ClusterTransport]):
    """See whether a node answers, on behalf of its breaker.

    In a cluster a key in one of its slots is asked for, too, because a server that cannot serve any answers a PING all
    the same; `key_prefix` is what such a key begins with, None on a single server.
    """

    node: Node
    topology: Topology
    key_prefix: str | None
    give_up_after_s: float
    wake: Callable[[], None]
    task: Task | None = None
    keyspace: str | None = None
    urgent: bool = True

    def run(self, transport: ClusterTransport, gain: Gain) -> None:  # noqa: ARG002
        """Ask the server."""
        key = None if self.key_prefix is None else key_of(self.node, self.topology, self.key_prefix)
        question = None if key is None else Command(key, (b"STRLEN", key))
        transport.probe(self.node, question, self.give_up_after_s)

    def over(self, error: Exception | None) -> None:
        """Tell the breaker."""
        if error is None:
            self.node.breaker.probe_succeeded()
        else:
            self.node.breaker.probe_failed(str(error))
        self.wake()


def _amount(sought: Sequence[Sought]) -> int:
    return sum(len(one.numbers) for one in sought)


def _numbers(sought: Sequence[Sought]) -> list[int]:
    return [number for one in sought for number in one.numbers]
