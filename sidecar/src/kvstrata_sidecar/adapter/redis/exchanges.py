"""A tier's exchanges besides loads and stores: lookup, deletion, probe, sizes.

A block may be looked up under the reader's keyspace and under pools', on servers that answer one by one. Found anywhere
is a hit. If a pool and the reader's keyspace both have it, the reader's copy is deleted.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import (
    MEMBERS_PER_COMMAND,
    Place,
    Sought,
    Transport,
    read_moment_ms,
    reads_list,
    state_key,
)
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Topology, key_of
from kvstrata_sidecar.adapter.redis.client.resp import Command, FramingError, Reply, integer
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.tasks import Gain, Part, Task

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class LookupPart(Part[ClusterTransport]):
    """Look up `sought`, by keyspace and LMCache's numbers; `shares` has blocks sought in several places, if any."""

    task: Task | None
    keyspace: str
    sought: Mapping[str, Sequence[Sought]]
    deps: TierDeps
    shares: Shares | None = None
    urgent: bool = True
    pools: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.pools = tuple(kept for kept in self.sought if kept != self.keyspace)

    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        deps = self.deps
        asked: dict[str, Sequence[Sought]] = {}
        for kept, sought in self.sought.items():
            refusal = deps.revoked.refusal(transport, kept)
            if refusal is None:
                asked[kept] = sought
            elif kept == self.keyspace:
                self.refused(refusal)
                return
            else:
                deps.refuse(kept, refusal, _amount(sought))
        found = protocol.lookup_each(
            transport, [(sought, deps.terms.retention_ms(kept)) for kept, sought in asked.items()]
        )
        sights = dict(zip(asked, found, strict=True))
        for kept, sight in sights.items():
            for refusal, amount in sight.refused.items():
                deps.refuse(kept, refusal, amount)
            gain.hits += sight.hits
        hits, amount = len(gain.hits), sum(map(_amount, asked.values()))
        if (shares := self.shares) is not None:
            hits = sum(number not in shares for number in gain.hits)
            amount = sum(number not in shares for sought in asked.values() for number in _numbers(sought))
        self._count(hits, max(0, amount - hits - sum(sum(sight.refused.values()) for sight in found)))
        self._answer_shares({kept: sight.hits for kept, sight in sights.items()})

    def refused(self, refusal: Refusal) -> None:
        self.deps.counters.refuse(refusal, _amount(self.sought.get(self.keyspace, ())), self.keyspace)
        self._answer_shares({})

    def _answer_shares(self, hits: Mapping[str, Sequence[int]]) -> None:
        """Report results of blocks that are looked up elsewhere too, and count those that are thereby settled."""
        if self.shares is not None:
            for kept, sought in self.sought.items():
                pool = None if kept == self.keyspace else kept
                self._count(*self.shares.answered(_numbers(sought), hits.get(kept, ()), pool))

    def _count(self, hits: int, misses: int) -> None:
        for name, amount in (("lookup_hits", hits), ("lookup_misses", misses)):
            if amount:
                self.deps.counters.add(name, amount, self.keyspace)


@dataclass(slots=True, eq=False)
class QuestionPart(Part[ClusterTransport], Generic[T]):
    """Ask about blocks of one keyspace, or about something else; LMCache waits for no answer. `done` is set when it is
    over, `answer` stays None if that failed.
    """

    keyspace: str | None
    places: Sequence[Place]
    question: Callable[[Transport, Sequence[Place]], T]
    counters: Counters
    urgent: bool = True
    task: Task | None = None
    answer: T | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, transport: ClusterTransport, gain: Gain) -> None:  # noqa: ARG002
        self.answer = self.question(transport, self.places)

    def refused(self, refusal: Refusal) -> None:
        self.counters.refuse(refusal, max(1, len(self.places)), self.keyspace or "")

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        self.done.set()


@dataclass(slots=True, eq=False)
class ProbePart(Part[ClusterTransport]):
    """Check whether a node answers, for its breaker. In a cluster it also asks for a key in one of the node's slots,
    because a server that cannot serve any still answers PING. `key_prefix` is None on a single server.
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
        key = None if self.key_prefix is None else key_of(self.node, self.topology, self.key_prefix)
        question = None if key is None else Command(key, (b"STRLEN", key))
        transport.probe(self.node, question, self.give_up_after_s)

    def over(self, error: Exception | None) -> None:
        if error is None:
            self.node.breaker.probe_succeeded()
        else:
            self.node.breaker.probe_failed(str(error))
        self.wake()


def _amount(sought: Sequence[Sought]) -> int:
    return sum(len(one.numbers) for one in sought)


def _numbers(sought: Sequence[Sought]) -> list[int]:
    return [number for one in sought for number in one.numbers]


class Shares:
    """Results for blocks that are looked up in several places, by number. Thread-safe.

    `asked` counts the places of each. `twice` receives, once, those that the reader's keyspace need not hold; `settled`
    the pool of those that a pool has, when all places have answered.
    """

    def __init__(
        self,
        asked: Counter[int],
        twice: Callable[[Sequence[int]], None],
        settled: Callable[[Mapping[int, str]], None] = lambda _: None,
    ) -> None:
        self._open = asked
        self._twice = twice
        self._settled = settled
        self._own: set[int] = set()
        self._pools: dict[int, str] = {}
        self._all = frozenset(asked)
        self._lock = threading.Lock()

    def __contains__(self, number: int) -> bool:
        return number in self._all

    def answered(self, numbers: Iterable[int], hits: Iterable[int], pool: str | None) -> tuple[int, int]:
        """Record one place's answer (`pool` None: the reader's own); return how many blocks become hits and misses."""
        found = missed = 0
        settled: dict[int, str] = {}
        with self._lock:
            before = self._own & self._pools.keys()
            for number in self._all.intersection(hits):
                if pool is None:
                    self._own.add(number)
                else:
                    self._pools.setdefault(number, pool)
            twice = sorted((self._own & self._pools.keys()) - before)
            for number in self._all.intersection(numbers):
                self._open[number] -= 1
                if not self._open[number]:
                    found += (there := number in self._own or number in self._pools)
                    missed += not there
                    if number in self._pools:
                        settled[number] = self._pools[number]
        if twice:
            self._twice(twice)
        if settled:
            self._settled(settled)
        return found, missed


def sizes(transport: Transport, places: Sequence[Place]) -> list[int]:
    """Return each block's bytes, 0 for one that is not committed or expired."""
    found = [0] * len(places)
    by_bucket: dict[bytes, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        by_bucket[place.base].append(number)
    if not by_bucket:
        return found
    first = state_key(next(iter(by_bucket)))
    commands, asked = [Command(first, (b"TIME",), read_moment_ms)], list[list[int]]()
    for base, numbers in by_bucket.items():
        for start in range(0, len(numbers), MEMBERS_PER_COMMAND):
            some = numbers[start : start + MEMBERS_PER_COMMAND]
            members = [places[number].member for number in some]
            key, read = state_key(base), reads_list(len(members))
            commands.append(Command(key, (b"ZMSCORE", base + b":#x", *members), read))
            commands.append(Command(key, (b"HMGET", base + b":#m", *members), read))
            asked.append(some)
    now_ms, *answers = transport.ask(commands)
    for numbers, expiries, records in zip(asked, answers[::2], answers[1::2], strict=True):
        for number, expires, text in zip(numbers, expiries, records, strict=True):
            if expires is not None and _moment_ms(expires) > now_ms:
                found[number] = _size_bytes(text)
    return found


def _moment_ms(score: Reply) -> float:
    try:
        return float(score) if isinstance(score, (bytes, float, int)) else 0.0
    except ValueError as error:
        raise FramingError("a score is no number") from error


def _size_bytes(record: Reply) -> int:
    return integer(record.partition(b":")[0]) if isinstance(record, bytes) else 0
