"""The threads of a tier: workers for blocks, one for each node's lookups, and a timer.

Lookups, deletions and probes have their own lane and connection for each node, so that no request's lookup waits behind
a block of many megabytes. Blocks share one lane; loads go before stores, because requests wait for loads. The timer
also probes unreachable nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from kvstrata.contract.store.redis_keys import KEY_PREFIX
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client.commands import Place
from kvstrata_sidecar.adapter.redis.client.nodes import Node
from kvstrata_sidecar.adapter.redis.client.resp import NodeAwayError, PeerClosedError, SlotMovingError, TransportError
from kvstrata_sidecar.adapter.redis.client.slots import Address
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.exchanges import ProbePart
from kvstrata_sidecar.adapter.tier.blocks import QuestionPart, T
from kvstrata_sidecar.adapter.tier.queues import Lane
from kvstrata_sidecar.adapter.tier.tasks import Part, TaskTable
from kvstrata_sidecar.adapter.tier.threads import TierThreads, Worker

PROBE_TIMEOUT_S = 1.0


class RedisThreads(TierThreads):
    """`transport` makes one for each worker. In the lane `blocks`, a part's label is its node."""

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
