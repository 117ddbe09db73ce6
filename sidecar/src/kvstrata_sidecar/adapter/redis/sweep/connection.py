"""A sweeper's connection, for scopes that the policy allows at that moment, and the end of its turns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvstrata_sidecar.adapter.policy.enforcement import Permit
from kvstrata_sidecar.adapter.redis.client.commands import Transport
from kvstrata_sidecar.adapter.redis.client.resp import ReplyError, TransportError
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.redis.deps import TierDeps

logger = logging.getLogger(__name__)


class Deadline(NamedTuple):
    """End of a turn: `is_over` returns whether its time has passed, `is_preempted` whether urgent work waits."""

    is_over: Callable[[], bool]
    is_preempted: Callable[[], bool]

    def is_interrupted(self) -> bool:
        """Whether work that can wait is left to another turn."""
        return self.is_over() or self.is_preempted()


class SweeperConnection:
    """Any thread may abort it."""

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
        self._deps.count("sweep_errors", 1)

    def attempt(self, keyspace: str, work: Callable[[Transport, str], object], *, listed: bool = True) -> bool:
        """Do work about a scope while the policy allows it, or about one that is not `listed` there. Return whether to
        repeat it: it failed, or returned a true value.
        """
        permit = self._deps.enforcement.enter(keyspace, self.abort) if listed else None
        if listed and not isinstance(permit, Permit):
            return False
        again: object = True
        try:
            with self.isolated("The sweep of a scope"):
                again = work(self.transport(), keyspace)
        finally:
            if isinstance(permit, Permit):
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
