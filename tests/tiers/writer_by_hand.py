"""A writer that stops wherever a test wants it to, and the block that it writes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstrata.contract.store.redis_keys import member_of
from kvstrata_sidecar.adapter.redis.budget.ledger import Ledgers
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import WRITE_WINDOW_MS, Demand, Place, Terms
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.tier.encryption import PlainSealer
from tests.tiers.eraser import set_value
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, RESOLVED
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES

TERMS = Terms(life_ms=600_000)
BODY = bytes([7]) * BLOCK_BYTES
PLACE = Place.at(DOMAIN, KEYSPACE_A, member_of(RESOLVED, 0x01000100, 0, bytes([1]) * 32), bytes([1]) * 32)
"""Where the driver's block 1 is."""


class ByHand:
    """A writer that stops wherever a test wants it to. Its window is as long as a pod's, and ends when a test says."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._ledgers = Ledgers(DOMAIN, lambda *_: None, time.monotonic, WRITE_WINDOW_MS)

    def reserve(self, token: bytes, terms: Terms = TERMS) -> object:
        ledger = self._ledgers.of(self.connection, KEYSPACE_A, terms.bounds)
        (outcome,) = ledger.reserve([Demand(PLACE, VALUE_BYTES, token, terms)])
        return outcome

    def set(self) -> None:
        set_value(self.connection, PLACE.name, self.parts(), WRITE_WINDOW_MS)

    def set_and_commit(self, token: bytes, terms: Terms = TERMS) -> bool:
        asked = protocol.write(PLACE, self.parts, token, terms, WRITE_WINDOW_MS)
        self.connection.set_each([asked])
        return bool(asked.answer == "ok")

    def parts(self) -> Sequence[bytes | memoryview]:
        return PlainSealer().seal(KEYSPACE_A, PLACE.name, memoryview(BODY), 0)


def end_reservation(server: RedisProcess) -> None:
    """Have the time of the block's reservation be over, if there is one."""
    admin, reservations, member = server.admin(), f"{PLACE.base.decode()}:#r", PLACE.member.decode()
    if record := admin.hget(reservations, member):
        size, _, *rest = record.split(b":")
        admin.hset(reservations, member, b":".join([size, b"1", *rest]))


def outlast_the_window(server: RedisProcess) -> None:
    """Have as much time pass as a writer has: its reservation is dead then, and its value has expired."""
    end_reservation(server)
    admin, name = server.admin(), PLACE.name.decode()
    if 0 <= admin.pttl(name) <= WRITE_WINDOW_MS:
        admin.pexpire(name, 0)
