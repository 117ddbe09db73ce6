"""Exchanges that carry blocks, a few of one task and one node at a time: what is asked about each travels together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from . import protocol
from .cluster_transport import ClusterTransport
from .enforcement import Refusal
from .ledger import Demand
from .part import Gain, Part
from .parts import Shared
from .protocol import Loading, Place
from .sealer import Sealer
from .tasks import Key, Task
from .values import Write
from .wire import ReplyError

BATCH_BYTES = 8 << 20
"""How much of LMCache's memory one part carries at most, if it is more than a block: what comes to a worker in the
meantime waits for that long."""

BATCH_BLOCKS = 16


class Lent(NamedTuple):
    """A block and the memory of LMCache that it is read from or into; `position` is its place in the request.

    `token` tells the reservation of a block that is stored from those of other writers.
    """

    position: int
    key: Key
    place: Place
    view: memoryview
    token: bytes = b""


@dataclass(slots=True, eq=False)
class BlocksPart(Part):
    """What loads and stores have in common. `blocks` are those of which the outcome is open: what is settled is counted
    and done with, so that a second attempt leaves it alone.
    """

    task: Task | None
    keyspace: str
    blocks: Sequence[Lent]
    shared: Shared
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.size = sum(len(block.view) for block in self.blocks)

    def refused(self, refusal: Refusal) -> None:
        """Count the blocks of which nothing else is known."""
        self.shared.counters.refuse(refusal, len(self.blocks), self.keyspace)


@dataclass(slots=True, eq=False)
class LoadPart(BlocksPart):
    """Read blocks into LMCache's memory."""

    urgent: bool = True

    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        """Read those that are there in full."""
        shared, sealer, blocks = self.shared, self.shared.sealer(), self.blocks
        refusal = sealer.refusal(self.keyspace) or shared.revoked.refusal(transport, self.keyspace)
        if refusal is not None:
            shared.refuse(self.keyspace, refusal, len(blocks))
            shared.counters.add("load_misses", len(blocks))
            return
        asked_s = shared.ages.now_s()
        retention_ms = shared.retention_ms(self.keyspace)
        loads = [
            Loading(one.place, partial(sealer.open_into, self.keyspace, one.place.name, one.view), retention_ms)
            for one in blocks
        ]
        try:
            transport.get_each(loads)
        finally:
            # A block that counts is never read again: its memory is LMCache's from now on.
            self._keep(loads, asked_s, gain)
        misses = [(one, load) for one, load in zip(blocks, loads, strict=True) if not load.hit]
        if misses:
            self._miss(transport, misses)

    def _keep(self, loads: Sequence[Loading], asked_s: float, gain: Gain) -> None:
        shared = self.shared
        left: list[Lent] = []
        for one, load in zip(self.blocks, loads, strict=True):
            if not load.hit:
                left.append(one)
                continue
            shared.ages.inherit(one.key, load.age_ms / 1000, asked_s)
            shared.sweeper.touch(one.place)
            gain.hits.append(one.position)
            gain.carried(one.key, len(one.view))
        self.blocks = left
        if gain.hits:
            shared.counters.add("loaded", len(gain.hits), self.keyspace)
            shared.counters.add("loaded_bytes", sum(gain.sizes), self.keyspace)

    def _miss(self, transport: ClusterTransport, misses: Sequence[tuple[Lent, Loading]]) -> None:
        counters = self.shared.counters
        counters.add("load_misses", len(misses))
        for _, load in misses:
            if load.refusal is not None:
                self.shared.refuse(self.keyspace, load.refusal)
            elif load.unreadable:
                counters.add("unreadable")
        damaged = [one.place for one, load in misses if load.damaged]
        if damaged:  # they would be in the way of good ones until they expire
            protocol.discard(transport, damaged)


@dataclass(slots=True, eq=False)
class StorePart(BlocksPart):
    """Write blocks from LMCache's memory. `reserved` are places, by token, whose reservations may stand in vain."""

    urgent: bool = False
    reserved: dict[bytes, Place] = field(default_factory=dict)

    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        """Write those that are not there and that policy, budget and the tier's memory have room for."""
        shared, sealer = self.shared, self.shared.sealer()
        refusal = sealer.refusal(self.keyspace, seals=True) or shared.revoked.refusal(transport, self.keyspace)
        if refusal is not None:
            self.refused(refusal)
            return
        outcomes: dict[bytes, Refusal | bool | Exception] = {}
        try:
            self._store(transport, sealer, outcomes)
        finally:
            problem = self._settle(outcomes, gain)
        if problem is not None:
            raise problem

    def _store(
        self, transport: ClusterTransport, sealer: Sealer, outcomes: dict[bytes, Refusal | bool | Exception]
    ) -> None:
        """Set outcomes by token: True for a block that was stored, False for one that was there, or why not."""
        shared = self.shared
        common = shared.terms(self.keyspace)
        demands: list[tuple[Lent, Demand]] = []
        for one in self.blocks:
            age_ms = int(1000 * shared.ages.age_s(one.key))
            if common.life_ms <= age_ms:
                outcomes[one.token] = Refusal.RETENTION
                continue
            terms = replace(common, age_ms=age_ms) if age_ms else common
            demands.append((one, Demand(one.place, sealer.value_bytes(len(one.view)), one.token, terms)))
            self.reserved[one.token] = one.place
        admitted = shared.ledgers.admit_each(transport, [demand for _, demand in demands])
        writes: dict[bytes, Write] = {}
        for (one, demand), answer in zip(demands, admitted, strict=True):
            if answer is True:
                parts = partial(sealer.seal, self.keyspace, one.place.name, one.view)
                writes[one.token] = protocol.write(one.place, parts, one.token, demand.terms, shared.window_ms)
                continue
            outcomes[one.token] = answer
            if not isinstance(answer, Exception):
                del self.reserved[one.token]
        if not writes:
            return
        try:
            transport.set_each(list(writes.values()))
        finally:
            for token, write in writes.items():
                if write.answer is not None:
                    outcomes[token] = self._outcome(token, write.answer)

    def _outcome(self, token: bytes, answer: Any) -> Refusal | bool | Exception:
        if isinstance(answer, Exception):
            return answer
        del self.reserved[token]  # it is committed, or another's
        return True if answer == "ok" else Refusal.LATE

    def _settle(self, outcomes: Mapping[bytes, Refusal | bool | Exception], gain: Gain) -> Exception | None:
        """Count what is settled, leave the rest in `blocks`, and return what stood in its way."""
        shared, full = self.shared, False
        problem: Exception | None = None
        left: list[Lent] = []
        for one in self.blocks:
            outcome = outcomes.get(one.token)
            if isinstance(outcome, ReplyError) and outcome.code == "OOM":
                outcome, full = Refusal.TIER_FULL, True
                shared.room(one.place, False)
            if outcome is True:
                gain.carried(one.key, len(one.view))
            elif outcome is False:
                shared.counters.add("stores_present")
            elif isinstance(outcome, Refusal):
                shared.counters.refuse(outcome, 1, self.keyspace)
            else:
                left.append(one)
                problem = outcome or problem
        if gain.sizes:
            if not full:
                shared.room(self.blocks[0].place, True)
            shared.counters.add("stored", len(gain.sizes), self.keyspace)
            shared.counters.add("stored_bytes", sum(gain.sizes), self.keyspace)
        self.blocks = left
        return problem

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        """Give up what was reserved in vain. Not before: a second attempt goes on with the first one's tokens."""
        for token, place in self.reserved.items():
            self.shared.sweeper.abandon(place, token)
