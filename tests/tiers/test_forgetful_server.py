"""A server that forgets scripts, values or its ledger, or runs full: what is left on a real Redis, and what goes on."""

from __future__ import annotations

import time

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.redis_keys import claim_key
from kvstrata_sidecar.adapter.redis.client.commands import Terms
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import sweep, sweep_all
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES, Driver, block, stored
from tests.tiers.writer_by_hand import PLACE, ByHand, end_reservation

pytestmark = [*needs_redis, pytest.mark.claim("on a full or forgetful server the accounts are right, and limits hold")]


class TestAServerThatForgets:
    def test_scripts_that_were_flushed_are_sent_again_without_an_error(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=3 * VALUE_BYTES),))
        for number in range(1, 9):
            redis_server.admin().script_flush()
            assert driver.store([block(KEYSPACE_A, number)]).stored_bytes == BLOCK_BYTES
        redis_server.admin().script_flush()
        sweep(driver.tier, KEYSPACE_A, audit=True)
        assert driver.tier.state().errors == 0
        assert "sweep_errors" not in driver.tier.counters()
        books.assert_consistent()

    def test_a_server_that_runs_full_in_the_middle_keeps_its_books(
        self, driver: Driver, redis_server: RedisProcess, books: Books
    ) -> None:
        admin = redis_server.admin()
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 20 * VALUE_BYTES)
        outcomes = [driver.store([block(KEYSPACE_A, number)]).stored_bytes for number in range(40)]
        assert driver.refused("tier_full") > 0
        assert 0 < sum(outcomes) < 40 * BLOCK_BYTES
        books.assert_consistent()
        assert sum(driver.lookup([block(KEYSPACE_A, number) for number in range(40)])) == len(books.values())

    def test_a_full_server_can_still_be_swept_and_shrunk(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books, late: ByHand
    ) -> None:
        short = EnforcedBudget("shared", retention_s=1)
        gate.allow(KEYSPACE_A, budgets=(short,))
        driver.store([block(KEYSPACE_A, number) for number in range(16)])
        late.reserve(b"t", Terms(life_ms=1000))
        end_reservation(redis_server)
        redis_server.admin().config_set("maxmemory", 1)
        time.sleep(1.1)
        sweep(driver.tier, KEYSPACE_A)
        books.assert_consistent()
        assert books.totals().used == 0

    def test_a_lowered_limit_is_put_through_on_a_full_server(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=20 * VALUE_BYTES),))
        driver.store([block(KEYSPACE_A, number) for number in range(20)])
        redis_server.admin().config_set("maxmemory", 1)
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=5 * VALUE_BYTES),))
        sweep(driver.tier, KEYSPACE_A)
        assert books.totals().holds(5 * VALUE_BYTES)
        books.assert_consistent()

    def test_a_limit_where_there_was_none_is_put_through_on_a_full_server(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
    ) -> None:
        driver.store([block(KEYSPACE_A, number * 6) for number in range(40)])
        redis_server.admin().config_set("maxmemory", 1)
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=10 * VALUE_BYTES),))
        give_up_at_s = time.monotonic() + 60
        while not books.totals().holds(10 * VALUE_BYTES) or driver.tier.state().settling:
            assert time.monotonic() < give_up_at_s, (books.totals(), driver.tier.counters())
            time.sleep(0.02)
        assert "sweep_errors" not in driver.tier.counters()
        books.assert_consistent()

    def test_a_ledger_that_is_lost_on_a_full_server_is_rebuilt(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=20 * VALUE_BYTES),))
        driver.store([block(KEYSPACE_A, number * 6) for number in range(20)])
        redis_server.admin().config_set("maxmemory", 1)
        books.lose_ledger()
        transport = driver.tier._transport()
        driver.tier._deps.ledgers.of(transport, KEYSPACE_A).rebuild(0)
        transport.close()
        assert books.live()
        assert books.leases() == books.charged()

    def test_the_turn_of_all_scopes_works_on_a_full_server(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", retention_s=1),))
        driver.store([block(KEYSPACE_A, number * 6) for number in range(20)])
        time.sleep(1.1)
        redis_server.admin().delete(claim_key(DOMAIN, KEYSPACE_A))
        redis_server.admin().config_set("maxmemory", 1)
        sweep_all(driver.tier)
        assert not books.entries()
        assert "sweep_errors" not in driver.tier.counters()

    def test_a_value_that_somebody_deleted_is_a_miss_and_is_stored_again(
        self, driver: Driver, redis_server: RedisProcess, books: Books
    ) -> None:
        driver.store([block(KEYSPACE_A)])
        redis_server.admin().unlink(*stored(redis_server))
        assert driver.load([block(KEYSPACE_A)])[0] == [0]
        assert driver.store([block(KEYSPACE_A)]).stored_bytes == BLOCK_BYTES
        books.assert_consistent()

    def test_accounting_that_is_wrong_is_corrected_and_counted(
        self, driver: Driver, redis_server: RedisProcess, books: Books
    ) -> None:
        driver.store([block(KEYSPACE_A)])
        state = PLACE.base.decode() + ":#s"
        redis_server.admin().hincrby(state, "used", 1000)
        redis_server.admin().hincrby(state, "held", 50)
        redis_server.admin().zadd(PLACE.base.decode() + ":#x", {"stray": (time.time() + 3600) * 1000})
        sweep(driver.tier, KEYSPACE_A, audit=True)
        books.assert_consistent()
        assert driver.tier.counters()["drift_bytes"] == 1050
        assert driver.tier.counters()["drift_entries"] == 1
