"""A tier's exchanges: loads and stores, a few blocks of one task and one node at a time, in pipelines; lookup, probe,
sizes.

A block may be looked up under the reader's keyspace and under pools', on servers that answer one by one. Found anywhere
is a hit. If a pool and the reader's keyspace both have it, the reader's copy is deleted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from kvstrata.contract.store.block_value import value_bytes
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client import resp
from kvstrata_sidecar.adapter.redis.client.commands import MEMBERS_PER_COMMAND, Demand, Loading, Outcome, Place, Sought
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Topology, key_of
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.tier.sealer import Sealer
from kvstrata_sidecar.adapter.tier.tasks import BlocksPart, Gain, Lent, Part, Task


@dataclass(slots=True, eq=False)
class LoadPart(BlocksPart[ClusterTransport, Place, TierDeps]):
    urgent: bool = True

    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        """Read each block from the first of its places that has it in full."""
        sealer = self.deps.sealer()

        @cache
        def refusal_of(kept: str) -> Refusal | None:
            return sealer.refusal(kept) or self.deps.revoked.refusal(transport, kept)

        while self.blocks:
            self._skip_refused(refusal_of)
            misses = self._read(transport, sealer, gain)
            # From here on only these are open: a second attempt continues here.
            self.blocks = [_elsewhere(one) for one, _ in misses if one.others]
            self._miss(transport, misses)

    def _skip_refused(self, refusal_of: Callable[[str], Refusal | None]) -> None:
        """Move blocks whose place may not be used to their next place."""
        deps, blocks = self.deps, list[Lent[Place]]()
        for one in self.blocks:
            while (refusal := refusal_of(one.place.keyspace)) is not None:
                deps.refuse(one.place.keyspace, refusal)
                if not one.others:
                    deps.counters.add("load_misses")
                    break
                one = _elsewhere(one)
            else:
                blocks.append(one)
        self.blocks = blocks

    def _read(self, transport: ClusterTransport, sealer: Sealer, gain: Gain) -> list[tuple[Lent[Place], Loading]]:
        """Read the blocks at their places; return the misses."""
        blocks = self.blocks
        asked_s = self.deps.enforcement.ages.now_s()
        retention_ms = self.deps.terms.retention_ms
        loads = [Loading(one.place, one.view, sealer, retention_ms(one.place.keyspace)) for one in blocks]
        try:
            transport.get_each(loads)
        except (resp.NodeAwayError, resp.SlotMovingError):
            if not any(one.others for one in blocks):
                raise
        finally:
            # A block that was read is never read again: its memory is LMCache's from now on.
            self.blocks = []
            for one, load in zip(blocks, loads, strict=True):
                if load.hit:
                    self.loaded(one, gain, load.age_ms / 1000, asked_s)
                    self.deps.inbox.touch(one.place)
                    writer = "loads_own" if self.deps.written.get(hash(one.place)) else "loads_other"
                    self.deps.counters.add(writer, 1, self.keyspace)
                else:
                    self.blocks.append(one)
        return [(one, load) for one, load in zip(blocks, loads, strict=True) if not load.hit]

    def _miss(self, transport: ClusterTransport, misses: Sequence[tuple[Lent[Place], Loading]]) -> None:
        self.deps.counters.add("load_misses", sum(not one.others for one, _ in misses))
        for one, load in misses:
            if load.refusal is not None:
                self.deps.refuse(one.place.keyspace, load.refusal)
            elif load.unreadable:
                self.deps.counters.add("unreadable")
                if not load.damaged:  # that makes room for a good one
                    self.deps.unread.put((one.place.keyspace, one.place.member), True)
        damaged = [one.place for one, load in misses if load.damaged]
        if damaged:  # they would block good ones until they expire
            protocol.discard(transport, damaged)


@dataclass(slots=True, eq=False)
class StorePart(BlocksPart[ClusterTransport, Place, TierDeps]):
    """Write blocks from LMCache's memory. `reserved` are places, by token, whose reservations may be unused."""

    urgent: bool = False
    reserved: dict[bytes, Place] = field(default_factory=dict)

    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        """Write blocks that are missing in the tier and that policy, budget and memory admit."""
        deps, sealer = self.deps, self.deps.sealer()
        refusal = sealer.refusal(self.keyspace, seals=True) or deps.revoked.refusal(transport, self.keyspace)
        if refusal is not None:
            self.refused(refusal)
            return
        if self.pools:
            self._leave_to_pools(transport, sealer, gain)
            if not self.blocks:
                return
        outcomes: dict[bytes, Outcome] = {}
        try:
            self._store(transport, sealer, outcomes)
        finally:
            problem = self._settle(outcomes, gain)
        if problem is not None:
            raise problem

    def _leave_to_pools(self, transport: ClusterTransport, sealer: Sealer, gain: Gain) -> None:
        """Leave out blocks that a pool of the writer has: they were computed while the pool was published."""
        deps = self.deps
        sought: dict[str, dict[bytes, Sought]] = {}
        for one in self.blocks:
            for place in one.others:
                bucket = sought.setdefault(place.keyspace, {}).setdefault(place.base, Sought(place.base, [], []))
                bucket.members.append(place.member)
                bucket.numbers.append(one.position)
        try:
            asked = [
                ([*buckets.values()], deps.terms.retention_ms(pool))
                for pool, buckets in sought.items()
                if (sealer.refusal(pool) or deps.revoked.refusal(transport, pool)) is None
            ]
            there = {number for sight in protocol.lookup_each(transport, asked) for number in sight.hits}
        except (resp.NodeAwayError, resp.SlotMovingError):
            return
        if there:
            self.blocks = [one for one in self.blocks if one.position not in there]
            gain.hits.extend(there)
            deps.counters.add("stores_in_pool", len(there), self.keyspace)

    def _store(self, transport: ClusterTransport, sealer: Sealer, outcomes: dict[bytes, Outcome]) -> None:
        """Set outcomes by token: True for a block that was stored, False for one present, or the refusal or error."""
        deps = self.deps
        common = deps.terms.of(self.keyspace)
        demands: list[tuple[Lent[Place], Demand]] = []
        for one in self.blocks:
            token = self._token(one)
            age_ms = int(1000 * deps.enforcement.ages.age_s(one.key))
            if common.life_ms <= age_ms:
                outcomes[token] = Refusal.RETENTION
                continue
            terms = replace(common, age_ms=age_ms) if age_ms else common
            demands.append((one, Demand(one.place, value_bytes(len(one.view)), token, terms)))
            self.reserved[token] = one.place
        admitted = deps.ledgers.of(transport, self.keyspace, common.bounds).reserve([demand for _, demand in demands])
        writes: dict[bytes, resp.Write] = {}
        for (one, demand), answer in zip(demands, admitted, strict=True):
            if answer is True:
                computed_ms = int(1000 * time.time()) - demand.terms.age_ms
                parts = partial(sealer.seal, self.keyspace, one.place.name, one.view, computed_ms)
                token, window_ms = demand.token, deps.ledgers.window_ms
                writes[token] = protocol.write(one.place, parts, token, demand.terms, window_ms)
                continue
            outcomes[demand.token] = answer
            if not isinstance(answer, Exception):
                del self.reserved[demand.token]
        try:
            transport.set_each(list(writes.values()))
        finally:
            for token, write in writes.items():
                if isinstance(write.answer, Exception):
                    outcomes[token] = write.answer
                elif write.answer is not None:
                    outcomes[token] = True if write.answer == "ok" else Refusal.LATE
                    del self.reserved[token]  # it is committed, or another's

    def _settle(self, outcomes: Mapping[bytes, Outcome], gain: Gain) -> Exception | None:
        """Count settled blocks, leave the rest in `blocks`, and return their error."""
        deps, full = self.deps, False
        problem: Exception | None = None
        left: list[Lent[Place]] = []
        for one in self.blocks:
            outcome = outcomes.get(self._token(one))
            if isinstance(outcome, resp.ReplyError) and outcome.code == "OOM":
                outcome, full = Refusal.TIER_FULL, True
                deps.topology.note_memory(one.place.base, has_memory=False)
            if not self.settled(one, outcome, gain):
                left.append(one)
                problem = outcome if isinstance(outcome, Exception) else problem
            elif outcome is True:
                deps.written.put(hash(one.place), True)
        if gain.sizes and not full:
            deps.topology.note_memory(self.blocks[0].place.base, has_memory=True)
        self.blocks = left
        return problem

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        """Release unused reservations. Not before: a second attempt uses the first one's tokens."""
        for token, place in self.reserved.items():
            self.deps.inbox.abandon(place, token)

    def _token(self, one: Lent[Place]) -> bytes:
        """Return the name of a block's reservation, the same in each attempt."""
        return b"%b-%x-%x" % (self.deps.token, self.task.task_id, one.position)


def _elsewhere(block: Lent[Place]) -> Lent[Place]:
    return block._replace(place=block.others[0], others=block.others[1:])


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
        question = None if key is None else resp.Command(key, (b"STRLEN", key))
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


def sizes(transport: resp.Transport, places: Sequence[Place]) -> list[int]:
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
            commands.append(resp.Command(base, (b"ZMSCORE", base + b":#x", *members), protocol.reads_scores(len(some))))
            commands.append(
                resp.Command(base, (b"HMGET", base + b":#m", *members), partial(_read_sizes, count=len(some)))
            )
            asked.append(some)
    now_ms, *answers = transport.ask(commands)
    for numbers, expiries, stored in zip(asked, answers[::2], answers[1::2], strict=True):
        for number, expires_ms, size_bytes in zip(numbers, expiries, stored, strict=True):
            if expires_ms is not None and expires_ms > now_ms:
                found[number] = size_bytes
    return found


def _read_sizes(reply: resp.Reply, *, count: int) -> list[int]:
    records = protocol.read_list(reply, count)
    return [resp.integer(one.partition(b":")[0]) if isinstance(one, bytes) else 0 for one in records]
