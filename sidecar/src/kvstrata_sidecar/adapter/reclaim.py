"""Takes back what is lent when a policy guarantees more than is left, and keeps the sum of a tier's division right.

Whoever holds the claim does it for all: those who borrowed most give back first, until every guarantee is
covered. What that does not reach, as scopes on a server that is away, the sweeps do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstrata.contract.keys import rooms_claim_key

from .protocol import Transport, claim
from .rooms import Rooms

RECLAIM_CLAIM_MS = 5_000
PATIENCE_S = 60.0
"""How long after a change of guarantees what is lent is taken back out of turn."""


class Reclaim:
    """Whether this process has something to take back. `clock` returns seconds, `token` names this process."""

    def __init__(self, domain: str, rooms: Rooms, token: bytes, clock: Callable[[], float]) -> None:
        self._rooms = rooms
        self._token = token
        self._clock = clock
        self._tidy_key = rooms_claim_key(domain, "w").encode()
        self._key = rooms_claim_key(domain, "g").encode()
        self._until_s = 0.0

    def begin(self) -> None:
        """Note that guarantees changed."""
        self._until_s = self._clock() + PATIENCE_S

    def run(
        self,
        transport: Transport,
        capacity_bytes: int,
        guaranteed: Callable[[], Mapping[str, int]],
        give_back: Callable[[str], None],
        interrupted: Callable[[], bool],
    ) -> None:
        """Have scopes give back what is lent to them as long as guarantees need it, if this is to be done."""
        if self._clock() >= self._until_s:
            return
        if self._rooms.excess(transport, capacity_bytes) == 0:
            self._until_s = 0.0
            return
        if not claim(transport, self._key, self._token, RECLAIM_CLAIM_MS):
            return
        for keyspace in self._rooms.borrowers(transport, guaranteed()):
            if interrupted() or self._rooms.excess(transport, capacity_bytes) == 0:
                break
            give_back(keyspace)

    def tidy(self, transport: Transport, interval_s: float) -> int:
        """Add up what is lent and guaranteed, once an interval by one process; return by how much it differed."""
        if not claim(transport, self._tidy_key, self._token, int(interval_s * 750)):
            return 0
        return abs(self._rooms.tidy(transport))
