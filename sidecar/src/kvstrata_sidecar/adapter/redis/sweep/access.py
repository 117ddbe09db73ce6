"""A sweeper's way to its tier: one connection, for the scopes whose policy allows it at that moment."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Permit
from kvstrata_sidecar.adapter.redis.client.resp import ReplyError, TransportError
from kvstrata_sidecar.adapter.redis.sweep.sweeper_hooks import SweeperConnection, SweeperHooks

logger = logging.getLogger(__name__)


class SweeperAccess:
    """Used by one thread at a time; any may call `abort`."""

    def __init__(self, enforcement: Enforcement, hooks: SweeperHooks) -> None:
        self._enforcement = enforcement
        self._hooks = hooks
        self._connection: SweeperConnection | None = None

    def connected(self) -> SweeperConnection:
        """Return the connection, another one if it was cut off."""
        if self._connection is None or not self._connection.usable:
            self.close()
            self._connection = self._hooks.connect()
        return self._connection

    def current(self) -> bool:
        """Whether the policy may be relied on now."""
        view = self._enforcement.view
        return view is not None and (view.rules.on_stale == "ServeStale" or self._enforcement.fresh())

    @contextmanager
    def permitted(self, keyspace: str) -> Iterator[bool]:
        """Whether the policy allows the tier for a scope; it does until the end, or the connection is cut off."""
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
        """Do one of several things that do not depend on one another: one node's failure is not the others'."""
        try:
            yield
        except (TransportError, ReplyError) as error:
            self._hooks.count("sweep_errors", 1, "")
            logger.info("The sweep was interrupted: %s", error)

    @contextmanager
    def apart(self, keyspace: str) -> Iterator[bool]:
        """Whether the policy allows the tier for a scope whose failure is not that of others."""
        with self.each(), self.permitted(keyspace) as permitted:
            yield permitted

    def abort(self) -> None:
        """Make what is under way fail at once."""
        connection = self._connection
        if connection is not None:
            connection.abort()

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
