"""A tier's exchanges besides loads and stores: lookup, probe, sizes.

A block may be looked up under the reader's keyspace and under pools', on servers that answer one by one. Found anywhere
is a hit. If a pool and the reader's keyspace both have it, the reader's copy is deleted.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import MEMBERS_PER_COMMAND, Place, Sought
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Topology, key_of
from kvstrata_sidecar.adapter.redis.client.resp import Command, Reply, Transport, integer
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.tier.tasks import Gain, Part, Task


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
        retention_ms = deps.terms.retention_ms
        found = protocol.lookup_each(transport, [(sought, retention_ms(kept)) for kept, sought in asked.items()])
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
        self.deps.counters.add("lookup_hits", hits, self.keyspace)
        self.deps.counters.add("lookup_misses", misses, self.keyspace)


@dataclass(slots=True, eq=False)
class ProbePart(Part[ClusterTransport]):
    """Check whether a node answers, for its breaker. In a cluster it also asks for a key in one of the node's slots,
    because a server that cannot serve any still answers PING. `key_prefix` is None on a single server."""

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


@dataclass(eq=False)
class Shares:
    """Results for blocks that are looked up in several places, by number. Thread-safe. `asked` counts the places of
    each. `twice` receives, once, those that the reader's keyspace need not hold; `settled` the pool of those that a
    pool has, when all places have answered."""

    asked: Counter[int]
    twice: Callable[[Sequence[int]], None]
    settled: Callable[[Mapping[int, str]], None] = lambda _: None

    def __post_init__(self) -> None:
        self._own: set[int] = set()
        self._pools: dict[int, str] = {}
        self._all = frozenset(self.asked)
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
                self.asked[number] -= 1
                if not self.asked[number]:
                    found += (there := number in self._own or number in self._pools)
                    missed += not there
                    if number in self._pools:
                        settled[number] = self._pools[number]
        if twice:
            self.twice(twice)
        if settled:
            self.settled(settled)
        return found, missed


def sizes(transport: Transport, places: Sequence[Place]) -> list[int]:
    """Return each block's bytes, 0 for one that is not committed or expired."""
    found = [0] * len(places)
    by_bucket: dict[bytes, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        by_bucket[place.base].append(number)
    if not places:
        return found
    commands, asked = [protocol.time_at(places[0].base)], list[list[int]]()
    for base, numbers in by_bucket.items():
        for start in range(0, len(numbers), MEMBERS_PER_COMMAND):
            some = numbers[start : start + MEMBERS_PER_COMMAND]
            members = [places[number].member for number in some]
            commands.append(Command(base, (b"ZMSCORE", base + b":#x", *members), protocol.reads_scores(len(some))))
            commands.append(Command(base, (b"HMGET", base + b":#m", *members), partial(_read_sizes, count=len(some))))
            asked.append(some)
    now_ms, *answers = transport.ask(commands)
    for numbers, expiries, stored in zip(asked, answers[::2], answers[1::2], strict=True):
        for number, expires_ms, size_bytes in zip(numbers, expiries, stored, strict=True):
            if expires_ms is not None and expires_ms > now_ms:
                found[number] = size_bytes
    return found


def _read_sizes(reply: Reply, *, count: int) -> list[int]:
    records = protocol.read_list(reply, count)
    return [integer(one.partition(b":")[0]) if isinstance(one, bytes) else 0 for one in records]
