"""Threads that carry a tier's parts: one connection each, two lanes.

Lookups, deletions and probes have a lane and a connection of their own, so that a block of many megabytes is never in
front of a lookup that a request waits for. Blocks share the other lane; loads go before stores, because somebody waits
for a load.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .enforcement import Enforcement, Permit, Refusal
from .resp import Connection, PeerClosedError
from .tasks import Key, Task, TaskTable


@dataclass(frozen=True, slots=True)
class Gain:
    """What a part achieved: indices of keys found, and the key and size of a block that was carried."""

    hits: tuple[int, ...] = ()
    key: Key = None
    size: int = 0


class Part(ABC):
    """One exchange with the server, all within one keyspace. `task` is None for what LMCache does not wait for."""

    task: Task | None
    keyspace: str | None
    urgent: bool

    @abstractmethod
    def run(self, connection: Connection) -> Gain:
        """Do the exchange. Raises TransportError or ReplyError."""

    def refused(self, refusal: Refusal) -> None:  # noqa: B027  (to be overridden by those that count)
        """Learn that the exchange is not allowed (any more)."""

    def over(self, error: Exception | None) -> None:  # noqa: B027  (to be overridden by those without a task)
        """Learn that the part is over, for those that no task waits for."""


class Lane:
    """A bounded queue; urgent parts leave it first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._urgent: deque[Part] = deque()
        self._patient: deque[Part] = deque()
        self._closed = False

    def put(self, part: Part) -> bool:
        """Add a part; False if the queue is full or closed."""
        with self._changed:
            if self._closed or len(self._urgent) + len(self._patient) >= self._limit:
                return False
            (self._urgent if part.urgent else self._patient).append(part)
            self._changed.notify()
            return True

    def take(self) -> Part | None:
        """Wait for a part; None once the lane is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._urgent or self._patient)
            if self._closed:
                return None
            return (self._urgent or self._patient).popleft()

    def forget(self, task: Task) -> None:
        """Remove the parts of a task that is over."""
        with self._changed:
            self._urgent = deque(part for part in self._urgent if part.task is not task)
            self._patient = deque(part for part in self._patient if part.task is not task)

    def close(self) -> list[Part]:
        """Refuse further parts, release the workers and return what was left."""
        with self._changed:
            self._closed = True
            left = [*self._urgent, *self._patient]
            self._urgent.clear()
            self._patient.clear()
            self._changed.notify_all()
            return left


@dataclass(frozen=True, slots=True)
class WorkerHooks:
    """What a worker needs of its tier. `usable` says whether a part may go to the server at all."""

    connect: Callable[[], Connection]
    usable: Callable[[Part], bool]
    succeeded: Callable[[Part], None]
    failed: Callable[[Part, Exception], None]


class Worker(threading.Thread):
    """Serves one lane over one connection until the lane is closed."""

    def __init__(self, name: str, lane: Lane, tasks: TaskTable, enforcement: Enforcement, hooks: WorkerHooks) -> None:
        super().__init__(name=name, daemon=True)
        self._lane = lane
        self._tasks = tasks
        self._enforcement = enforcement
        self._hooks = hooks
        self._lock = threading.Lock()
        self._part: Part | None = None
        self._aborted = False
        self._connection: Connection | None = None

    def run(self) -> None:
        """Take parts until the lane is closed."""
        while (part := self._lane.take()) is not None:
            self._serve(part)
        self._drop_connection()

    def abort(self, which: Callable[[Part], bool]) -> None:
        """Make the part under way fail at once if `which` picks it."""
        with self._lock:
            if self._part is not None and which(self._part):
                self._aborted = True
                if self._connection is not None:
                    self._connection.abort()

    def _serve(self, part: Part) -> None:
        error: Exception | None = None
        try:
            if self._hooks.usable(part):
                self._attempt(part)
            else:
                part.refused(Refusal.BREAKER_OPEN)
                self._drop(part)
        except Exception as failure:
            error = failure
            self._drop(part)
            self._hooks.failed(part, failure)
        part.over(error)

    def _attempt(self, part: Part) -> None:
        """Carry the part out; once more on a new connection if an idle one turns out to be dead."""
        connection, is_new = self._connected()
        try:
            self._exchange(part, connection)
        except PeerClosedError:
            if is_new or self._aborted:
                raise
            connection, _ = self._connected()
            self._exchange(part, connection)

    def _exchange(self, part: Part, connection: Connection) -> None:
        """Run the part between begin and end, under a permit, abortable; raises what the exchange raised."""
        task = part.task
        permit: Permit | None = None
        ended = False
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
                    gain = part.run(connection)
                    if task is not None:
                        self._tasks.end(task, hits=gain.hits, key=gain.key, size=gain.size)
                    ended = True
            finally:
                if task is not None and not ended:
                    self._tasks.pause(task)
        finally:
            with self._lock:
                self._part = None
                if self._aborted:
                    self._drop_connection()
            # Last, because a pod acknowledges once permits are back: by then every buffer is let go and answered for.
            if permit is not None:
                permit.release()
        if ended:
            self._hooks.succeeded(part)
        else:
            self._drop(part)

    def _enter(self, part: Part) -> Permit | Refusal | None:
        if part.keyspace is None:
            return None
        return self._enforcement.enter(part.keyspace, lambda: self.abort(lambda current: current is part))

    def _drop(self, part: Part) -> None:
        if part.task is not None:
            self._tasks.drop(part.task)

    def _connected(self) -> tuple[Connection, bool]:
        """Return a usable connection, and whether it is new."""
        connection = self._connection
        if connection is not None and connection.usable:
            return connection, False
        self._drop_connection()
        connection = self._hooks.connect()
        self._connection = connection
        return connection, True

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
