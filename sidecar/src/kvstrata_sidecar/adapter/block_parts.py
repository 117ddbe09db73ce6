"""Exchanges that carry blocks, a few of one task and one node at a time: what is asked about each travels together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from . import protocol
from .cluster_transport import ClusterTransport
from .enforcement import Refusal
from .ledger import Demand
from .part import Gain, Part
from .parts import Shared
from .protocol import Loading, Place
from .sealer import Sealer
from .tasks import Key, Task
from .wire import ReplyError

BATCH_BYTES = 8 << 20
"""How much of LMCache's memory one part carries at most, if it is more than a block: what comes to a worker in the
meantime waits for that long."""

BATCH_BLOCKS = 16


class Lent(NamedTuple):
    """A block and the memory of LMCache that it is read from or into; `position` is its place in the request."""

    position: int
    key: Key
    place: Place
    view: memoryview


@dataclass(slots=True, eq=False)
class BlocksPart(Part):
    """What loads and stores have in common."""

    task: Task | None
    keyspace: str
    blocks: Sequence[Lent]
    shared: Shared
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.size = sum(len(block.view) for block in self.blocks)

    def refused(self, refusal: Refusal) -> None:
        """Count the blocks."""
        self.shared.counters.refuse(refusal, len(self.blocks), self.keyspace)


@dataclass(slots=True, eq=False)
class LoadPart(BlocksPart):
    """Read blocks into LMCache's memory."""

    urgent: bool = True

    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        """Read those that are there in full."""
        shared, sealer = self.shared, self.shared.sealer()
        refusal = sealer.refusal(self.keyspace) or shared.revoked.refusal(transport, self.keyspace)
        if refusal is not None:
            shared.refuse(self.keyspace, refusal, len(self.blocks))
            shared.counters.add("load_misses", len(self.blocks))
            return
        asked_s = shared.ages.now_s()
        retention_ms = shared.retention_ms(self.keyspace)
        loads = [
            Loading(one.place, partial(sealer.open_into, self.keyspace, one.place.name, one.view), retention_ms)
            for one in self.blocks
        ]
        try:
            transport.get_each(loads)
        finally:
            self._account(loads, asked_s, gain)
        damaged = [one.place for one, load in zip(self.blocks, loads, strict=True) if load.damaged]
        if damaged:  # they would be in the way of good ones until they expire
            protocol.discard(transport, damaged)

    def _account(self, loads: Sequence[Loading], asked_s: float, gain: Gain) -> None:
        shared = self.shared
        for one, load in zip(self.blocks, loads, strict=True):
            if load.hit:
                shared.ages.inherit(one.key, load.age_ms / 1000, asked_s)
                shared.sweeper.touch(one.place)
                gain.hits.append(one.position)
                gain.carried(one.key, len(one.view))
            elif load.refusal is not None:
                shared.refuse(self.keyspace, load.refusal)
        counters = shared.counters
        if gain.hits:
            counters.add("loaded", len(gain.hits), self.keyspace)
            counters.add("loaded_bytes", sum(gain.sizes), self.keyspace)
        if len(gain.hits) < len(loads):
            counters.add("load_misses", len(loads) - len(gain.hits))
        if unreadable := sum(load.unreadable for load in loads):
            counters.add("unreadable", unreadable)


@dataclass(slots=True, eq=False)
class StorePart(BlocksPart):
    """Write blocks from LMCache's memory; `tokens` tell their reservations from those of other writers.

    `reserved` are blocks of which a reservation may stand that nobody will use.
    """

    tokens: Sequence[bytes] = ()
    urgent: bool = False
    reserved: set[int] = field(default_factory=set)

    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        """Write those that are not there and that policy, budget and the tier's memory have room for."""
        shared, sealer = self.shared, self.shared.sealer()
        refusal = sealer.refusal(self.keyspace, seals=True) or shared.revoked.refusal(transport, self.keyspace)
        if refusal is not None:
            self.refused(refusal)
            return
        outcomes: dict[int, Refusal | bool] = {}
        problem = self._store(transport, sealer, outcomes)
        if isinstance(problem, ReplyError) and problem.code == "OOM":
            outcomes |= dict.fromkeys(range(len(self.blocks)) - outcomes.keys(), Refusal.TIER_FULL)
            problem = None
        self._account(outcomes, gain)
        if problem is not None:
            raise problem

    def _store(
        self, transport: ClusterTransport, sealer: Sealer, outcomes: dict[int, Refusal | bool]
    ) -> Exception | None:
        """Set the outcome of each block: True for one that was stored, False for one that was there, or why not.

        Return what stood in the way of those that have none.
        """
        shared = self.shared
        common = shared.terms(self.keyspace)
        demands: dict[int, Demand] = {}
        for number, one in enumerate(self.blocks):
            age_ms = int(1000 * shared.ages.age_s(one.key))
            if common.life_ms <= age_ms:
                outcomes[number] = Refusal.RETENTION
                continue
            terms = replace(common, age_ms=age_ms) if age_ms else common
            demands[number] = Demand(one.place, sealer.value_bytes(len(one.view)), self.tokens[number], terms)
        self.reserved.update(demands)
        try:
            admitted = shared.ledgers.admit_each(transport, list(demands.values()))
        except ReplyError as error:
            return error
        writes = {}
        for (number, demand), answer in zip(demands.items(), admitted, strict=True):
            if answer is True:
                one = self.blocks[number]
                parts = partial(sealer.seal, self.keyspace, one.place.name, one.view)
                writes[number] = protocol.write(one.place, parts, demand.token, demand.terms, shared.window_ms)
            else:
                outcomes[number] = answer
                self.reserved.discard(number)
        problem: Exception | None = None
        answers = transport.set_each(list(writes.values())) if writes else []
        for number, answer in zip(writes, answers, strict=True):
            if isinstance(answer, Exception):
                problem = answer
            else:
                outcomes[number] = True if answer == "ok" else Refusal.LATE
                self.reserved.discard(number)
        return problem

    def _account(self, outcomes: Mapping[int, Refusal | bool], gain: Gain) -> None:
        shared = self.shared
        for number, outcome in outcomes.items():
            one = self.blocks[number]
            if outcome is True:
                gain.carried(one.key, len(one.view))
            elif outcome is False:
                shared.counters.add("stores_present")
            else:
                shared.counters.refuse(outcome, 1, self.keyspace)
                if outcome is Refusal.TIER_FULL:
                    shared.room(one.place, False)
        if gain.sizes:
            shared.room(self.blocks[0].place, True)
            shared.counters.add("stored", len(gain.sizes), self.keyspace)
            shared.counters.add("stored_bytes", sum(gain.sizes), self.keyspace)

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        """Give up what was reserved in vain. Not before: a second attempt goes on with the first one's tokens."""
        for number in self.reserved:
            self.shared.sweeper.abandon(self.blocks[number].place, self.tokens[number])
