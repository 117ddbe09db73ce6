"""What a sweeper needs of its tier, and its connection for the scopes that the policy allows at that moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Permit
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.client.commands import Transport
from kvstrata_sidecar.adapter.redis.client.resp import ReplyError, TransportError

logger = logging.getLogger(__name__)


class SweeperConnection(Transport, Protocol):
    @property
    def usable(self) -> bool:
        """Whether it is open and in step as far as known."""

    def abort(self) -> None:
        """Make the command under way fail at once."""

    def close(self) -> None:
        """Close it."""


@dataclass(frozen=True, slots=True)
class SweeperHooks:
    """`life_ms` and `bounds` are a keyspace's; `learn` asks which of the policy's keyspaces the tier has revoked."""

    connect: Callable[[], SweeperConnection]
    usable: Callable[[], bool]
    life_ms: Callable[[str], int | None]
    bounds: Callable[[str], SharedBounds | None]
    count: Callable[[str, int, str], None]
    learn: Callable[[Transport, Collection[str]], None]


class SweeperAccess:
    """For one thread at a time; any may call `abort`."""

    def __init__(self, enforcement: Enforcement, hooks: SweeperHooks) -> None:
        self._enforcement = enforcement
        self._hooks = hooks
        self._connection: SweeperConnection | None = None

    def connected(self) -> SweeperConnection:
        """Return the connection, a new one if it was aborted."""
        if self._connection is None or not self._connection.usable:
            self.close()
            self._connection = self._hooks.connect()
        return self._connection

    def current(self) -> bool:
        """Whether the policy is fresh, or stale serving is allowed."""
        view = self._enforcement.view
        return view is not None and (view.rules.on_stale == "ServeStale" or self._enforcement.fresh())

    @contextmanager
    def permitted(self, keyspace: str) -> Iterator[bool]:
        """Yield whether the policy allows the tier for a scope; if that ends, the connection is aborted."""
        permit = self._enforcement.enter(keyspace, self.abort)
        if not isinstance(permit, Permit):
            yield False
            return
        try:
            yield True
        finally:
            permit.release()

    @contextmanager
    def each(self) -> Iterator[None]:
        """Isolate one of several independent steps: a node's failure is counted and logged."""
        try:
            yield
        except (TransportError, ReplyError) as error:
            self._hooks.count("sweep_errors", 1, "")
            logger.info("The sweep was interrupted: %s", error)

    @contextmanager
    def apart(self, keyspace: str) -> Iterator[bool]:
        """Yield whether the policy allows the tier for a scope, and isolate its failure."""
        with self.each(), self.permitted(keyspace) as permitted:
            yield permitted

    def abort(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.abort()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
