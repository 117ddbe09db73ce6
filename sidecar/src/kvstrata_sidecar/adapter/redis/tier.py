"""One shared tier as LMCache uses it: accepts tasks, queues their parts, answers by deadline.

Only `delete`, `sizes` and `close` block their caller: LMCache's two loops serve all tenants.
"""

from __future__ import annotations

import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.store.redis_keys import KEY_PREFIX
from kvstrata_sidecar.adapter.params import AdapterParams, TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.redis.budget.ledger import Ledgers
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import WRITE_WINDOW_MS, Place
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Scout, Topology
from kvstrata_sidecar.adapter.redis.client.resp import (
    NodeAwayError,
    PeerClosedError,
    SlotMovingError,
    Transport,
    TransportError,
)
from kvstrata_sidecar.adapter.redis.client.slots import Address
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.redis.deps import Inbox, RevokedSet, ScopeTerms, TierDeps
from kvstrata_sidecar.adapter.redis.exchanges import LoadPart, LookupPart, ProbePart, StorePart, sizes
from kvstrata_sidecar.adapter.redis.placement import REMEMBER_S, Places
from kvstrata_sidecar.adapter.redis.recent import Recent
from kvstrata_sidecar.adapter.redis.sweep.reclaim import ReclaimCapacity
from kvstrata_sidecar.adapter.redis.sweep.scopes import ApplyPolicy, AuditLeases, SweepScopes
from kvstrata_sidecar.adapter.redis.sweep.sweeper import Sweeper, SweeperConnection
from kvstrata_sidecar.adapter.tier.base import BaseTier
from kvstrata_sidecar.adapter.tier.counts import EVICTION, Counters
from kvstrata_sidecar.adapter.tier.encryption import sealers
from kvstrata_sidecar.adapter.tier.interface import Block, Key
from kvstrata_sidecar.adapter.tier.queues import Lane
from kvstrata_sidecar.adapter.tier.sealer import Sealer
from kvstrata_sidecar.adapter.tier.tasks import AnyPart, Part, QuestionPart, T, Task, TaskKind, TaskTable
from kvstrata_sidecar.adapter.tier.threads import TierThreads, Upkeep, Worker

SWEEP_INTERVAL_S = 60.0
TOKEN_BYTES = 9
PROBE_TIMEOUT_S = 1.0


class RedisThreads(TierThreads):
    """Workers for blocks, one for each node's lookups, and a timer. `transport` makes one for each worker. In the lane
    `blocks`, a part's label is its node.

    Lookups, deletions and probes have their own lane and connection for each node, so that no request's lookup waits
    behind a block of many megabytes. Blocks share one lane; loads go before stores, because requests wait for loads.
    The timer also probes unreachable nodes.
    """

    def __init__(self, deps: TierDeps, tasks: TaskTable, transport: Callable[[], ClusterTransport]) -> None:
        super().__init__(deps, tasks, deps.clock, transport, (TransportError, OSError), self._share)
        self._topology = topology = deps.topology
        self._probe_prefix = f"{KEY_PREFIX}:{deps.params.domain}" if deps.tier.cluster else None
        self._lock = threading.Lock()
        self._lookups: dict[Node, tuple[Lane, Worker]] = {}
        topology.changed = self._man
        topology.failed = self.wake

    def start(self) -> None:
        self._man()
        super().start()

    def put_lookup(self, part: Part[ClusterTransport], node: Node) -> Refusal | None:
        """Queue a part that must not wait behind blocks; return why not, None if queued."""
        with self._lock:
            manned = self._lookups.get(node)
        return Refusal.BREAKER_OPEN if manned is None else manned[0].put(part)

    def move(self, servers: Sequence[Address]) -> None:
        """Use other servers from now on, and abort the parts that may be under way at the former ones."""
        former = [*self._workers()]
        self._topology.move(servers)
        for worker in former:
            worker.abort(lambda _: True)

    def answer(self, part: QuestionPart[ClusterTransport, Place, T], patience_s: float, what: str) -> T | None:
        """Wait for the answer to a queued part, None if it failed or took too long: then it is removed or aborted."""
        if not part.done.wait(max(0.0, patience_s)):
            for lane in self._lanes():
                lane.forget(lambda waiting: waiting is part)
            self.abort(lambda current: current is part, f"{what} took too long")
            return None
        return part.answer

    def wake(self) -> None:
        self.wake_by(self._clock())

    def close(self, error: Exception | None = None) -> None:
        """Abort everything, too."""
        super().close(error or TransportError("the tier was closed"))
        self.abort(lambda _: True)

    def refusal_of(self, error: Exception) -> Refusal | None:
        if isinstance(error, NodeAwayError):
            return Refusal.BREAKER_OPEN
        return Refusal.SLOT_MOVING if isinstance(error, SlotMovingError) else None

    def worth_another(self, error: Exception) -> bool:
        """Whether an idle connection had ended: the next attempt opens a new one."""
        return isinstance(error, PeerClosedError) and error.reused

    def _workers(self) -> Iterator[Worker]:
        with self._lock:
            lookups = [worker for _, worker in self._lookups.values()]
        yield from lookups
        yield from self._block_workers

    def _lanes(self) -> list[Lane]:
        with self._lock:
            return [self.blocks, *(lane for lane, _ in self._lookups.values())]

    def _share(self) -> int | None:
        """Return how many workers one node may occupy: half of them if there is another, None for all."""
        return None if len(self._topology.primaries) < 2 else max(1, self.tier.workers // 2)

    def _man(self) -> None:
        """Give each node with slots a lane and a worker for lookups, and end those of nodes without slots."""
        with self._lock:
            primaries = self._topology.primaries
            gone = [self._lookups.pop(node) for node in tuple(self._lookups) if node not in primaries]
            for node in primaries:
                if node not in self._lookups and not self._closed:
                    lane = Lane()
                    self._lookups[node] = lane, self._worker(str(node), lane)
                    self._lookups[node][1].start()
        for lane, _ in gone:
            self._end(lane.close(), TransportError("the node has no slots any more"))
        self.wake()

    def _probe_due(self) -> None:
        for node in self._topology.primaries:
            if node.breaker.begin_probe():
                part = ProbePart(node, self._topology, self._probe_prefix, PROBE_TIMEOUT_S, self.wake)
                refusal = self.put_lookup(part, node)
                if refusal is not None:
                    node.breaker.probe_failed(f"no probe could be sent: {refusal}")

    def _probes_in_s(self) -> list[float | None]:
        return [node.breaker.probe_in_s() for node in self._topology.primaries]


class Tier(BaseTier[TierDeps, RedisThreads]):
    """A Redis tier under the pod's enforcement; its threads run until `close`. See BaseTier. `sealer` returns the
    calling thread's own, by default as `tier` requires; `window_ms` is the life of an uncommitted value."""

    per_pod = False
    parts: ClassVar[Mapping[TaskKind, Callable[..., AnyPart]]] = {TaskKind.STORE: StorePart, TaskKind.LOAD: LoadPart}
    _places: Places

    def __init__(
        self,
        params: AdapterParams,
        tier: TierParams,
        enforcement: Enforcement,
        answered: Callable[[Task], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        sealer: Callable[[], Sealer] | None = None,
        window_ms: int = WRITE_WINDOW_MS,
        sweep_interval_s: float = SWEEP_INTERVAL_S,
        held_faster: Callable[[Block], bool] = lambda _: False,
    ) -> None:
        terms, counters = ScopeTerms(tier, enforcement), Counters()
        self._topology = topology = Topology(terms.servers, cluster=tier.cluster, clock=clock)
        self._transport = partial(ClusterTransport, tier, topology)
        deps = TierDeps(
            params=params, tier=tier, enforcement=enforcement, topology=topology, counters=counters,
            terms=terms, unread=Recent(clock, REMEMBER_S),
            ledgers=Ledgers(params.domain, counters.add, clock, window_ms, partial(counters.age, EVICTION)),
            revoked=RevokedSet(params.domain), inbox=Inbox(),
            usage=Recent(clock, 2 * sweep_interval_s),
            written=Recent(clock, math.inf),
            sealer=sealer or sealers(enforcement.keys, encrypt=tier.encrypts),
            token=secrets.token_hex(TOKEN_BYTES).encode(), interval_s=sweep_interval_s, clock=clock,
            jitter=random.random,
        )  # fmt: skip
        super().__init__(deps, answered, clock)
        self._deadlines_ms[TaskKind.LOOKUP] = tier.lookup_deadline_ms
        self._apply_policy, leases = ApplyPolicy(deps), AuditLeases(deps)
        reclaim = ReclaimCapacity(deps, self._apply_policy.changes)
        jobs = (self._apply_policy, leases, reclaim, SweepScopes(deps, leases, reclaim.request))
        self._sweeping = SweeperConnection(deps, self._transport)
        self._sweeper = Sweeper(deps, self._sweeping, jobs)
        scouts: list[Upkeep] = [Scout(tier, topology, random.random)] if tier.cluster else []
        self._places = Places(deps, held_faster, self._discard_copies)
        self._io_threads = RedisThreads(deps, self._tasks, self._transport)
        self._start(self._sweeper, *scouts)

    def lookup(self, blocks: Sequence[Block]) -> int:
        """Start to look up blocks. Blocks of a faster tier are misses here, because they are hits there."""
        groups, shares = self._places.to_look_up(blocks)
        task = self._open(TaskKind.LOOKUP, len(blocks), len(groups), self._params.lookup_deadline_ms)
        for (keyspace, node), sought in groups.items():
            part = LookupPart(task, keyspace, sought, self._deps, shares)
            self._require_queued(part, self._io_threads.put_lookup(part, node))
        return task.task_id

    def holds(self, keyspace: str, block: Block) -> bool:  # noqa: ARG002
        """Always False: only its servers know."""
        return False

    def delete(self, blocks: Sequence[Block]) -> list[Key]:
        """Delete blocks and return the keys of those that were there. It takes the load deadline at most."""
        there = self._ask_about(blocks, protocol.discard, "a deletion")
        return [blocks[index].key for index, deleted in there if deleted]

    def sizes(self, blocks: Sequence[Block]) -> list[int]:
        """Return each block's bytes here, 0 if it cannot be read or is unknown within the load deadline."""
        found = dict(self._ask_about(blocks, sizes, "a count of blocks"))
        return [found.get(index, 0) for index in range(len(blocks))]

    def erase(self, keyspaces: Sequence[str], seen: Callable[[str, bytes], None]) -> None:
        """Return None: a pod may not erase shared blocks."""

    def kept(self, blocks: Sequence[Block]) -> None:
        """Return None: only its servers know."""

    def state(self) -> TierState:
        topology, full = self._topology, self._topology.full
        detail = topology.detail() or ("the tier is out of memory: it refuses blocks" if full else "")
        return replace(
            self._counted("Redis", str(topology.state()), detail),
            full=full,
            nodes=len(topology.primaries),
            nodes_away=len(topology.away()),
            capacity_bytes=self._deps.terms.capacity_bytes or 0,
            settling=len(self._apply_policy.changes),
        )

    def policy_changed(self) -> None:
        if (servers := self._deps.terms.servers) != self._topology.seeds:
            # I/O with the former servers is aborted.
            self._io_threads.move(servers)
            self._deps.revoked.forget()
            self._apply_policy.changes.apply_all_again()
            self._sweeping.abort()
        self._apply_policy.follow()
        self._deps.inbox.wake.set()
        self.counts.retain(self._deps.listed())

    def usage(self) -> list[ScopeUsage]:
        rows, listed = [], self._deps.listed()
        for keyspace, (used_bytes, blocks) in self._deps.usage.items():
            if keyspace not in listed or not blocks:
                continue
            bounds = self._deps.terms.bounds(keyspace)
            limit_bytes, guaranteed_bytes = (bounds.limit_bytes, bounds.guaranteed_bytes) if bounds else (None, 0)
            scope = keyspace[:SCOPE_DIGITS]
            rows.append(ScopeUsage(scope, self._params.name, used_bytes, blocks, limit_bytes, guaranteed_bytes or None))
        return rows

    def nodes(self) -> dict[str, str]:
        breakers = ((str(node), node.breaker) for node in self._topology.primaries)
        return {name: f"{one.state}: {one.detail}" if one.detail else str(one.state) for name, one in breakers}

    def _ask_about(
        self, blocks: Sequence[Block], question: Callable[[Transport, Sequence[Place]], list[T]], what: str
    ) -> Iterator[tuple[int, T]]:
        """Ask about blocks under their own keyspaces; yield index and answer of those that are known in time."""
        asked, give_up_at_s = self._ask(blocks, question), self._clock() + self._params.load_deadline_ms / 1000
        for part, indices in asked:
            answer = self._io_threads.answer(part, give_up_at_s - self._clock(), what)
            yield from zip(indices, answer or (), strict=False)

    def _discard_copies(self, blocks: Sequence[Block]) -> None:
        """Delete a reader's own copies of blocks that a pool has, soon or not at all; called by workers."""

        def discard(transport: Transport, places: Sequence[Place]) -> None:
            deleted = sum(protocol.discard(transport, places))
            self.counts.add("copies_discarded", deleted, places[0].keyspace)

        self._ask(blocks, discard)

    def _ask(
        self, blocks: Sequence[Block], question: Callable[[Transport, Sequence[Place]], T]
    ) -> list[tuple[QuestionPart[ClusterTransport, Place, T], Sequence[int]]]:
        """Queue questions about blocks under their own keyspaces; return those queued, with the blocks' indices."""
        asked = list[tuple[QuestionPart[ClusterTransport, Place, T], Sequence[int]]]()
        for (keyspace, node), group in self._places.by_node(blocks).items():
            part = QuestionPart(keyspace, [place for _, place in group], question, self.counts)
            if self._io_threads.put_lookup(part, node) is None:
                asked.append((part, [index for index, _ in group]))
        return asked
