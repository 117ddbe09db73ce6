"""The servers of a tier: their addresses, slots and breakers.

A tier on one server is one node with all slots. In a cluster `Scout` fetches the map from the servers, and
redirections correct it at once. Every server has its own breaker, so that an unreachable one costs only its slots.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.dial import dial
from kvstrata_sidecar.adapter.redis.client.resp import AccessError, Command, NodeAwayError, ReplyError, TransportError
from kvstrata_sidecar.adapter.redis.client.slots import SLOTS, Address, Redirection, SlotMap, read_slots, slot_of
from kvstrata_sidecar.adapter.tier.breaker import Breaker, BreakerState
from kvstrata_sidecar.adapter.tier.threads import Upkeep

logger = logging.getLogger(__name__)

SCHEDULE_S = 30.0
IMPATIENT_S = 1.0
PAUSE_S = 0.25
"""Minimum pause between two fetches."""

QUESTION_TIMEOUT_S = 1.0
ASKED_AT_A_TIME = 8

FULL_PAUSE_S = 1.0
"""Pause of stores after a node was out of memory: each refusal costs the transfer of a whole block."""

UNNAMED = "the policy does not name the tier's servers"


@dataclass(slots=True, eq=False)
class Node:
    """One server and its breaker. Connections of an earlier `era` lead to a server that became a replica. Until
    `full_until_s` it takes no stores: it was out of memory at its last one, None if it was not."""

    addresses: tuple[Address, ...]
    breaker: Breaker
    era: int = 0
    full_until_s: float | None = None

    @property
    def address(self) -> Address:
        """Its address; for a tier on one server the first one to try."""
        return self.addresses[0]

    def __str__(self) -> str:
        return str(self.address)


class Topology:
    """Which node has which slot. Thread-safe. `seeds` are the declared addresses: of one server, or of servers of a
    `cluster` to ask; without any, no slot has a node. `only` is the node with all slots, None in a cluster. `changed`
    is called, without locks, when nodes came or went, `failed` when a node's breaker may have opened. `problem`: why
    the map could not be fetched."""

    def __init__(self, seeds: Sequence[Address], *, cluster: bool, clock: Callable[[], float]) -> None:
        self.cluster = cluster
        self.changed: Callable[[], None] = lambda: None
        self.failed: Callable[[], None] = lambda: None
        self._clock = clock
        self._condition = threading.Condition()
        self._wanted = False
        self._begin(seeds)

    def _begin(self, seeds: Sequence[Address]) -> None:
        self.seeds = tuple(seeds)
        self.only = None if self.cluster or not seeds else Node(self.seeds, Breaker(self._clock))
        self._owners: list[Node | None] = [self.only] * SLOTS
        self._nodes: dict[Address, Node] = {}
        self._strangers: dict[Address, Node] = {}
        self._known: dict[tuple[str, int], Address] = {}
        self.primaries: tuple[Node, ...] = () if self.only is None else (self.only,)
        self._served = SLOTS
        self._hint: Address | None = None
        self.problem = "" if seeds else UNNAMED

    def move(self, seeds: Sequence[Address]) -> None:
        """Leave all nodes for those at other addresses, of which nothing is known yet."""
        with self._condition:
            self._begin(seeds)
            self.want()
        self.changed()

    def node_of(self, key: bytes) -> Node | None:
        """Return the primary that owns the key's slot, None if unknown."""
        return self.only or self._owners[slot_of(key)]

    def owner(self, key: bytes) -> Node:
        """Return the primary that owns the key's slot. Raises NodeAwayError if unknown."""
        node = self.node_of(key)
        if node is None:
            raise NodeAwayError(self.problem or "no server of the cluster has this slot")
        return node

    def usable(self, key: bytes) -> Node | None:
        """Return the primary that owns the key's slot, None if unknown or away."""
        node = self.node_of(key)
        return node if node is not None and node.breaker.closed else None

    def known(self) -> tuple[Address, ...]:
        """Return the addresses of all servers in the newest map, replicas included."""
        return tuple(self._known.values())

    def follow(self, redirection: Redirection, *, strangers: bool) -> Node | None:
        """Return the node of a redirection and record its slot; None if the map lacks it, unless `strangers` may be
        followed, which authenticate themselves. A new map is requested."""
        address = redirection.address
        with self._condition:
            node = self._nodes.get(address)
            known = address.where in self._known
            if node is None and (known or strangers):
                node = self._strangers.get(address)
                if node is None:
                    node = self._strangers[address] = Node((address,), Breaker(self._clock))
            came = False
            if node is not None and redirection.for_good and self._owners[redirection.slot] is not node:
                self._owners[redirection.slot] = node
                came = node not in self.primaries
                if came:
                    self.primaries = (*self.primaries, node)
            self.want(address if known else None)
        if node is not None:
            node.breaker.vouched_for()
        if came:
            self.changed()
        return node

    def adopt(self, slot_map: SlotMap, seeds: Sequence[Address] | None = None) -> bool:
        """Put a map in force; return whether it differs from the one before. A map that was asked for at `seeds` is
        ignored if these are no longer the declared ones."""
        with self._condition:
            if seeds is not None and seeds is not self.seeds:
                return False
            old = {address: node for node in self.primaries for address in node.addresses}
            old |= self._strangers | self._nodes
            nodes = {one: old.get(one) or Node((one,), Breaker(self._clock)) for one in slot_map.primaries}
            by_index = [nodes[address] for address in slot_map.primaries]
            owners = [by_index[index] if index >= 0 else None for index in slot_map.owners]
            primaries = tuple(dict.fromkeys(node for node in owners if node is not None))
            differs = owners != self._owners
            came = set(primaries) != set(self.primaries)
            self._owners, self._nodes, self.primaries = owners, nodes, primaries
            self._strangers = {}
            self._served = slot_map.served
            self._known = {one.where: one for one in (*slot_map.replicas, *slot_map.primaries)}
            self.problem = ""
        if came:
            self.changed()
        return differs

    def blame(self, node: Node, error: Exception | str) -> None:
        node.breaker.failed(str(error), fatal=isinstance(error, AccessError))
        self.want()
        self.failed()

    def demoted(self, node: Node, era: int) -> None:
        """Record that a connection of `era` led to a replica: all connections of that era become invalid."""
        with self._condition:
            if node.era == era:
                node.era += 1
            self.want()

    def note_memory(self, key: bytes, *, has_memory: bool) -> None:
        """Record whether the node of a key had memory for it."""
        if (node := self.node_of(key)) is not None:
            node.full_until_s = None if has_memory else self._clock() + FULL_PAUSE_S

    def want(self, hint: Address | None = None) -> None:
        """Request a new map soon, from `hint` first."""
        with self._condition:
            self._hint = hint or self._hint
            if self.cluster and not self._wanted:
                self._wanted = True
                self._condition.notify_all()

    def wanted(self, timeout_s: float) -> bool:
        """Wait until the map is wanted; return whether it is."""
        with self._condition:
            self._condition.wait_for(lambda: self._wanted, timeout_s)
            wanted, self._wanted = self._wanted, False
            return wanted

    def candidates(self) -> tuple[Address | None, tuple[Address, ...], tuple[Address, ...]]:
        """Return which servers to ask for the map: the hinted one, usable ones with slots, and all."""
        with self._condition:
            hint, self._hint = self._hint, None
            usable = tuple(node.address for node in self.primaries if node.breaker.closed)
            return hint, usable, (*self._known.values(), *(node.address for node in self.primaries), *self.seeds)

    @property
    def whole(self) -> bool:
        """Whether usable nodes serve all slots."""
        return self._served == SLOTS and bool(self.primaries) and all(one.breaker.closed for one in self.primaries)

    def state(self) -> BreakerState:
        """Return the state of the tier as a whole: closed when any node's breaker is."""
        states = [node.breaker.state for node in self.primaries]
        return min(states, key=list(BreakerState).index, default=BreakerState.OPEN)

    def away(self) -> tuple[Node, ...]:
        return tuple(node for node in self.primaries if not node.breaker.closed)

    @property
    def full(self) -> bool:
        """Whether a node was out of memory at its last store."""
        return any(node.full_until_s is not None for node in self.primaries)

    def detail(self) -> str:
        """Return the fault, empty when all is well."""
        primaries, away = self.primaries, self.away()
        if self.only is not None:
            return self.only.breaker.detail
        if not primaries:
            return self.problem or "the cluster's slots are not known yet"
        if away:
            reasons = "; ".join(f"{node}: {node.breaker.detail}" for node in away[:3])
            return f"{len(away)} of {len(primaries)} servers are away: {reasons}"
        if self._served < SLOTS:
            return f"{SLOTS - self._served} slots have no server"
        return self.problem or next((node.breaker.detail for node in primaries if node.breaker.detail), "")


def key_of(node: Node, topology: Topology, prefix: str) -> bytes | None:
    """Return a name that begins with `prefix` in one of a node's slots, None if it has none."""
    candidates = (f"{prefix}:{{probe-{number}}}:#p".encode() for number in range(200_000))
    return next((key for key in candidates if topology.node_of(key) is node), None)


class Scout(Upkeep):
    """The thread that fetches a cluster's slot map, until it is closed: on a schedule, after a redirection or a lost
    connection, and every second while a server is away. Requests that arrive during a fetch are merged. `jitter`
    returns a number from 0 to 1."""

    def __init__(self, tier: TierParams, topology: Topology, jitter: Callable[[], float]) -> None:
        super().__init__(tier.name, "scout")
        self._tier = tier
        self._topology = topology
        self._jitter = jitter
        self._closed = threading.Event()
        self._last: tuple[Address, Connection] | None = None
        self._rest: list[Address] = []
        self._seeds = topology.seeds

    def run(self) -> None:
        while not self._closed.is_set():
            try:
                self.look()
            except Exception:
                logger.exception("The cluster could not be asked for its slots")
            if self._closed.wait(PAUSE_S):
                break
            period_s = SCHEDULE_S if self._topology.whole else IMPATIENT_S
            self._topology.wanted(period_s * (0.8 + 0.4 * self._jitter()))
        self._drop()

    def close(self) -> None:
        self._closed.set()
        self._topology.want()
        last = self._last
        if last is not None:
            last[1].abort()

    def look(self) -> None:
        """Ask until a server knows all slots, or adopt the best answer."""
        best: SlotMap | None = None
        problem = ""
        seeds = self._topology.seeds
        if seeds is not self._seeds:
            self._seeds, self._rest = seeds, []
        order = self._order(*self._topology.candidates())
        asked, self._rest = order[:ASKED_AT_A_TIME], order[ASKED_AT_A_TIME:]
        for address in asked:
            if self._closed.is_set():
                return
            try:
                answer = self._ask(address)
            except (TransportError, ReplyError) as error:
                problem = problem or str(error)
                self._drop()
                continue
            if best is None or answer.served > best.served:
                best = answer
            if best.served == SLOTS:
                break
        if best is not None and self._topology.adopt(best, seeds):
            logger.info("The cluster's slots: %s", ", ".join(map(str, best.primaries)))
        elif best is None and seeds:
            self._topology.problem = problem

    def _order(self, hint: Address | None, usable: Sequence[Address], known: Sequence[Address]) -> list[Address]:
        """Return the order of servers to ask: each pod begins elsewhere; servers left out last time come next."""
        first = [] if hint is None else [hint]
        if self._last is not None and self._last[0] in usable:
            first.append(self._last[0])
        start = int(self._jitter() * len(usable))
        return list(dict.fromkeys([*first, *usable[start:], *usable[:start], *self._rest, *known]))

    def _ask(self, address: Address) -> SlotMap:
        if self._last is None or self._last[0] != address or not self._last[1].usable:
            self._drop()
            self._last = (address, dial(address, self._tier))
        command = Command(b"", (b"CLUSTER", b"SLOTS"), lambda reply: read_slots(reply, address))
        answer: SlotMap | ReplyError
        (answer,) = self._last[1].exchange([command], give_up_after_s=QUESTION_TIMEOUT_S)
        if isinstance(answer, ReplyError):
            raise answer
        return answer

    def _drop(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last[1].close()
