"""One shared tier as LMCache uses it: accepts tasks, queues their parts, answers by deadline.

Only `delete`, `sizes`, `hottest` and `close` block their caller: LMCache's two loops serve all tenants.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.store.redis_keys import bucket_prefix, capacity_key
from kvstrata_sidecar.adapter.params import AdapterParams, TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.redis.block_exchanges import Lent, LoadPart, StorePart
from kvstrata_sidecar.adapter.redis.budget.ledger import Ledgers
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import WRITE_WINDOW_MS, Place, Transport
from kvstrata_sidecar.adapter.redis.client.nodes import FullNodes, Node, Topology
from kvstrata_sidecar.adapter.redis.client.slot_refresh import Scout
from kvstrata_sidecar.adapter.redis.client.slots import Address
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport, Ways
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.exchanges import LookupPart, QuestionPart, T, sizes
from kvstrata_sidecar.adapter.redis.hottest import busiest, hottest
from kvstrata_sidecar.adapter.redis.lookups import Lookups, Shadow
from kvstrata_sidecar.adapter.redis.placement import Placing, PoolPlaces
from kvstrata_sidecar.adapter.redis.recent import Recent
from kvstrata_sidecar.adapter.redis.revoked import RevokedSet
from kvstrata_sidecar.adapter.redis.sweep.apply_policy import ApplyPolicy
from kvstrata_sidecar.adapter.redis.sweep.inbox import Inbox
from kvstrata_sidecar.adapter.redis.sweep.jobs import jobs_of
from kvstrata_sidecar.adapter.redis.sweep.sweeper import Sweeper, SweeperConnection
from kvstrata_sidecar.adapter.redis.terms import ScopeTerms
from kvstrata_sidecar.adapter.redis.threads import CLOSE_TIMEOUT_S, TierThreads
from kvstrata_sidecar.adapter.tier.counts import EVICTION, Counters, Histogram
from kvstrata_sidecar.adapter.tier.encryption import sealers
from kvstrata_sidecar.adapter.tier.interface import Block, Hot, most_of_each
from kvstrata_sidecar.adapter.tier.sealer import Sealer
from kvstrata_sidecar.adapter.tier.tasks import Key, Part, StoreOutcome, Task, TaskKind, TaskTable

MEDIUM = "Redis"
SWEEP_INTERVAL_S = 60.0
TOKEN_BYTES = 9


class Tier:
    """A Redis tier under the pod's enforcement; its threads run until `close`. See PodTier.

    `answered(task)` is called from any thread, without locks, once `pop_stores` or `pop_found` has the answer. `sealer`
    returns the calling thread's own, by default as `tier` requires; `window_ms` is the life of an uncommitted value.
    """

    per_pod = False

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
        self._enforcement = enforcement
        self._params = tier
        self._clock = clock
        self._answered = answered
        self._tasks = TaskTable(self._answer)
        self._deadlines_ms = {
            TaskKind.STORE: tier.store_deadline_ms,
            TaskKind.LOOKUP: tier.lookup_deadline_ms,
            TaskKind.LOAD: tier.load_deadline_ms,
        }
        self._writer = secrets.token_hex(TOKEN_BYTES).encode()
        seeds = [Address(endpoint.host, endpoint.port) for endpoint in tier.endpoints]
        self._topology = topology = Topology(seeds, cluster=tier.cluster, clock=clock)
        self._ways = Ways(tier, topology)
        self._counters = counters = Counters()
        self._deps = deps = TierDeps(
            params=params, tier=tier, enforcement=enforcement, topology=topology, counters=counters,
            terms=ScopeTerms(tier, enforcement),
            ledgers=Ledgers(params.domain, counters.add, clock, window_ms, partial(counters.age, EVICTION)),
            revoked=RevokedSet(params.domain), inbox=Inbox(), full=FullNodes(topology, clock),
            usage=Recent(clock, 2 * sweep_interval_s),
            sealer=sealer or sealers(enforcement.keys, encrypt=tier.encrypts),
            token=secrets.token_hex(TOKEN_BYTES).encode(), interval_s=sweep_interval_s, clock=clock,
            jitter=random.random,
        )  # fmt: skip
        self._apply_policy = ApplyPolicy(deps)
        connection = SweeperConnection(deps, self._ways.transport)
        self._sweeper = Sweeper(jobs_of(deps, self._apply_policy), connection, deps.inbox, clock)
        self._sweeper.name = f"kvs-{tier.name}-sweeper"
        pools = PoolPlaces(deps)
        self._placing = Placing(deps, pools)
        shadow = Shadow(deps, held_faster, self._placing.first)
        self._lookups = Lookups(deps, shadow, pools, self._discard_copies)
        self._io_threads = TierThreads(deps, self._tasks, self._ways.transport)
        self._scout = (
            Scout(f"kvs-{tier.name}-scout", topology, self._ways.dial, random.random) if tier.cluster else None
        )
        self._closed = False
        self._io_threads.start()
        self._sweeper.start()
        if self._scout is not None:
            self._scout.start()

    def store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        return self._store(blocks, views, self._params.store_deadline_ms)

    def hand_down(
        self, blocks: Sequence[Block], views: Sequence[memoryview], within_s: float, done: Callable[[Task], None]
    ) -> None:
        self._store(blocks, views, min(self._params.store_deadline_ms, int(1000 * within_s)), done)

    def life_s(self, block: Block) -> float:
        return self._deps.terms.life_s(block)

    def takes(self, block: Block) -> bool:
        return self._placing.takes(block)

    def lookup(self, blocks: Sequence[Block]) -> int:
        """Start to look up blocks. Blocks of a faster tier are misses here, because they are hits there."""
        groups, shares = self._lookups.divide(blocks)
        task = self._open(TaskKind.LOOKUP, len(blocks), len(groups), self._params.lookup_deadline_ms)
        for (keyspace, node), sought in groups.items():
            self._put(self._io_threads.put_lookup, LookupPart(task, keyspace, sought, self._deps, shares), node)
        return task.task_id

    def load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        """Start to load blocks into `views`. Nothing touches a view once the task is answered."""
        batches = self._placing.to_load(blocks, views)
        task = self._open(TaskKind.LOAD, len(blocks), len(batches), self._params.load_deadline_ms)
        for keyspace, node, batch in batches:
            self._put(self._io_threads.put_block, LoadPart(task, keyspace, batch, self._deps), node)
        return task.task_id

    def holds(self, keyspace: str, block: Block) -> bool:  # noqa: ARG002
        """Always False: only its servers know."""
        return False

    def pop_stores(self) -> dict[int, StoreOutcome]:
        return self._tasks.pop_stores()

    def pop_found(self, task_id: int) -> bytes | None:
        return self._tasks.pop_found(task_id)

    def delete(self, blocks: Sequence[Block]) -> list[Key]:
        """Delete blocks and return the keys of those that were there. It takes the load deadline at most."""
        there = self._ask_about(blocks, protocol.discard, "a deletion")
        return [blocks[index].key for index, deleted in there if deleted]

    def sizes(self, blocks: Sequence[Block]) -> list[int]:
        """Return each block's bytes here, 0 if it cannot be read or is unknown within the load deadline."""
        found = dict(self._ask_about(blocks, sizes, "a count of blocks"))
        return [found.get(index, 0) for index in range(len(blocks))]

    def hottest(self, keyspaces: Sequence[str]) -> list[Hot] | None:
        """Each question, one for each keyspace, may take the load deadline; see PodTier."""
        allowed = [keyspace for keyspace in keyspaces if self._deps.refusal(keyspace) is None]
        scopes = self._ask(None, capacity_key(self._deps.domain), lambda one: busiest(one, self._deps.domain, allowed))
        if scopes is None:
            return None
        found: list[Hot] = []
        for keyspace in scopes:
            question = partial(hottest, params=self._deps.params, keyspace=keyspace, most=most_of_each(len(scopes)))
            hot = self._ask(keyspace, bucket_prefix(self._deps.domain, keyspace, 0), question)
            if hot is None:  # the remaining keyspaces are left out
                return found or None
            found += hot
        return found

    def erase(self, keyspaces: Sequence[str], seen: Callable[[str, bytes], None]) -> None:
        """Return None: a pod may not erase shared blocks."""

    def kept(self, blocks: Sequence[Block]) -> None:
        """Return None: only its servers know."""

    def state(self) -> TierState:
        counts = self._counters.snapshot()
        return TierState(
            name=self._params.name,
            medium=MEDIUM,
            breaker=str(self._topology.state()),
            detail=self._topology.detail() or self._deps.full.detail,
            stored=counts.get("stored", 0),
            loaded=counts.get("loaded", 0),
            refused=counts.get("refused", 0),
            errors=counts.get("errors", 0),
            full=bool(self._deps.full.detail),
            encrypted=self._params.encrypts,
            keyless=self._enforcement.keyless() if self._params.encrypts else 0,
            nodes=len(self._topology.primaries),
            nodes_away=len(self._topology.away()),
            capacity_bytes=self._params.capacity_bytes or 0,
            settling=len(self._apply_policy.changes),
        )

    def policy_changed(self) -> None:
        self._apply_policy.follow()
        self._deps.inbox.wake.set()
        self._counters.retain(self._deps.listed())

    def usage(self) -> list[ScopeUsage]:
        """Return the usage of scopes as of this pod's last sweeps."""
        rows, listed = [], self._deps.listed()
        for keyspace, (used_bytes, blocks) in self._deps.usage.items():
            if keyspace not in listed or not blocks:
                continue
            bounds = self._deps.terms.bounds(keyspace)
            limit_bytes, guaranteed_bytes = (bounds.limit_bytes, bounds.guaranteed_bytes) if bounds else (None, 0)
            scope = keyspace[:SCOPE_DIGITS]
            rows.append(ScopeUsage(scope, self._params.name, used_bytes, blocks, limit_bytes, guaranteed_bytes or None))
        return rows

    def by_scope(self) -> dict[str, Mapping[str, int]]:
        return self._counters.by_scope()

    def latencies(self) -> dict[str, Histogram]:
        return self._counters.latencies()

    def ages(self) -> dict[str, Histogram]:
        return self._counters.ages()

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot()

    @property
    def healthy(self) -> bool:
        scouting = self._scout is None or self._scout.is_alive()
        return self._closed or (self._io_threads.alive and self._sweeper.is_alive() and scouting)

    def nodes(self) -> dict[str, str]:
        breakers = ((str(node), node.breaker) for node in self._topology.primaries)
        return {name: f"{one.state}: {one.detail}" if one.detail else str(one.state) for name, one in breakers}

    def close(self) -> None:
        self._closed = True
        if self._scout is not None:
            self._scout.close()
        self._io_threads.close()
        self._sweeper.close()
        for thread in (self._sweeper, self._scout):
            # A thread that is connecting cannot be interrupted; it touches nothing of LMCache's and ends by itself.
            if thread is not None:
                thread.join(CLOSE_TIMEOUT_S)

    def _store(
        self,
        blocks: Sequence[Block],
        views: Sequence[memoryview],
        deadline_ms: int,
        done: Callable[[Task], None] | None = None,
    ) -> int:
        batches = self._placing.to_store(blocks, views)
        task = self._open(TaskKind.STORE, len(blocks), len(batches), deadline_ms, done)
        for keyspace, node, batch in batches:
            named = [block._replace(token=self._token(task, block)) for block in batch]
            self._put(self._io_threads.put_block, StorePart(task, keyspace, named, self._deps), node)
        return task.task_id

    def _open(
        self,
        kind: TaskKind,
        key_count: int,
        parts: int,
        deadline_ms: int,
        done: Callable[[Task], None] | None = None,
    ) -> Task:
        # Tasks without parts have no deadline; `_answer` recognizes them by that.
        deadline_s = self._clock() + deadline_ms / 1000 if parts else float("inf")
        task = self._tasks.open(kind, key_count, parts, deadline_s, done)
        if parts:
            self._io_threads.wake_by(deadline_s)
        return task

    def _answer(self, task: Task) -> None:
        if task.done is not None:
            task.done(task)
            return
        lasted_s = self._clock() - task.deadline_s + self._deadlines_ms[task.kind] / 1000
        if lasted_s >= 0:
            self._counters.observe(str(task.kind), lasted_s)
        self._answered(task)

    def _put(
        self, put: Callable[[Part[ClusterTransport], Node], Refusal | None], part: Part[ClusterTransport], node: Node
    ) -> None:
        refusal = put(part, node)
        if refusal is not None:
            part.refused(refusal)
            if part.task is not None:
                self._tasks.drop(part.task)

    def _ask(self, keyspace: str | None, key: str, question: Callable[[Transport], list[T]]) -> list[T] | None:
        """Ask the server that has `key`, as soon as no lookup waits for it; None on failure."""
        node = self._topology.node_of(key.encode())
        part = QuestionPart(keyspace, (), lambda transport, _: question(transport), self._counters, urgent=False)
        if node is None or not node.breaker.closed or self._io_threads.put_lookup(part, node) is not None:
            return None
        return self._io_threads.answer(part, self._params.load_deadline_ms / 1000, "a question about hot blocks")

    def _ask_about(
        self, blocks: Sequence[Block], question: Callable[[Transport, Sequence[Place]], list[T]], what: str
    ) -> Iterator[tuple[int, T]]:
        """Ask about blocks under their own keyspaces; yield index and answer of those that are known in time."""
        asked = []
        for (keyspace, node), group in self._placing.own(blocks).items():
            part = QuestionPart(keyspace, [place for _, place in group], question, self._counters)
            if self._io_threads.put_lookup(part, node) is None:
                asked.append((part, group))
        give_up_at_s = self._clock() + self._params.load_deadline_ms / 1000
        for part, group in asked:
            answer = self._io_threads.answer(part, give_up_at_s - self._clock(), what)
            yield from zip((index for index, _ in group), answer or (), strict=False)

    def _discard_copies(self, blocks: Sequence[Block]) -> None:
        """Delete a reader's own copies of blocks that a pool has, soon or not at all; called by workers."""

        def discard(transport: Transport, places: Sequence[Place]) -> None:
            deleted = sum(protocol.discard(transport, places))
            self._counters.add("copies_discarded", deleted, places[0].keyspace)

        for (keyspace, node), group in self._placing.own(blocks).items():
            part = QuestionPart(keyspace, [place for _, place in group], discard, self._counters)
            self._io_threads.put_lookup(part, node)

    def _token(self, task: Task, block: Lent) -> bytes:
        return b"%b-%x-%x" % (self._writer, task.task_id, block.position)
