"""A writer that stops wherever a test wants it to, and the block that it writes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstrata.contract.store.redis_keys import BlockKey
from kvstrata_sidecar.adapter.redis.budget.ledger import Demand, Ledgers
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import Place, Terms
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.tier.sealer import PlainSealer
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES

WINDOW_MS = 800
TERMS = Terms(life_ms=600_000)
BODY = bytes([7]) * BLOCK_BYTES
PLACE = Place.of(BlockKey(DOMAIN, KEYSPACE_A, IDENTITY, 0x01000100, 0, bytes([1]) * 32))
"""Where the driver's block 1 is."""


class ByHand:
    """A writer that stops wherever a test wants it to."""

    def __init__(self, connection: Connection, window_ms: int = WINDOW_MS) -> None:
        self.connection = connection
        self._window_ms = window_ms
        self._ledgers = Ledgers(DOMAIN, lambda *_: None, time.monotonic, window_ms)

    def reserve(self, token: bytes, terms: Terms = TERMS) -> object:
        ledger = self._ledgers.of(self.connection, KEYSPACE_A, terms.bounds)
        (outcome,) = ledger.reserve([Demand(PLACE, VALUE_BYTES, token, terms)])
        return outcome

    def set(self) -> None:
        self.connection.set(PLACE.name, self.parts(), self._window_ms)

    def set_and_commit(self, token: bytes, terms: Terms = TERMS) -> bool:
        asked = protocol.write(PLACE, self.parts, token, terms, self._window_ms)
        self.connection.set_each([asked])
        return bool(asked.answer == "ok")

    def parts(self) -> Sequence[bytes | memoryview]:
        return PlainSealer().seal(KEYSPACE_A, PLACE.name, memoryview(BODY))


def outlast_the_window() -> None:
    time.sleep(WINDOW_MS / 1000 + 0.05)
