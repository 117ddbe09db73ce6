"""The threads of a tier: workers for blocks, one for each node's lookups, and a timer.

Lookups, deletions and probes have their own lane and connection for each node, so that no request's lookup waits behind
a block of many megabytes. Blocks share one lane; loads go before stores, because requests wait for loads. The timer
cancels tasks at their deadlines, aborts their parts, and probes unreachable nodes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from kvstrata.contract.store.redis_keys import KEY_PREFIX
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client.nodes import Node
from kvstrata_sidecar.adapter.redis.client.resp import NodeAwayError, PeerClosedError, SlotMovingError, TransportError
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.exchanges import ProbePart, QuestionPart, T
from kvstrata_sidecar.adapter.tier.queues import Lane
from kvstrata_sidecar.adapter.tier.tasks import AnyPart, Part, TaskTable
from kvstrata_sidecar.adapter.tier.workers import Worker

PROBE_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 1.0
LOGGED_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class TierThreads:
    """`transport` makes one for each worker."""

    def __init__(self, deps: TierDeps, tasks: TaskTable, transport: Callable[[], ClusterTransport]) -> None:
        self._deps = deps
        self._tasks = tasks
        self._topology = topology = deps.topology
        self._transport = transport
        self._clock = deps.clock
        self._tier = tier = deps.tier
        self._probe_prefix = f"{KEY_PREFIX}:{deps.domain}" if tier.cluster else None
        self._blocks = self._lane(self._share)
        self._block_workers = [self._worker(f"kvs-{tier.name}-{n}", self._blocks) for n in range(1, tier.workers + 1)]
        self._lock = threading.Lock()
        self._lookups: dict[Node, tuple[Lane, Worker]] = {}
        self._wake = threading.Condition()
        self._wake_at_s = 0.0
        self._log_at_s = 0.0
        self._closed = False
        self._timer = threading.Thread(target=self._keep_time, name=f"kvs-{tier.name}-timer", daemon=True)
        topology.changed = self._man
        topology.failed = self.wake

    def start(self) -> None:
        self._man()
        for thread in (*self._block_workers, self._timer):
            thread.start()

    def put_block(self, part: Part[ClusterTransport], node: Node) -> Refusal | None:
        """Queue a load or store for a node; return why not, None if queued."""
        return self._blocks.put(part, node)

    def put_lookup(self, part: Part[ClusterTransport], node: Node) -> Refusal | None:
        """Queue a part that must not wait behind blocks; return why not, None if queued."""
        with self._lock:
            manned = self._lookups.get(node)
        return Refusal.BREAKER_OPEN if manned is None else manned[0].put(part)

    def abort(self, which: Callable[[AnyPart], bool], why: str = "") -> None:
        """Abort the parts under way that `which` selects; `why` blames the nodes that they wait for."""
        for worker in self._workers():
            worker.abort(which, why)

    def answer(self, part: QuestionPart[T], patience_s: float, what: str) -> T | None:
        """Wait for the answer to a queued part, None if it failed or took too long: then it is removed or aborted."""
        if not part.done.wait(max(0.0, patience_s)):
            for lane in self._lanes():
                lane.forget(lambda waiting: waiting is part)
            self.abort(lambda current: current is part, f"{what} took too long")
            return None
        return part.answer

    def wake(self) -> None:
        """Check deadlines and breakers now."""
        self.wake_by(self._clock())

    def wake_by(self, moment_s: float) -> None:
        """Check deadlines and breakers by `moment_s`."""
        with self._wake:
            if moment_s < self._wake_at_s:
                self._wake_at_s = moment_s
                self._wake.notify_all()

    @property
    def alive(self) -> bool:
        return self._closed or (self._timer.is_alive() and all(worker.is_alive() for worker in self._workers()))

    def close(self) -> None:
        """Abort everything, answer every task, end the threads."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for lane in self._lanes():
            self._end(lane.close(), "the tier was closed")
        self._tasks.expire(float("inf"))
        self.abort(lambda _: True)
        for thread in (*self._workers(), self._timer):
            thread.join(CLOSE_TIMEOUT_S)

    def _workers(self) -> Iterator[Worker]:
        with self._lock:
            lookups = [worker for _, worker in self._lookups.values()]
        yield from lookups
        yield from self._block_workers

    def _lanes(self) -> list[Lane]:
        with self._lock:
            return [self._blocks, *(lane for lane, _ in self._lookups.values())]

    def _lane(self, share: Callable[[], int | None] = lambda: None) -> Lane:
        return Lane(self._tier.queue_limit, self._tier.queue_limit_bytes, share)

    def _worker(self, name: str, lane: Lane) -> Worker:
        return Worker(
            name,
            lane,
            self._tasks,
            self._deps.enforcement,
            self._transport(),
            self._failed,
            tier=self._tier.name,
            refusal_of=_refusal_of,
            worth_another=_worth_another,
        )

    def _share(self) -> int | None:
        """Return how many workers one node may occupy: half of them if there is another, None for all."""
        return None if len(self._topology.primaries) < 2 else max(1, self._tier.workers // 2)

    def _failed(self, error: Exception) -> None:
        """Count the error, and log it if no breaker reports it: a refusal by the server, or a defect of ours."""
        self._deps.counters.add("errors")
        now_s = self._clock()
        if not isinstance(error, (TransportError, OSError)) and now_s >= self._log_at_s:
            self._log_at_s = now_s + LOGGED_EVERY_S
            logger.error("Blocks cannot be carried to or from tier %s", self._tier.name, exc_info=error)

    def _man(self) -> None:
        """Give each node with slots a lane and a worker for lookups, and end those of nodes without slots."""
        started: list[Worker] = []
        with self._lock:
            primaries = self._topology.primaries
            gone = [self._lookups.pop(node) for node in tuple(self._lookups) if node not in primaries]
            for node in primaries:
                if node not in self._lookups and not self._closed:
                    lane = self._lane()
                    self._lookups[node] = lane, self._worker(f"kvs-{self._tier.name}-{node}", lane)
                    started.append(self._lookups[node][1])
            for worker in started:
                worker.start()
        for lane, _ in gone:
            self._end(lane.close(), "the node has no slots any more")
        self.wake()

    def _end(self, parts: list[AnyPart], why: str) -> None:
        for part in parts:
            if part.task is not None:
                self._tasks.drop(part.task)
            part.over(TransportError(why))

    def _keep_time(self) -> None:
        """Cancel late tasks and send the breakers' probes, until closed."""
        while True:
            self._expire()
            for node in self._topology.primaries:
                if node.breaker.begin_probe():
                    self._probe(node)
            with self._wake:
                if self._closed:
                    return
                now_s = self._clock()
                pauses = [node.breaker.probe_in_s() for node in self._topology.primaries]
                moments = [self._tasks.next_deadline_s(), *(now_s + one for one in pauses if one is not None)]
                self._wake_at_s = min((moment for moment in moments if moment is not None), default=float("inf"))
                if self._wake_at_s > now_s:
                    self._wake.wait(None if self._wake_at_s == float("inf") else self._wake_at_s - now_s)

    def _probe(self, node: Node) -> None:
        part = ProbePart(node, self._topology, self._probe_prefix, PROBE_TIMEOUT_S, self.wake)
        refusal = self.put_lookup(part, node)
        if refusal is not None:
            node.breaker.probe_failed(f"no probe could be sent: {refusal}")

    def _expire(self) -> None:
        for task in self._tasks.expire(self._clock()):
            self._deps.counters.add(f"late_{task.kind}")
            for lane in self._lanes():
                lane.forget(lambda part, task=task: part.task is task)  # type: ignore[misc]
            self.abort(
                lambda part, task=task: part.task is task,  # type: ignore[misc]
                f"a {task.kind} took longer than its deadline",
            )


def _refusal_of(error: Exception) -> Refusal | None:
    if isinstance(error, NodeAwayError):
        return Refusal.BREAKER_OPEN
    return Refusal.SLOT_MOVING if isinstance(error, SlotMovingError) else None


def _worth_another(error: Exception) -> bool:
    """Whether an idle connection had ended: the next attempt opens a new one."""
    return isinstance(error, PeerClosedError) and error.reused
