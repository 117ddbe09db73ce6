"""A server whose clock is set back: what is there from before then lies an hour ahead."""

from __future__ import annotations

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.redis_keys import claim_key
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import sweep
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES, Driver, block, stored
from tests.tiers.writer_by_hand import PLACE, ByHand

pytestmark = [
    *needs_redis,
    pytest.mark.claim("no block is served beyond its retention if the server's clock is set back"),
]
HOUR_MS = 3_600_000


def test_a_block_of_which_nobody_knows_how_old_it_is_is_no_hit_and_goes(
    idle: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
) -> None:
    gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", retention_s=60),))
    idle.store([block(KEYSPACE_A)])
    admin, base = redis_server.admin(), PLACE.base.decode()
    admin.zincrby(f"{base}:#x", HOUR_MS, PLACE.member.decode())
    admin.pexpire(PLACE.name.decode(), HOUR_MS)
    assert idle.lookup([block(KEYSPACE_A)]) == [0]
    assert idle.load([block(KEYSPACE_A)])[0] == [0]
    assert idle.store([block(KEYSPACE_A)]).stored_bytes == BLOCK_BYTES, "it is not in the way of a new one"
    assert idle.lookup([block(KEYSPACE_A)]) == [1]
    admin.zincrby(f"{base}:#x", HOUR_MS, PLACE.member.decode())
    sweep(idle.tier, KEYSPACE_A)
    assert stored(redis_server) == []
    books.assert_consistent()


def test_a_reservation_of_then_holds_nobody_up(
    idle: Driver, late: ByHand, redis_server: RedisProcess, books: Books
) -> None:
    for store_first in (True, False):
        assert late.reserve(b"t") is True
        admin, base = redis_server.admin(), PLACE.base.decode()
        bytes_, deadline, *rest = (admin.hget(f"{base}:#r", PLACE.member.decode()) or b"").split(b":")
        record = b":".join([bytes_, b"%d" % (int(deadline) + HOUR_MS), *rest])
        admin.hset(f"{base}:#r", PLACE.member.decode(), record)
        if store_first:
            assert idle.store([block(KEYSPACE_A)]).stored_bytes == BLOCK_BYTES
            idle.tier.delete([block(KEYSPACE_A)])
        else:
            sweep(idle.tier, KEYSPACE_A)
        assert books.reservations() == 0
        books.assert_consistent()


def test_a_claim_of_then_is_worth_nothing(redis_server: RedisProcess, late: ByHand) -> None:
    key = claim_key(DOMAIN, KEYSPACE_A)
    redis_server.admin().set(key, "somebody", px=HOUR_MS)
    assert protocol.claim(late.connection, key.encode(), b"me", 45_000)
    assert not protocol.claim(late.connection, key.encode(), b"other", 45_000)


def test_a_rebuild_that_was_begun_then_is_not_waited_for(
    idle: Driver, gate: GateStandIn, redis_server: RedisProcess, late: ByHand, books: Books
) -> None:
    gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=4 * VALUE_BYTES),))
    idle.store([block(KEYSPACE_A)])
    admin = redis_server.admin()
    ahead_ms = admin.time()[0] * 1000 + HOUR_MS
    admin.hset(books.ledger, mapping={"void": 1, "at": ahead_ms})
    idle.tier._deps.ledgers.of(late.connection, KEYSPACE_A).rebuild(books.version())
    assert books.live()
