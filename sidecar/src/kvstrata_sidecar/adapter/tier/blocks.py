"""Blocks of requests in a tier behind the server's own memory: which are admitted, and the parts that carry them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

from kvstrata.contract.messages.engine_identity import UNRESOLVED
from kvstrata_sidecar.adapter.params import AdapterParams, FileTierParams, TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.counts import HIT, Counters
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import CarrierT, Gain, Key, Part, Task

T = TypeVar("T")
ParamsT = TypeVar("ParamsT", bound=TierParams | FileTierParams)
PlaceT = TypeVar("PlaceT")
DepsT = TypeVar("DepsT", bound="Deps")  # type: ignore[type-arg]


class Lent(NamedTuple, Generic[PlaceT]):
    """A block and the memory of LMCache that it is read from or into; `position` is its number in the request. `place`
    is where the tier has it, `others` are a load's next places, or a store's pools."""

    position: int
    key: Key
    place: PlaceT
    view: memoryview
    others: tuple[PlaceT, ...] = ()


Groups = Mapping[tuple[str, Any], Sequence[Lent[PlaceT]]]
"""Blocks to carry, by keyspace and label of the queue: in Redis their server."""


@dataclass(frozen=True, slots=True)
class Deps(ABC, Generic[ParamsT, PlaceT]):
    """Dependencies that the parts of any tier share."""

    params: AdapterParams
    tier: ParamsT
    enforcement: Enforcement
    counters: Counters

    @abstractmethod
    def refusal(self, keyspace: str, *, storing: bool = False) -> Refusal | None:
        """Return why a keyspace may not be used here now, None if it may."""

    @abstractmethod
    def keyspace_at(self, place: PlaceT) -> str:
        """Return the keyspace under which a block is kept at a place."""

    def admitted(self, blocks: Sequence[Block], *, storing: bool = False) -> Iterator[tuple[int, Block]]:
        """Yield number and block of those that policy, keys and tier admit now; the others are counted."""
        readable, refusal_of = self.enforcement.readable, cache(partial(self.refusal, storing=storing))
        for number, block in enumerate(blocks):
            refusal = Refusal.NO_FINGERPRINT if block.fingerprint == UNRESOLVED else refusal_of(block.keyspace)
            if refusal is None and storing and not readable.admits(block.keyspace, block.chunk_hash, self.tier.name):
                refusal = Refusal.NOT_IN_POOL
            if refusal is None:
                yield number, block
            else:
                self.counters.refuse(refusal, 1, block.keyspace)


@dataclass(slots=True, eq=False)
class BlocksPart(Part[CarrierT], Generic[CarrierT, PlaceT, DepsT]):
    """A load or a store of blocks for a keyspace. `blocks` are the open ones, so that a second attempt skips others."""

    task: Task
    keyspace: str
    blocks: Sequence[Lent[PlaceT]]
    deps: DepsT
    size: int = field(init=False, default=0)
    pools: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.size = sum(len(one.view) for one in self.blocks)
        kept = {self.deps.keyspace_at(place) for one in self.blocks for place in (one.place, *one.others)}
        self.pools = tuple(kept - {self.keyspace})

    def refused(self, refusal: Refusal) -> None:
        self.deps.counters.refuse(refusal, len(self.blocks), self.keyspace)

    def loaded(self, one: Lent[PlaceT], gain: Gain, age_s: float, asked_s: float | None = None) -> None:
        """Record a block that was read; its tokens were `age_s` old at `asked_s`, None for now."""
        enforcement, counters, size = self.deps.enforcement, self.deps.counters, len(one.view)
        enforcement.ages.inherit(one.key, age_s, asked_s)
        counters.age(HIT, age_s)
        gain.carried(one.position, one.key, size)
        kept = self.deps.keyspace_at(one.place)
        if enforcement.loaded_from is not None:
            enforcement.loaded_from(one.key, kept, one.view)
        pooled = kept != self.keyspace
        counters.add_all(
            self.keyspace, loaded=1, loaded_bytes=size, pool_hits=int(pooled), pool_bytes=size if pooled else 0
        )

    def settled(self, one: Lent[PlaceT], outcome: object, gain: Gain) -> bool:
        """Record the outcome of a store: True if it was stored, False if it was present, or a refusal. Return False for
        any other."""
        counters, size = self.deps.counters, len(one.view)
        if outcome is True:
            gain.carried(one.position, one.key, size)
            counters.add_all(self.keyspace, stored=1, stored_bytes=size)
        elif outcome is False:
            gain.hits.append(one.position)
            counters.add("stores_present")
        elif isinstance(outcome, Refusal):
            counters.refuse(outcome, 1, self.keyspace)
        else:
            return False
        return True


@dataclass(slots=True, eq=False)
class QuestionPart(Part[CarrierT], Generic[CarrierT, PlaceT, T]):
    """Ask about blocks of one keyspace; LMCache waits for no answer. `done` is set when it is over, `answer` stays None
    if that failed."""

    keyspace: str
    places: Sequence[PlaceT]
    question: Callable[[CarrierT, Sequence[PlaceT]], T]
    counters: Counters
    urgent: bool = True
    task: Task | None = None
    answer: T | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, carrier: CarrierT, gain: Gain) -> None:  # noqa: ARG002
        self.answer = self.question(carrier, self.places)

    def refused(self, refusal: Refusal) -> None:
        self.counters.refuse(refusal, len(self.places), self.keyspace)

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        self.done.set()
