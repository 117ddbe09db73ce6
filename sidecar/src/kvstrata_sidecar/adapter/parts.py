"""The exchanges that a tier makes besides loads and stores: look up, delete, probe; and what all have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import protocol
from .ages import Ages
from .cluster import Node, Topology, key_of
from .cluster_transport import ClusterTransport
from .counts import Counters
from .enforcement import Refusal
from .ledger import Ledgers
from .part import Gain, Part
from .protocol import Place, Sought, Terms
from .revoked import RevokedSet
from .sealer import Sealer
from .sweeper import Sweeper
from .tasks import Task
from .wire import Command


@dataclass(frozen=True, slots=True)
class Shared:
    """What the parts of one tier have in common.

    `retention_ms` is what the policy allows, `terms` under what a new block is stored now: both are asked at the last
    moment, because a part may have waited. `room` is told whether there was memory for a block where it belongs.
    `sealer` returns the calling thread's own.
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

    def refuse(self, keyspace: str, refusal: Refusal, amount: int = 1) -> None:
        """Count blocks that the tier may not be used for, and have the scope looked at if it can be repaired."""
        self.counters.refuse(refusal, amount, keyspace)
        if refusal is Refusal.RETENTION:
            self.sweeper.urge(keyspace)


@dataclass(slots=True, eq=False)
class LookupPart(Part):
    """Ask which blocks are there; they are numbered as in LMCache's request."""

    task: Task | None
    keyspace: str
    sought: Sequence[Sought]
    shared: Shared
    urgent: bool = True

    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        """Look all of them up in one pipeline."""
        refusal = self.shared.revoked.refusal(transport, self.keyspace)
        if refusal is not None:
            self.refused(refusal)
            return
        sight = protocol.lookup(transport, self.sought, self.shared.retention_ms(self.keyspace))
        for refusal, amount in sight.refused.items():
            self.shared.refuse(self.keyspace, refusal, amount)
        gain.hits = sight.hits
        misses = self._count() - len(sight.hits) - sum(sight.refused.values())
        for name, amount in (("lookup_hits", len(sight.hits)), ("lookup_misses", misses)):
            if amount:
                self.shared.counters.add(name, amount, self.keyspace)

    def refused(self, refusal: Refusal) -> None:
        """Count the blocks."""
        self.shared.counters.refuse(refusal, self._count(), self.keyspace)

    def _count(self) -> int:
        return sum(len(one.numbers) for one in self.sought)


@dataclass(slots=True, eq=False)
class DeletePart(Part):
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
class ProbePart(Part):
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
