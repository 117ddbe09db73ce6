"""Threads that carry a tier's parts, each over connections of its own.

Lookups, deletions and probes have a lane and a connection of their own for each node, so that a block of many megabytes
is never in front of a lookup that a request waits for. Blocks share the other lane; loads go before stores, because
somebody waits for a load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .cluster_transport import ClusterTransport
from .enforcement import Enforcement, Permit, Refusal
from .lanes import Lane
from .part import Gain, Part
from .tasks import TaskTable
from .wire import NodeAwayError, PeerClosedError, SlotMovingError

ATTEMPTS = 3
"""How many idle connections may turn out to have ended before a part fails: each attempt opens those anew."""


class Worker(threading.Thread):
    """Serves one lane until it is closed. `failed` is told of what no refusal has a name for."""

    def __init__(
        self,
        name: str,
        lane: Lane,
        tasks: TaskTable,
        enforcement: Enforcement,
        transport: ClusterTransport,
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._lane = lane
        self._tasks = tasks
        self._enforcement = enforcement
        self._transport = transport
        self._failed = failed
        self._lock = threading.Lock()
        self._part: Part | None = None
        self._aborted = False

    def run(self) -> None:
        """Take parts until the lane is closed."""
        while (taken := self._lane.take()) is not None:
            label, part = taken
            try:
                self._serve(part)
            finally:
                self._lane.done(label)
        self._transport.close()

    def abort(self, which: Callable[[Part], bool], why: str = "") -> None:
        """Make the part under way fail at once if `which` picks it; `why` blames the node that it waits for."""
        with self._lock:
            if self._part is not None and which(self._part):
                self._aborted = True
                self._transport.abort(why)

    def _serve(self, part: Part) -> None:
        error: Exception | None = None
        try:
            self._attempt(part)
        except Exception as failure:
            error = failure
            if isinstance(failure, NodeAwayError):
                part.refused(Refusal.BREAKER_OPEN)
            elif isinstance(failure, SlotMovingError):
                part.refused(Refusal.SLOT_MOVING)
            else:
                self._failed(failure)
            self._drop(part)
        part.over(error)

    def _attempt(self, part: Part) -> None:
        """Carry the part out; again on new connections if idle ones turn out to be dead."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._exchange(part)
                return
            except PeerClosedError as error:
                if not error.reused or self._aborted or attempt == ATTEMPTS:
                    raise

    def _exchange(self, part: Part) -> None:
        """Run the part between begin and end, under a permit, abortable; raises what the exchange raised."""
        task = part.task
        permit: Permit | None = None
        gain = Gain()
        ended = False
        self._transport.renew()
        with self._lock:
            self._part, self._aborted = part, False
        try:
            if task is not None and not self._tasks.begin(task):
                return
            try:
                entered = self._enter(part)
                if isinstance(entered, Refusal):
                    part.refused(entered)
                else:
                    permit = entered
                    part.run(self._transport, gain)
                    if task is not None:
                        self._tasks.end(task, gain.hits, gain.keys, gain.sizes)
                    ended = True
            finally:
                if task is not None and not ended:
                    self._tasks.pause(task, gain.hits, gain.keys, gain.sizes)
        finally:
            with self._lock:
                self._part = None
            # Last, because a pod acknowledges once permits are back: by then every buffer is let go and answered for.
            if permit is not None:
                permit.release()
        if not ended:
            self._drop(part)

    def _enter(self, part: Part) -> Permit | Refusal | None:
        if part.keyspace is None:
            return None
        return self._enforcement.enter(part.keyspace, lambda: self.abort(lambda current: current is part))

    def _drop(self, part: Part) -> None:
        if part.task is not None:
            self._tasks.drop(part.task)
