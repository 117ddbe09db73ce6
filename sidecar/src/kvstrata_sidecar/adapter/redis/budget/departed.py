"""Room of keyspaces that leave the policy, as a tenant's does whenever its epoch changes.

Their guarantee ends at once, and so does room without blocks: otherwise frequent epoch changes would hold a whole tier
for a quarter of an hour. Room of their blocks stays charged until it is needed (`reclaim_2`, which also finds keyspaces
that no pod saw leave). The last pod to see the new policy decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvstrata_sidecar.adapter.redis.budget.leases import Ledgers
from kvstrata_sidecar.adapter.redis.client.commands import Bounds, Transport

MAX_DEPARTED = 65_536


class Departed:
    """Keyspaces of one tier that left the policy and have yet to give their room back. For one thread."""

    def __init__(self, ledgers: Ledgers, bounds: Callable[[str], Bounds | None]) -> None:
        self._ledgers = ledgers
        self._bounds = bounds
        self._left: dict[str, None] = {}

    def follow(self, before: Collection[str], now: Collection[str]) -> None:
        for keyspace in now:
            self._left.pop(keyspace, None)
        for keyspace in before:
            if keyspace not in now and len(self._left) < MAX_DEPARTED:
                self._left[keyspace] = None

    def turn(self, transport: Callable[[], Transport], interrupted: Callable[[], bool]) -> None:
        """Give room back until interrupted. Raises as the transport does; what is left is tried again."""
        while self._left and not interrupted():
            keyspace = next(iter(self._left))
            bounds = self._bounds(keyspace)
            if bounds is not None and bounds.divided:
                self._give_back(transport(), keyspace)
            self._left.pop(keyspace, None)

    def _give_back(self, transport: Transport, keyspace: str) -> None:
        scope = self._ledgers.view(transport, keyspace)

        def empty() -> None:
            self._ledgers.take_unused(transport, keyspace, scope.others(None), sum(scope.leases))

        self._ledgers.rooms.leave(transport, keyspace, scope, empty)
