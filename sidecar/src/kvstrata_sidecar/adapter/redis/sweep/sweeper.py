"""The thread that maintains a shared tier's index and accounting, on its own connection.

In each turn its jobs do the work that is due, one after the other, for about a second. A turn follows at once if a
job has more to do, otherwise a second later, or when the policy changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvstrata_sidecar.adapter.redis.client.commands import Transport
from kvstrata_sidecar.adapter.redis.client.resp import Command, ReplyError
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.sweep.apply_policy import ApplyPolicy
from kvstrata_sidecar.adapter.redis.sweep.audit_leases import AuditLeases
from kvstrata_sidecar.adapter.redis.sweep.connection import Deadline, SweeperConnection
from kvstrata_sidecar.adapter.redis.sweep.inbox import Inbox
from kvstrata_sidecar.adapter.redis.sweep.reclaim import ReclaimCapacity
from kvstrata_sidecar.adapter.redis.sweep.scopes import SweepScopes

TICK_S = 1.0
TURN_S = 1.0
"""Time after which the jobs of a turn leave the rest to the next."""


class Job(Protocol):
    """One kind of maintenance, with its own state."""

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:
        """Do due work until the deadline; return whether there is more. A failure ends it until the next turn."""


class FlushInbox:
    """Sends touches of blocks and abandoned reservations."""

    def __init__(self, deps: TierDeps) -> None:
        self._inbox = deps.inbox

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:  # noqa: ARG002
        for keyspace, command in self._inbox.take_commands():
            connection.attempt(keyspace, partial(_send, command=command))
        return False


def _send(transport: Transport, _: str, command: Command) -> None:
    try:
        transport.ask([command])
    except ReplyError as error:
        if error.code != "OOM":  # a full server takes no touches
            raise


def jobs_of(deps: TierDeps, apply_policy: ApplyPolicy) -> list[Job]:
    """Return the jobs of a tier in the order of a turn."""
    leases = AuditLeases(deps)
    capacity_bytes = deps.tier.capacity_bytes
    reclaim = None if capacity_bytes is None else ReclaimCapacity(deps, capacity_bytes)
    sweep = SweepScopes(deps, leases, lambda: None if reclaim is None else reclaim.request())
    return [FlushInbox(deps), apply_policy, leases, *([] if reclaim is None else [reclaim]), sweep]


class Sweeper(threading.Thread):
    """Runs jobs until it is closed."""

    def __init__(
        self, jobs: Sequence[Job], connection: SweeperConnection, inbox: Inbox, clock: Callable[[], float]
    ) -> None:
        super().__init__(daemon=True)
        self._jobs = jobs
        self._connection = connection
        self._inbox = inbox
        self._clock = clock
        self._turning = threading.Lock()

    def close(self) -> None:
        self._inbox.close()
        self._connection.abort()

    def run(self) -> None:
        while not self._inbox.closed:
            if not (self._connection.is_usable and self.turn()):
                self._inbox.wake.wait(TICK_S)
        self._connection.close()

    def turn(self) -> bool:
        """Run each job; return whether there is more to do."""
        with self._turning:
            self._inbox.wake.clear()
            until_s = self._clock() + TURN_S
            deadline = Deadline(lambda: self._inbox.closed or self._clock() >= until_s, self._inbox.interrupts)
            return sum([self._run(job, deadline) for job in self._jobs]) > 0

    def _run(self, job: Job, deadline: Deadline) -> bool:
        with self._connection.isolated(type(job).__name__):
            return job.run(self._connection, deadline)
        return False
