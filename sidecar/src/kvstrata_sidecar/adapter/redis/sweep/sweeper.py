"""The thread that maintains a shared tier's index and accounting, on its own connection.

In each turn its jobs do the work that is due, one after the other, for about a second. A turn follows at once if a
job has more to do, otherwise a second later, or when the policy changes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client.resp import Command, ReplyError, Transport, TransportError
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.tier.threads import Upkeep

logger = logging.getLogger(__name__)

TICK_S = 1.0
TURN_S = 1.0
"""Time after which the jobs of a turn leave the rest to the next."""


class Deadline(NamedTuple):
    """End of a turn: whether its time has passed, and whether work that can wait is left to another turn."""

    is_over: Callable[[], bool]
    is_interrupted: Callable[[], bool]


class SweeperConnection:
    """A connection for scopes that the policy allows at that moment. Any thread may abort it."""

    def __init__(self, deps: TierDeps, connect: Callable[[], ClusterTransport]) -> None:
        self._deps = deps
        self._connect = connect
        self._transport: ClusterTransport | None = None

    @property
    def is_usable(self) -> bool:
        """Whether there is a policy, and a server that answers."""
        deps = self._deps
        return deps.enforcement.view is not None and any(node.breaker.closed for node in deps.topology.primaries)

    def transport(self) -> ClusterTransport:
        """Return the transport, a new one if it was aborted."""
        if self._transport is None or not self._transport.usable:
            self.close()
            self._transport = self._connect()
        return self._transport

    @contextmanager
    def isolated(self, work: str) -> Iterator[None]:
        """Count and log a failure of a job, or of one of its steps, which affects no other."""
        try:
            yield
        except (TransportError, ReplyError) as error:
            logger.info("%s was interrupted: %s", work, error)
        except Exception:
            logger.exception("%s failed", work)
        else:
            return
        self._deps.counters.add("sweep_errors", 1)

    def attempt(self, keyspace: str, work: Callable[[Transport, str], object], *, listed: bool = True) -> bool:
        """Do work about a scope while the policy allows it, or about one that is not `listed` there. Return whether to
        repeat it: it failed, or returned a true value."""
        permit = self._deps.enforcement.enter(keyspace, self.abort) if listed else None
        if isinstance(permit, Refusal):
            return False
        again: object = True
        try:
            with self.isolated("The sweep of a scope"):
                again = work(self.transport(), keyspace)
        finally:
            if permit is not None:
                permit.release()
        return bool(again)

    def abort(self) -> None:
        transport = self._transport
        if transport is not None:
            transport.abort()

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


class Job(Protocol):
    """One kind of maintenance, with its own state."""

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:
        """Do due work until the deadline; return whether there is more. A failure ends it until the next turn."""


def _send(transport: Transport, _: str, command: Command) -> None:
    try:
        transport.ask([command])
    except ReplyError as error:
        if error.code != "OOM":  # a full server takes no touches
            raise


class Sweeper(Upkeep):
    """Sends the inbox and runs jobs, in this order in each turn, until it is closed."""

    def __init__(self, deps: TierDeps, connection: SweeperConnection, jobs: Sequence[Job]) -> None:
        super().__init__(deps.tier.name, "sweeper")
        self._connection = connection
        self._jobs = jobs
        self._inbox = deps.inbox
        self._clock = deps.clock
        self._turning = threading.Lock()

    def close(self) -> None:
        self._inbox.closed = True
        self._inbox.wake.set()
        self._connection.abort()

    def run(self) -> None:
        while not self._inbox.closed:
            if not (self._connection.is_usable and self.turn()):
                self._inbox.wake.wait(TICK_S)
        self._connection.close()

    def turn(self) -> bool:
        """Run each job once; return whether there is more to do."""
        with self._turning:
            self._inbox.wake.clear()
            until_s = self._clock() + TURN_S

            def is_over() -> bool:
                return self._inbox.closed or self._clock() >= until_s

            deadline = Deadline(is_over, lambda: is_over() or self._inbox.interrupts())
            with self._connection.isolated("The inbox"):
                for keyspace, command in self._inbox.take_commands():
                    self._connection.attempt(keyspace, partial(_send, command=command))
            return sum([self._run(job, deadline) for job in self._jobs]) > 0

    def _run(self, job: Job, deadline: Deadline) -> bool:
        with self._connection.isolated(type(job).__name__):
            return job.run(self._connection, deadline)
        return False
