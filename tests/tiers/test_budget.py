"""Limits on a real Redis: what holds at every instant, what changes when the policy or the server does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix
from kvstrata.objects.redis.users import users_acl
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.budget.ledger import ScopeLedger
from kvstrata_sidecar.adapter.redis.client.commands import call, read_text, reads_numbers, reads_status, state_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.resp import TransportError
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import stop, sweep
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES, Driver, block, stored
from tests.tiers.writers import Writer

pytestmark = needs_redis


def limited(gate: GateStandIn, limit: int | None, retention_s: int | None = None) -> None:
    gate.allow(KEYSPACE_A, KEYSPACE_B, budgets=(EnforcedBudget("shared", limit_bytes=limit, retention_s=retention_s),))


def until(condition: Callable[[], bool], what: object = "", timeout_s: float = 60) -> None:
    give_up_at_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at_s, what() if callable(what) else what
        time.sleep(0.02)


def stores(server: RedisProcess) -> int:
    """How many values were written to a server."""
    return int(server.admin().info("commandstats")["cmdstat_set"]["calls"])


def _second(reply: Any) -> int:
    return int(reply[1])


def spread(number: int) -> int:
    """A block number whose bucket differs from its neighbours'."""
    return (number * 16 + number // 16) % 256


@pytest.mark.claim("a scope's limit on Redis holds at every instant, over all pods that store")
class TestTheLimit:
    def test_it_holds_at_every_instant_while_four_processes_store_at_it(
        self, redis_server: RedisProcess, books: Books
    ) -> None:
        limit = 400_000
        writers = [
            Writer(redis_server.port, KEYSPACE_A, limit=limit, window_ms=30_000, seed=seed, scale=64)
            for seed in range(4)
        ]
        for writer in writers:
            writer.first_store()
        observations = 0
        enough_at_s, give_up_at_s = time.monotonic() + 6, time.monotonic() + 120
        # Values have half of 64 times 256 bytes on average: a limit is reached many times with so many.
        while time.monotonic() < enough_at_s or observations < 100 or stores(redis_server) < 500:
            assert time.monotonic() < give_up_at_s
            totals = books.totals()
            assert totals.holds(limit), totals
            observations += 1
        told = [writer.kill() for writer in writers]
        assert all(one["errors"] == 0 for one in told), told
        assert all(one["stored"] > 0 for one in told), told
        assert sum(one["evicted_bytes"] for one in told) > limit, "the limit was reached"
        assert books.totals().used > limit / 2, "and most of it is in use"

    def test_a_block_larger_than_the_limit_is_refused_and_costs_nobody_a_block(
        self, driver: Driver, gate: GateStandIn, books: Books
    ) -> None:
        limited(gate, VALUE_BYTES - 1)
        assert driver.store([block(KEYSPACE_A)]) == StoreOutcome(True, 0)
        assert driver.refused("over_budget") == 1
        assert books.totals().used == 0

    def test_one_scope_at_its_limit_takes_nothing_from_another(self, driver: Driver, gate: GateStandIn) -> None:
        limited(gate, 4 * VALUE_BYTES)
        driver.store([block(KEYSPACE_B, spread(number)) for number in range(4)])
        for number in range(40):
            driver.store([block(KEYSPACE_A, spread(number))])
        assert driver.lookup([block(KEYSPACE_B, spread(number)) for number in range(4)]) == [1] * 4

    def test_a_scope_at_its_limit_keeps_what_was_used_last(
        self, driver: Driver, gate: GateStandIn, books: Books
    ) -> None:
        limited(gate, 32 * VALUE_BYTES)
        for number in range(64):
            assert driver.store([block(KEYSPACE_A, spread(number))]).stored_bytes == BLOCK_BYTES, number
            time.sleep(0.002)
        found = driver.lookup([block(KEYSPACE_A, spread(number)) for number in range(64)])
        assert sum(found) >= 28, "room is not wasted"
        assert sum(found[48:]) >= 14, "the newest are there"
        assert sum(found[:24]) <= 3, "the oldest are gone"

    def test_a_block_that_is_read_outlives_one_that_is_not(self, driver: Driver, gate: GateStandIn) -> None:
        limited(gate, 4 * VALUE_BYTES)
        for number in range(4):
            driver.store([block(KEYSPACE_A, number)])
            time.sleep(0.01)
        driver.load([block(KEYSPACE_A, 0)])
        driver.tier._sweeper.turn()
        driver.store([block(KEYSPACE_A, 4)])
        assert driver.lookup([block(KEYSPACE_A, number) for number in range(5)]) == [1, 0, 1, 1, 1]

    def test_a_scope_without_a_limit_is_accounted_for_and_has_no_ledger(
        self, driver: Driver, redis_server: RedisProcess, books: Books
    ) -> None:
        driver.store([block(KEYSPACE_A, number) for number in range(10)])
        books.assert_consistent()
        assert books.totals().used == 10 * VALUE_BYTES
        assert not redis_server.admin().exists(books.ledger)


class TestALimitThatChanges:
    def test_a_lowered_limit_is_put_through_by_itself_and_the_oldest_go(
        self, driver: Driver, gate: GateStandIn, books: Books
    ) -> None:
        limited(gate, 40 * VALUE_BYTES)
        for number in range(40):
            driver.store([block(KEYSPACE_A, spread(number))])
            time.sleep(0.002)
        limited(gate, 10 * VALUE_BYTES)
        until(lambda: books.totals().holds(10 * VALUE_BYTES), lambda: (books.totals(), driver.tier.counters()))
        stop(driver.tier)
        books.assert_consistent()
        found = driver.lookup([block(KEYSPACE_A, spread(number)) for number in range(40)])
        assert 7 <= sum(found) <= 10
        assert sum(found[:20]) == 0

    def test_a_lowered_limit_and_one_for_a_few_blocks_are_kept(
        self, driver: Driver, gate: GateStandIn, books: Books
    ) -> None:
        stop(driver.tier)
        limited(gate, 40 * VALUE_BYTES)
        driver.store([block(KEYSPACE_A, number * 6) for number in range(40)])
        for blocks in (10, 3):
            limited(gate, blocks * VALUE_BYTES)
            while driver.tier._sweeper.turn():
                pass
            assert books.totals().holds(blocks * VALUE_BYTES)
            for number in range(12):
                assert driver.store([block(KEYSPACE_A, number * 21)]).stored_bytes == BLOCK_BYTES
            assert books.totals().holds(blocks * VALUE_BYTES)
            assert books.totals().used > blocks / 2 * VALUE_BYTES, "room is not wasted"
        books.assert_consistent()

    def test_a_limit_where_there_was_none_takes_hold(self, driver: Driver, gate: GateStandIn, books: Books) -> None:
        driver.store([block(KEYSPACE_A, spread(number)) for number in range(40)])
        limited(gate, 20 * VALUE_BYTES)
        until(lambda: books.totals().holds(20 * VALUE_BYTES), books.totals)
        assert books.totals().used >= 12 * VALUE_BYTES, "and takes no more than it has to"
        for number in range(40, 60):
            driver.store([block(KEYSPACE_A, spread(number))])
            assert books.totals().holds(20 * VALUE_BYTES)

    def test_a_raised_limit_is_room_at_once(self, driver: Driver, gate: GateStandIn, books: Books) -> None:
        limited(gate, 4 * VALUE_BYTES)
        driver.store([block(KEYSPACE_A, spread(number)) for number in range(8)])
        limited(gate, 30 * VALUE_BYTES)
        driver.store([block(KEYSPACE_A, spread(number)) for number in range(8, 30)])
        assert books.totals().used >= 22 * VALUE_BYTES


@pytest.mark.claim("a scope's limit holds although a server loses the ledger")
class TestALedgerThatIsLost:
    def lose(self, redis_server: RedisProcess, books: Books, how: str) -> None:
        admin = redis_server.admin()
        if how == "deleted":
            admin.delete(books.ledger)
        elif how == "another replication id":
            admin.execute_command("DEBUG", "CHANGE-REPL-ID")
        else:
            admin.hset(books.ledger, "void", "1")

    @pytest.mark.parametrize("how", ["deleted", "another replication id", "left void by a dead rebuilder"])
    def test_it_is_rebuilt_from_the_buckets_and_the_limit_holds(
        self, start: Callable[..., Driver], tmp_path: Path, gate: GateStandIn, how: str
    ) -> None:
        server = RedisProcess(tmp_path, "--enable-debug-command", "yes")
        server.start()
        driver, books = start(server.port), Books(server, KEYSPACE_A)
        driver.until("closed")
        limited(gate, 20 * VALUE_BYTES)
        driver.store([block(KEYSPACE_A, spread(number)) for number in range(12)])
        rebuilt = driver.tier.counters()["ledgers_rebuilt"]
        self.lose(server, books, how)
        for number in range(12, 50):
            assert driver.store([block(KEYSPACE_A, spread(number))]).stored_bytes == BLOCK_BYTES
            assert books.totals().holds(20 * VALUE_BYTES), books.totals()
        assert books.leases() == books.charged()
        assert driver.tier.counters()["ledgers_rebuilt"] > rebuilt
        server.kill()

    def test_what_a_dead_writer_was_granted_comes_back_after_two_sweeps(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
    ) -> None:
        stop(driver.tier)
        limited(gate, 20 * VALUE_BYTES)
        driver.store([block(KEYSPACE_A, spread(number)) for number in range(4)])
        driver.tier._sweeper.turn()
        redis_server.admin().hincrby(books.ledger, "b:3", 5 * VALUE_BYTES)
        redis_server.admin().hincrby(books.ledger, "leased", 5 * VALUE_BYTES)
        sweep(driver.tier, KEYSPACE_A)
        assert books.leases() != books.charged(), "one reading may be in the middle of a grant"
        sweep(driver.tier, KEYSPACE_A)
        assert books.leases() == books.charged()
        assert driver.tier.counters()["drift_leases"] == 1

    @pytest.mark.parametrize("blocks", [-6, 6], ids=["granted and never raised", "a server that fell back"])
    def test_leases_that_were_lost_are_found_in_a_scope_that_is_in_use(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books, blocks: int
    ) -> None:
        limited(gate, 40 * VALUE_BYTES)
        for number in range(60):
            driver.store([block(KEYSPACE_A, spread(number))])
        admin = redis_server.admin()
        for bucket in (1, 5, 9):
            if blocks > 0:
                admin.hincrby(f"{bucket_prefix(DOMAIN, KEYSPACE_A, bucket)}:#s", "lease", blocks * VALUE_BYTES)
            else:
                admin.hincrby(books.ledger, f"b:{bucket}", -blocks * VALUE_BYTES)
                admin.hincrby(books.ledger, "leased", -blocks * VALUE_BYTES)
        sweep(driver.tier, KEYSPACE_A)
        number = 60
        give_up_at_s = time.monotonic() + 60
        while "drift_leases" not in driver.tier.counters():
            assert time.monotonic() < give_up_at_s
            number += 1
            driver.store([block(KEYSPACE_A, spread(number % 256))])
        # Found is counted before it is repaired.
        until(lambda: books.totals().holds(40 * VALUE_BYTES) and books.leases() == books.charged(), books.totals)

    def test_a_repair_that_is_interrupted_is_tried_again_at_once(
        self,
        driver: Driver,
        gate: GateStandIn,
        redis_server: RedisProcess,
        books: Books,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        limited(gate, 20 * VALUE_BYTES)
        for number in range(24):
            driver.store([block(KEYSPACE_A, spread(number))])
        settle, failures = ScopeLedger.settle, list[ScopeLedger]()

        def fail_at_first(ledger: ScopeLedger) -> int:
            if len(failures) < 2:
                failures.append(ledger)
                raise TransportError("the connection was lost")
            return settle(ledger)

        monkeypatch.setattr(ScopeLedger, "settle", fail_at_first)
        with redis_server.admin().pipeline() as at_once:
            for bucket in (1, 5, 9):
                at_once.hincrby(f"{bucket_prefix(DOMAIN, KEYSPACE_A, bucket)}:#s", "lease", 6 * VALUE_BYTES)
            at_once.execute()
        sweep(driver.tier, KEYSPACE_A)
        until(lambda: len(failures) == 2 and books.totals().holds(20 * VALUE_BYTES), books.totals)
        assert driver.tier.counters()["drift_leases"] == 1

    def test_what_was_yielded_or_granted_under_an_older_ledger_counts_no_more(
        self,
        driver: Driver,
        gate: GateStandIn,
        books: Books,
        connect_to: Callable[..., Connection],
        redis_server: RedisProcess,
    ) -> None:
        stop(driver.tier)
        limited(gate, 20 * VALUE_BYTES)
        driver.store([block(KEYSPACE_A, 1)])
        driver.tier._sweeper.turn()
        connection, ledger = connect_to(redis_server.port), books.ledger.encode()
        scope = driver.tier._deps.ledgers.of(connection, KEYSPACE_A, SharedBounds(20 * VALUE_BYTES))
        scope.lease(0, 500, 500)
        state = state_key(bucket_prefix(DOMAIN, KEYSPACE_A, 0).encode())
        commands = [
            call(
                "lease", ledger, reads_status(5),
                bucket=0, wanted=500, minimum=1, limit=20 * VALUE_BYTES, keep_ms=60_000, divided=False, growth_share=0,
            ),
            call("yield", state, lambda reply: reads_numbers(4)(reply[:4]), bytes=100, evict_before_ms=0, count=10),
        ]  # fmt: skip
        ((leased, _), (taken, version, *_)) = connection.ask(commands)
        assert leased == "ok"
        assert taken == 100
        scope.rebuild(books.version())
        before = books.leases()
        late = [
            call("raise", state, read_text, bytes=500, of_version=version),
            call("return", ledger, read_text, bucket=0, bytes=taken, of_version=version),
        ]
        assert connection.ask(late) == ["void", "void"]
        assert books.leases() == books.charged() == before

    def test_what_was_found_void_and_was_made_anew_meanwhile_is_left_as_it_is(
        self,
        driver: Driver,
        gate: GateStandIn,
        redis_server: RedisProcess,
        books: Books,
        connect_to: Callable[..., Connection],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        limited(gate, 20 * VALUE_BYTES)
        driver.store([block(KEYSPACE_A, 1)])
        other, ledger = connect_to(redis_server.port), books.ledger.encode()
        begin = call("begin_rebuild", ledger, _second, seen=books.version(), at_least=0, patience_ms=200)
        version = other.ask([begin])[0]
        rebuild, finished = ScopeLedger.rebuild, []

        def once_the_other_has_ended(scope: ScopeLedger, seen_version: int) -> None:
            if not finished:
                states = [state_key(bucket_prefix(DOMAIN, KEYSPACE_A, bucket).encode()) for bucket in range(BUCKETS)]
                leases = other.ask(
                    [call("adopt", state, _second, of_version=version, keep_ms=60_000) for state in states]
                )
                finish = call(
                    "finish_rebuild", ledger, reads_status(1), of_version=version, keep_ms=60_000, leases=leases
                )
                finished.extend(other.ask([finish]))
                assert books.live()
            rebuild(scope, seen_version)

        monkeypatch.setattr(ScopeLedger, "rebuild", once_the_other_has_ended)
        bounds = SharedBounds(20 * VALUE_BYTES)
        scope = driver.tier._deps.ledgers.of(connect_to(redis_server.port), KEYSPACE_A, bounds)
        assert scope.lease(0, 100, 100) == 100
        assert finished, "the ledger was found void"
        assert books.version() == version

    def test_a_server_that_lost_everything_starts_anew(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
    ) -> None:
        limited(gate, 20 * VALUE_BYTES)
        driver.store([block(KEYSPACE_A, 1)])
        redis_server.kill()
        redis_server.start()
        driver.until("closed")
        assert driver.store([block(KEYSPACE_A, 2)]).stored_bytes == BLOCK_BYTES
        assert Books(redis_server, KEYSPACE_A).totals().holds(20 * VALUE_BYTES)
        assert stored(redis_server)


class TestTheUserOfAManagedServer:
    def test_its_rules_are_enough_for_everything_that_a_tier_does(
        self, start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn, tmp_path: Path, books: Books
    ) -> None:
        line = next(one for one in users_acl(DOMAIN, {"data": ("secret",)}).decode().splitlines() if " data " in one)
        redis_server.admin().execute_command("ACL", "SETUSER", "data", *line.split()[2:])
        (tmp_path / "password").write_text("secret")
        driver = start(redis_server.port, username="data", password_file=str(tmp_path / "password"))
        driver.until("closed")
        limited(gate, 20 * VALUE_BYTES, retention_s=3600)
        for number in range(40):
            assert driver.store([block(KEYSPACE_A, spread(number))]).stored_bytes == BLOCK_BYTES
        assert driver.load([block(KEYSPACE_A, spread(39))])[0] == [1]
        assert driver.tier.delete([block(KEYSPACE_A, spread(39))])
        stop(driver.tier)
        limited(gate, 10 * VALUE_BYTES, retention_s=60)
        while driver.tier._sweeper.turn():
            pass
        sweep(driver.tier, KEYSPACE_A, audit=True)
        assert driver.tier.state().errors == 0
        assert "sweep_errors" not in driver.tier.counters()
        assert books.totals().holds(10 * VALUE_BYTES)
        books.assert_consistent()
