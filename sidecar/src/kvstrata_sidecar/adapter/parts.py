"""The exchanges that a tier makes: look up, load, store, delete, probe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import protocol
from .ages import Ages
from .cluster import Node, Topology
from .cluster_transport import ClusterTransport, key_of
from .counts import Counters
from .enforcement import Refusal
from .ledger import Ledgers
from .part import Gain, Part
from .protocol import Loaded, Place, Terms
from .revoked import RevokedSet
from .sealer import Sealer
from .sweeper import Sweeper
from .tasks import Key, Task
from .wire import Command, ReplyError


@dataclass(frozen=True, slots=True)
class Shared:
    """What the parts of one tier have in common.

    `retention_ms` is what the policy allows, `terms` under what a block is stored now: both are asked at the last
    moment, because a part may have waited. `room` is told whether there was memory for a block where it belongs.
    `sealer` returns the calling thread's own.
    """

    counters: Counters
    ledgers: Ledgers
    sweeper: Sweeper
    ages: Ages
    window_ms: int
    retention_ms: Callable[[str], int | None]
    terms: Callable[[Key, str], Terms]
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
    """Ask which blocks are there; `indices` are their places in LMCache's request."""

    task: Task | None
    keyspace: str
    indices: Sequence[int]
    places: Sequence[Place]
    shared: Shared
    urgent: bool = True

    def run(self, transport: ClusterTransport) -> Gain:
        """Look all of them up in one pipeline."""
        refusal = self.shared.revoked.refusal(transport, self.keyspace)
        if refusal is not None:
            self.refused(refusal)
            return Gain()
        sight = protocol.lookup(transport, self.places, self.shared.retention_ms(self.keyspace))
        for refusal, amount in sight.refused.items():
            self.shared.refuse(self.keyspace, refusal, amount)
        hits = tuple(index for index, there in zip(self.indices, sight.found, strict=True) if there)
        misses = len(self.places) - len(hits) - sum(sight.refused.values())
        for name, amount in (("lookup_hits", len(hits)), ("lookup_misses", misses)):
            if amount:
                self.shared.counters.add(name, amount, self.keyspace)
        return Gain(hits=hits)

    def refused(self, refusal: Refusal) -> None:
        """Count the blocks."""
        self.shared.counters.refuse(refusal, len(self.places), self.keyspace)


@dataclass(slots=True, eq=False)
class LoadPart(Part):
    """Read one block into LMCache's buffer `view`."""

    task: Task | None
    keyspace: str
    index: int
    key: Key
    place: Place
    view: memoryview
    shared: Shared
    urgent: bool = True

    @property
    def size(self) -> int:  # type: ignore[override]
        """The block's bytes."""
        return len(self.view)

    def run(self, transport: ClusterTransport) -> Gain:
        """Read the block if it is there in full."""
        sealer = self.shared.sealer()
        refusal = sealer.refusal(self.keyspace) or self.shared.revoked.refusal(transport, self.keyspace)
        loaded, asked_s = Loaded(refusal=refusal), 0.0
        if refusal is None:
            asked_s = self.shared.ages.now_s()
            opening = sealer.open_into(self.keyspace, self.place.name, self.view)
            loaded = protocol.load(transport, self.place, opening, self.shared.retention_ms(self.keyspace))
        if loaded.refusal is not None:
            self.shared.refuse(self.keyspace, loaded.refusal)
        if not loaded.hit:
            self.shared.counters.add("load_misses")
            if loaded.unreadable:
                self.shared.counters.add("unreadable")
            if loaded.damaged:  # it would be in the way of a good one until it expires
                protocol.discard(transport, [self.place])
            return Gain()
        self.shared.ages.inherit(self.key, loaded.age_ms / 1000, asked_s)
        self.shared.sweeper.touch(self.place)
        self.shared.counters.add("loaded", 1, self.keyspace)
        self.shared.counters.add("loaded_bytes", len(self.view), self.keyspace)
        return Gain(hits=(self.index,), key=self.key, size=len(self.view))

    def refused(self, refusal: Refusal) -> None:
        """Count the block."""
        self.shared.counters.refuse(refusal, 1, self.keyspace)


@dataclass(slots=True, eq=False)
class StorePart(Part):
    """Write one block from LMCache's buffer `view`; `token` tells its reservation from those of other writers.

    `reserved` is whether a reservation may stand that nobody will use.
    """

    task: Task | None
    keyspace: str
    key: Key
    place: Place
    view: memoryview
    shared: Shared
    token: bytes
    urgent: bool = False
    reserved: bool = False

    @property
    def size(self) -> int:  # type: ignore[override]
        """The block's bytes."""
        return len(self.view)

    def run(self, transport: ClusterTransport) -> Gain:
        """Write the block, unless it is there, or policy, budget or the tier's memory have no room for it."""
        try:
            refusal = self._store(transport, self.shared.sealer())
        except ReplyError as error:
            if error.code != "OOM":
                raise
            refusal = Refusal.TIER_FULL
            self.shared.room(self.place, False)
        if refusal is True:
            self.shared.counters.add("stored", 1, self.keyspace)
            self.shared.counters.add("stored_bytes", len(self.view), self.keyspace)
            return Gain(key=self.key, size=len(self.view))
        if refusal is not False:
            self.shared.counters.refuse(refusal, 1, self.keyspace)
        return Gain()

    def _store(self, transport: ClusterTransport, sealer: Sealer) -> Refusal | bool:
        """Return True for a block that was stored, False for one that was there, or why it was not."""
        terms = self.shared.terms(self.key, self.keyspace)
        if terms.life_ms - terms.age_ms <= 0:
            return Refusal.RETENTION
        refusal = sealer.refusal(self.keyspace, seals=True) or self.shared.revoked.refusal(transport, self.keyspace)
        if refusal is not None:
            return refusal
        size = sealer.value_bytes(len(self.view))
        self.reserved = True
        admitted = self.shared.ledgers.admit(transport, self.place, size, self.token, terms)
        if admitted is False:
            self.shared.counters.add("stores_present")
        if admitted is not True:
            self.reserved = False
            return admitted
        parts = sealer.seal(self.keyspace, self.place.name, self.view)
        committed = protocol.write(transport, self.place, parts, self.token, terms, self.shared.window_ms)
        self.reserved = False
        self.shared.room(self.place, True)
        return True if committed else Refusal.LATE

    def refused(self, refusal: Refusal) -> None:
        """Count the block."""
        self.shared.counters.refuse(refusal, 1, self.keyspace)

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        """Give up what was reserved in vain. Not before: a second attempt goes on with the first one's token."""
        if self.reserved:
            self.shared.sweeper.abandon(self.place, self.token)


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

    def run(self, transport: ClusterTransport) -> Gain:
        """Delete them in one pipeline."""
        self.deleted = protocol.discard(transport, self.places)
        return Gain()

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

    def run(self, transport: ClusterTransport) -> Gain:
        """Ask the server."""
        key = None if self.key_prefix is None else key_of(self.node, self.topology, self.key_prefix)
        question = None if key is None else Command(key, (b"STRLEN", key))
        transport.probe(self.node, question, self.give_up_after_s)
        return Gain()

    def over(self, error: Exception | None) -> None:
        """Tell the breaker."""
        if error is None:
            self.node.breaker.probe_succeeded()
        else:
            self.node.breaker.probe_failed(str(error))
        self.wake()
