"""One shared tier as LMCache uses it: tasks in, parts out, answers by deadline.

Nothing here blocks its caller but `delete` and `close`: LMCache's two loops serve all tenants, so a blocked call would
stall them all.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstrata.contract.bundle import TierBudget
from kvstrata.contract.keys import KEY_PREFIX, bucket_of, member_of
from kvstrata.contract.link import SCOPE_DIGITS, ScopeUsage, TierState

from .block_parts import BATCH_BLOCKS, BATCH_BYTES, Lent, LoadPart, StorePart
from .cluster import Node, Topology
from .cluster_scout import Scout
from .counts import Counters, Histogram
from .crew import CLOSE_TIMEOUT_S, Crew
from .enforcement import Enforcement, Refusal
from .ledger import Ledgers
from .params import AdapterParams, TierParams
from .part import Part
from .parts import DeletePart, LookupPart, Shared
from .plaintext import Plaintext
from .protocol import WRITE_WINDOW_MS, Bounds, Place, Sought, Terms
from .revoked import RevokedSet
from .sealer import Sealer
from .sealer_gcm import sealers
from .slots import Address
from .sweeper import Sweeper
from .sweeper_hooks import SweeperHooks
from .tasks import Key, StoreOutcome, Task, TaskKind, TaskTable
from .ways import Ways

MEDIUM = "Redis"
FULL_PAUSE_S = 1.0
"""How long stores rest after the tier said that it has no memory: its answer costs the transfer of a whole block."""

SWEEP_INTERVAL_S = 60.0
TOKEN_BYTES = 9


class Block(NamedTuple):
    """What LMCache names one block by, and its own key object `key`, which is handed back untouched."""

    key: Key
    keyspace: str
    rank: int
    group: int
    chunk_hash: bytes


class Tier:
    """A Redis tier under the pod's enforcement.

    `answered(task)` is called from any thread, without locks, once a task's answer can be fetched by `pop_stores` or
    `pop_found`. The threads start with the object and end with `close`. `sealer` returns the calling thread's own, by
    default what `tier` asks for; `window_ms` is how long a value lives that is not committed.
    """

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
    ) -> None:
        self._domain, self._identity = params.domain, params.identity
        self._params = tier
        self._enforcement = enforcement
        self._clock = clock
        self._answered = answered
        self._tasks = TaskTable(self._answer)
        self._counters = Counters()
        self._deadlines_ms = {
            TaskKind.STORE: tier.store_deadline_ms,
            TaskKind.LOOKUP: tier.lookup_deadline_ms,
            TaskKind.LOAD: tier.load_deadline_ms,
        }
        self._full: dict[Node | None, float] = {}
        self._writer = secrets.token_hex(TOKEN_BYTES).encode()
        seeds = [Address(endpoint.host, endpoint.port) for endpoint in tier.endpoints]
        self._topology = topology = Topology(seeds, cluster=tier.cluster, clock=clock)
        self._ways = Ways(tier, topology)
        self._revoked = RevokedSet(self._domain)
        self._arc = tier.eviction == "ARC"
        ledgers = Ledgers(self._domain, self._counters.add, clock, window_ms, arc=self._arc)
        self._plaintext = Plaintext(self._domain, self._counters.add, window_ms=window_ms) if tier.encrypts else None
        self._sweeper = Sweeper(
            f"kvs-{tier.name}-sweeper",
            self._domain,
            enforcement,
            ledgers,
            SweeperHooks(
                self._ways.transport,
                lambda: any(node.breaker.closed for node in topology.primaries),
                self._retention_ms,
                self._bounds,
                self._counters.add,
                self._revoked.learn,
            ),
            token=secrets.token_hex(TOKEN_BYTES).encode(),
            interval_s=sweep_interval_s,
            clock=clock,
            jitter=random.random,
            arc=self._arc,
            plaintext=self._plaintext,
        )
        self._shared = Shared(
            counters=self._counters,
            ledgers=ledgers,
            sweeper=self._sweeper,
            ages=enforcement.ages,
            window_ms=window_ms,
            retention_ms=self._retention_ms,
            terms=self._terms,
            room=self._room,
            sealer=sealer or sealers(enforcement.keys, encrypt=tier.encrypts),
            revoked=self._revoked,
        )
        probe_prefix = f"{KEY_PREFIX}:{self._domain}"
        self._crew = Crew(
            tier, self._tasks, enforcement, topology, self._ways.transport, self._counters, clock, probe_prefix
        )
        self._scout = (
            Scout(f"kvs-{tier.name}-scout", topology, self._ways.dial, random.random) if tier.cluster else None
        )
        self._closed = False
        self._crew.start()
        self._sweeper.start()
        if self._scout is not None:
            self._scout.start()

    def store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        """Begin to store blocks from `views`; return the task's id. What is refused counts as stored with 0 bytes."""
        batches = self._batches(blocks, views, self._admitted(blocks, storing=True))
        task = self._open(TaskKind.STORE, len(blocks), len(batches), self._params.store_deadline_ms)
        for keyspace, node, batch in batches:
            named = [block._replace(token=self._token(task, block)) for block in batch]
            self._put(self._crew.put_block, StorePart(task, keyspace, named, self._shared), node)
        return task.task_id

    def lookup(self, blocks: Sequence[Block]) -> int:
        """Begin to look blocks up; return the task's id. Whatever is not known by the deadline is a miss."""
        groups: dict[tuple[str, Node], list[Sought]] = defaultdict(list)
        for keyspace, sought in self._sought(blocks):
            node = self._topology.node_of(sought.base)
            if node is None or not node.breaker.closed:
                self._counters.refuse(Refusal.BREAKER_OPEN, len(sought.numbers), keyspace)
            else:
                groups[keyspace, node].append(sought)
        task = self._open(TaskKind.LOOKUP, len(blocks), len(groups), self._params.lookup_deadline_ms)
        for (keyspace, node), buckets in groups.items():
            self._put(self._crew.put_lookup, LookupPart(task, keyspace, buckets, self._shared), node)
        return task.task_id

    def load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        """Begin to load blocks into `views`; return the task's id. Nothing touches a view once it is answered."""
        batches = self._batches(blocks, views, self._admitted(blocks))
        task = self._open(TaskKind.LOAD, len(blocks), len(batches), self._params.load_deadline_ms)
        for keyspace, node, batch in batches:
            self._put(self._crew.put_block, LoadPart(task, keyspace, batch, self._shared), node)
        return task.task_id

    def pop_stores(self) -> dict[int, StoreOutcome]:
        """Return, once, the stores answered since the last call."""
        return self._tasks.pop_stores()

    def pop_found(self, task_id: int) -> bytes | None:
        """Return, once, a byte for each block of a lookup or load, 1 for a hit; None while it is under way."""
        return self._tasks.pop_found(task_id)

    def delete(self, blocks: Sequence[Block]) -> list[Key]:
        """Delete blocks and return the keys of those that were there. It takes the load deadline at most."""
        groups: dict[tuple[str, Node], list[tuple[int, Place]]] = defaultdict(list)
        for index, place, node in self._admitted(blocks):
            groups[place.keyspace, node].append((index, place))
        deleted: list[Key] = []
        give_up_at_s = self._clock() + self._params.load_deadline_ms / 1000
        for (keyspace, node), group in groups.items():
            part = DeletePart(keyspace, [place for _, place in group], self._counters)
            if self._crew.put_lookup(part, node) is not None:
                continue
            if not part.done.wait(max(0.0, give_up_at_s - self._clock())):
                self._crew.give_up(part, "a deletion took too long")
                continue
            deleted += [blocks[index].key for (index, _), there in zip(group, part.deleted, strict=False) if there]
        return deleted

    def state(self) -> TierState:
        """Return what the pod reports about this tier."""
        counts = self._counters.snapshot()
        view, plaintext = self._enforcement.view, self._plaintext
        return TierState(
            name=self._params.name,
            medium=MEDIUM,
            breaker=str(self._topology.state()),
            detail=self._topology.detail() or self._full_detail(),
            stored=counts.get("stored", 0),
            loaded=counts.get("loaded", 0),
            refused=counts.get("refused", 0),
            errors=counts.get("errors", 0),
            full=bool(self._full),
            encrypted=self._params.encrypts,
            keyless=self._enforcement.keyless() if self._params.encrypts else 0,
            nodes=len(self._topology.primaries),
            nodes_away=len(self._topology.away()),
            capacity_bytes=self._params.capacity_bytes or 0,
            settling=self._sweeper.settling,
            unseen=plaintext.unseen(view.keyspaces.keys()) if plaintext is not None and view is not None else 0,
            plaintext=plaintext.found if plaintext is not None else 0,
        )

    def policy_changed(self) -> None:
        """Put what another view changes for stored blocks through soon."""
        self._sweeper.follow()
        view = self._enforcement.view
        if view is not None:
            self._counters.retain(view.keyspaces.keys())

    def usage(self) -> list[ScopeUsage]:
        """Return what scopes held here when this pod's sweeps last saw them."""
        rows = []
        for keyspace, used_bytes, blocks in self._sweeper.usage():
            bounds = self._bounds(keyspace)
            limit_bytes, guaranteed_bytes = (bounds.limit_bytes, bounds.guaranteed_bytes) if bounds else (None, 0)
            scope = keyspace[:SCOPE_DIGITS]
            row = ScopeUsage(scope, self._params.name, used_bytes, blocks, limit_bytes, guaranteed_bytes or None)
            rows.append(row)
        return rows

    def by_scope(self) -> dict[str, Mapping[str, int]]:
        """Return the counts that belong to scopes."""
        return self._counters.by_scope()

    def latencies(self) -> dict[str, Histogram]:
        """Return how long LMCache waited for answers."""
        return self._counters.latencies()

    def counters(self) -> dict[str, int]:
        """Return all counts of this tier."""
        return self._counters.snapshot()

    @property
    def healthy(self) -> bool:
        """Whether all threads are alive. A tier that is away is no fault of this process."""
        scouting = self._scout is None or self._scout.is_alive()
        return self._closed or (self._crew.alive and self._sweeper.is_alive() and scouting)

    def nodes(self) -> dict[str, str]:
        """Return the breaker's state of each server, by address, and what is wrong with it."""
        breakers = ((str(node), node.breaker) for node in self._topology.primaries)
        return {name: f"{one.state}: {one.detail}" if one.detail else str(one.state) for name, one in breakers}

    def close(self) -> None:
        """Abort what is under way, answer every task, end the threads."""
        self._closed = True
        if self._scout is not None:
            self._scout.close()
        self._crew.close()
        self._sweeper.close()
        for thread in (self._sweeper, self._scout):
            # One that is connecting cannot be hurried; it touches nothing of LMCache's and ends by itself.
            if thread is not None:
                thread.join(CLOSE_TIMEOUT_S)

    def _open(self, kind: TaskKind, key_count: int, parts: int, deadline_ms: int) -> Task:
        # What nobody works on has no deadline, by which `_answer` knows it.
        deadline_s = self._clock() + deadline_ms / 1000 if parts else float("inf")
        task = self._tasks.open(kind, key_count, parts, deadline_s)
        if parts:
            self._crew.wake_by(deadline_s)
        return task

    def _answer(self, task: Task) -> None:
        lasted_s = self._clock() - task.deadline_s + self._deadlines_ms[task.kind] / 1000
        if lasted_s >= 0:
            self._counters.observe(str(task.kind), lasted_s)
        self._answered(task)

    def _put(self, put: Callable[[Part, Node], Refusal | None], part: Part, node: Node) -> None:
        refusal = put(part, node)
        if refusal is not None:
            part.refused(refusal)
            if part.task is not None:
                self._tasks.drop(part.task)

    def _admitted(self, blocks: Sequence[Block], *, storing: bool = False) -> Iterator[tuple[int, Place, Node]]:
        """Give the index, place and node of each block that may be asked for now, and count the others."""
        refusals: dict[str, Refusal | None] = {}
        for index, block in enumerate(blocks):
            if block.keyspace not in refusals:
                refusals[block.keyspace] = self._refusal(block.keyspace)
            refusal = refusals[block.keyspace]
            if refusal is None:
                place = self._place(block)
                node = self._topology.node_of(place.base)
                if node is None or not node.breaker.closed:
                    refusal = Refusal.BREAKER_OPEN
                elif storing and self._clock() < self._full.get(node, 0.0):
                    refusal = Refusal.TIER_FULL
                else:
                    yield index, place, node
                    continue
            self._counters.refuse(refusal, 1, block.keyspace)

    def _sought(self, blocks: Sequence[Block]) -> list[tuple[str, Sought]]:
        """Return the blocks that may be looked up now, by keyspace and bucket, and count the others."""
        refusals: dict[str, Refusal | None] = {}
        buckets: dict[tuple[str, int], Sought] = {}
        for number, (_, keyspace, rank, group, chunk_hash) in enumerate(blocks):
            if keyspace not in refusals:
                refusals[keyspace] = self._refusal(keyspace)
            if (refusal := refusals[keyspace]) is not None:
                self._counters.refuse(refusal, 1, keyspace)
                continue
            which = keyspace, bucket_of(chunk_hash)
            if (sought := buckets.get(which)) is None:
                sought = buckets[which] = Sought.at(self._domain, *which)
            sought.members.append(member_of(self._identity, rank, group, chunk_hash).encode())
            sought.numbers.append(number)
        return [(keyspace, sought) for (keyspace, _), sought in buckets.items()]

    def _batches(
        self, blocks: Sequence[Block], views: Sequence[memoryview], admitted: Iterator[tuple[int, Place, Node]]
    ) -> list[tuple[str, Node, list[Lent]]]:
        """Divide blocks into parts, each of one keyspace and node, such that all workers have something to do."""
        groups: dict[tuple[str, Node], list[Lent]] = defaultdict(list)
        for index, place, node in admitted:
            groups[place.keyspace, node].append(Lent(index, blocks[index].key, place, views[index]))
        share = -(-len(blocks) // self._params.workers)
        batches: list[tuple[str, Node, list[Lent]]] = []
        for (keyspace, node), lent in groups.items():
            size, batch = 0, list[Lent]()
            for block in lent:
                if batch and (len(batch) == min(share, BATCH_BLOCKS) or size + len(block.view) > BATCH_BYTES):
                    batches.append((keyspace, node, batch))
                    size, batch = 0, []
                batch.append(block)
                size += len(block.view)
            batches.append((keyspace, node, batch))
        return batches

    def _token(self, task: Task, block: Lent) -> bytes:
        return b"%b-%x-%x" % (self._writer, task.task_id, block.position)

    def _place(self, block: Block) -> Place:
        member = member_of(self._identity, block.rank, block.group, block.chunk_hash)
        return Place.at(self._domain, block.keyspace, member, block.chunk_hash)

    def _refusal(self, keyspace: str) -> Refusal | None:
        refusal = self._enforcement.refusal(keyspace)
        if refusal is None and keyspace in self._revoked.revoked:
            return Refusal.REVOKED
        return self._shared.sealer().refusal(keyspace) if refusal is None else refusal

    def _terms(self, keyspace: str) -> Terms:
        """Return under what a new block may be stored now."""
        retention_ms = self._retention_ms(keyspace)
        return Terms(
            life_ms=1000 * self._params.default_ttl_s if retention_ms is None else retention_ms,
            bounds=self._bounds(keyspace),
            arc=self._arc,
            encrypts=self._params.encrypts,
        )

    def _retention_ms(self, keyspace: str) -> int | None:
        retention_s = self._enforcement.retention_s(keyspace, self._params.name)
        return None if retention_s is None else 1000 * retention_s

    def _bounds(self, keyspace: str) -> Bounds | None:
        """Return what a scope may use, None if that is not bounded."""
        budget = self._enforcement.budget(keyspace, self._params.name) or TierBudget(self._params.name)
        capacity = self._params.capacity_bytes
        if capacity is None:
            return None if budget.limit_bytes is None else Bounds(budget.limit_bytes)
        limit = capacity if budget.limit_bytes is None else min(capacity, budget.limit_bytes)
        return Bounds(limit, budget.guaranteed_bytes or 0, capacity)

    def _room(self, place: Place, left: bool) -> None:
        """Note whether the node of a block took it or had no memory for it."""
        node = self._topology.node_of(place.base)
        if not left:
            self._full[node] = self._clock() + FULL_PAUSE_S
        elif self._full:
            self._full.pop(node, None)

    def _full_detail(self) -> str:
        return "the tier is out of memory: it refuses blocks" if self._full else ""
