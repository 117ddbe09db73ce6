"""Eviction in ARC's order on a real Redis: as the paper says, scans cost little, and every promise of LRU holds too."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.contract.policy.bundle import TierBudget
from kvstrata.contract.store.redis_keys import BlockKey
from kvstrata_sidecar.adapter.redis.client.commands import FOR_EVER_MS, Bounds, Place, Terms, call, reserve, state_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from tests.support.amounts import examples
from tests.support.redis_binary import needs_redis
from tests.tiers.arc_model import Arc
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES, Driver
from tests.tiers.tier_driver import block as numbered
from tests.tiers.writers import Writer

pytestmark = needs_redis
SIZE = 100
CAPACITY = 6
KEEP_MS = 60_000
TERMS = Terms(life_ms=600_000, bounds=Bounds(CAPACITY * SIZE), arc=True)


def place(number: int) -> Place:
    """All in one bucket: ARC's lists are a bucket's."""
    return Place.of(BlockKey(DOMAIN, KEYSPACE_A, IDENTITY, 0, 0, bytes([0, number])))


class Bucket:
    """One bucket with room for `CAPACITY` blocks, asked for one block after another as a cache is."""

    def __init__(self, server: RedisProcess, connection: Connection) -> None:
        self._admin = server.admin()
        self._admin.flushall()
        self._connection = connection
        self._state = state_key(place(0).base)
        self._admin.hset(self._state, "lease", CAPACITY * SIZE)

    def request(self, number: int) -> bool:
        """Use a block if it is there, store it otherwise; whether it was there."""
        time.sleep(0.0011)  # no two in the same millisecond
        where = place(number)
        touch = call("touch", self._state, 1, where.member, read=lambda reply: reply)
        if self._connection.ask([touch]) == [1]:
            return True
        token = b"t%d" % number
        (answer,) = self._connection.ask([reserve(where, SIZE, token, TERMS, FOR_EVER_MS, 30_000)])
        assert answer.status == "ok"
        commit = call("commit", self._state, where.member, token, 600_000, 0, KEEP_MS, 1, read=lambda reply: reply)
        assert self._connection.set(where.name, [bytes(SIZE)], 30_000, commit) == b"ok"
        return False

    def remember(self) -> None:
        """Have some blocks used again and others evicted, so that their names are remembered."""
        for number in (*range(4), *range(4), *range(10, 20)):
            self.request(number)

    def names(self, index: str) -> list[int]:
        """The numbers of the blocks that an index names, in its order."""
        key = place(0).base.decode() + ":" + index
        members: list[bytes] = self._admin.zrange(key, 0, -1)
        return [bytes.fromhex(member.decode().rsplit(":", 1)[1])[1] for member in members]

    def lists(self) -> tuple[list[int], ...]:
        return tuple(self.names(index) for index in ("#a", "#f", "#b", "#c"))

    def target(self) -> float:
        return float(self._admin.hget(self._state, "p") or 0)


@pytest.fixture
def connection(redis_server: RedisProcess, connect_to: Callable[..., Connection]) -> Connection:
    return connect_to(redis_server.port)


class TestTheOrder:
    @settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.one_of(st.integers(0, 7), st.integers(0, 20)), min_size=20, max_size=90))
    def test_it_is_that_of_the_paper(
        self, redis_server: RedisProcess, connection: Connection, requests: list[int]
    ) -> None:
        bucket, model = Bucket(redis_server, connection), Arc(CAPACITY)
        for number in requests:
            assert bucket.request(number) == model.request(number)
            assert bucket.lists() == (model.t1, model.t2, model.b1, model.b2)
            assert bucket.target() == model.p

    def test_a_long_history_that_moves_the_target_both_ways(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        bucket, model = Bucket(redis_server, connection), Arc(CAPACITY)
        chance, targets = random.Random(3), set()
        for step in range(600):
            # Loops, a skewed set and scans by turns.
            phase = step // 60 % 3
            number = (step % 9, min(int(chance.expovariate(0.4)), 30), 40 + step % 60)[phase]
            assert bucket.request(number) == model.request(number), step
            assert bucket.lists() == (model.t1, model.t2, model.b1, model.b2), step
            targets.add(bucket.target())
        assert len(targets) >= 4
        assert {0.0} < targets


class TestWhatIsRemembered:
    def test_names_of_evicted_blocks_hold_no_bytes_and_are_charged_to_nobody(
        self, redis_server: RedisProcess, connection: Connection, books: Books
    ) -> None:
        bucket = Bucket(redis_server, connection)
        bucket.remember()
        assert 0 < len(books.names("#b", "#c")) <= CAPACITY
        totals = books.totals()
        assert totals.used == totals.stored == totals.charged == CAPACITY * SIZE
        books.assert_consistent()

    def test_they_are_gone_after_a_drop_a_shortened_retention_and_a_deletion(
        self, redis_server: RedisProcess, connection: Connection, books: Books
    ) -> None:
        state = state_key(place(0).base)
        for how in ("drop", "clamp", "discard", "sweep as LRU", "sweep long after"):
            bucket = Bucket(redis_server, connection)
            bucket.remember()
            names = books.names("#b", "#c")
            assert names, how
            if how == "discard":
                members = [name.removeprefix(place(0).base.decode() + ":").encode() for name in names]
                commands = [call("discard", state, *members, read=lambda reply: reply)]
            elif how == "drop":
                commands = [call("drop", state, 100, KEEP_MS, read=lambda reply: reply)]
            elif how == "clamp":
                commands = [call("clamp", state, 300_000, 0, 0, 100, read=lambda reply: reply)]
            elif how == "sweep as LRU":
                commands = [call("sweep", state, 100, 0, read=lambda reply: reply)]
            else:
                redis_server.admin().hset(state, "retention", 1)
                time.sleep(0.002)
                commands = [call("sweep", state, 100, 1, read=lambda reply: reply)]
            connection.ask(commands)
            assert not books.names("#b", "#c"), how

    def test_they_end_with_the_index_of_an_abandoned_keyspace(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        bucket = Bucket(redis_server, connection)
        bucket.remember()
        redis_server.admin().pexpire(place(0).base + b":#x", 1000)
        bucket.request(50)
        for name in ("#b", "#a", "#m", "#s"):
            assert redis_server.admin().pttl(place(0).base + b":" + name.encode()) > KEEP_MS, name

    def test_no_list_outlives_the_index_however_late_it_came_about(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        bucket = Bucket(redis_server, connection)
        bucket.remember()
        admin = redis_server.admin()
        names = [name.decode() for name in admin.scan_iter(count=1000)]
        assert any(name.endswith("#b") for name in names)
        assert not [name for name in names if admin.pttl(name) == -1]


class TestScans:
    BLOCKS = 64

    def hot_blocks_that_survive(self, driver: Driver, gate: GateStandIn) -> float:
        """A tenant uses 32 blocks by a skewed law while it scans, once each, ten times what fits."""
        gate.allow(KEYSPACE_A, budgets=(TierBudget("shared", limit_bytes=self.BLOCKS * VALUE_BYTES),))
        chance = random.Random(5)
        hot = [numbered(KEYSPACE_A, number * 8 % 256 + number // 32) for number in range(32)]
        cold = (number for number in range(256) if number % 8 > 1)
        weights = [1 / (rank + 1) for rank in range(len(hot))]

        def use(wanted: list[int]) -> None:
            blocks = [hot[number] for number in wanted]
            found = driver.lookup(blocks)
            there = [block for block, hit in zip(blocks, found, strict=True) if hit]
            if there:
                driver.load(there)
            driver.tier._sweeper.turn()
            missing = [block for block, hit in zip(blocks, found, strict=True) if not hit]
            if missing:
                driver.store(missing)

        for _ in range(6):
            use(list(range(32)))
        for _ in range(24):
            use(sorted(set(chance.choices(range(32), weights, k=4))))
            # One by one: what is reserved cannot go, and a batch is twice what such a small bucket holds.
            for number, _ in zip(cold, range(8), strict=False):
                driver.store([numbered(KEYSPACE_A, number)])
        return sum(driver.lookup(hot)) / len(hot)

    def test_arc_keeps_what_is_used_again_where_the_last_use_alone_loses_it(
        self, start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        kept = {}
        for order in ("LRU", "ARC"):
            redis_server.admin().flushall()
            driver = start(redis_server.port, eviction=order)
            driver.until("closed")
            kept[order] = self.hot_blocks_that_survive(driver, gate)
            assert driver.tier.counters()["evicted"] > 50
        assert kept["ARC"] >= 0.9, kept
        assert kept["LRU"] <= 0.7, kept


class TestPromisesThatHoldInBothOrders:
    def test_the_limit_at_every_instant_and_no_orphan_after_writers_were_killed(
        self, start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn, books: Books
    ) -> None:
        limit, window_ms = 400_000, 800
        driver = start(redis_server.port, window_ms=window_ms, eviction="ARC")
        driver.until("closed")
        gate.allow(KEYSPACE_A, budgets=(TierBudget("shared", limit_bytes=limit),))
        for turn in range(3):
            writers = [
                Writer(
                    redis_server.port, KEYSPACE_A,
                    limit=limit, window_ms=window_ms, seed=4 * turn + number, scale=64, eviction="ARC",
                )
                for number in range(3)
            ]  # fmt: skip
            for writer in writers:
                writer.first_line()
            until_s = time.monotonic() + 2
            observed, exercised = 0, False
            while time.monotonic() < until_s or observed < 30 or not exercised:
                totals = books.totals()
                assert totals.holds(limit), totals
                observed += 1
                exercised = exercised or bool(books.names("#f") and books.names("#b", "#c"))
                assert time.monotonic() < until_s + 60, "none was used again, or no eviction remembered"
            told = [writer.kill() for writer in writers]
            assert all(one["errors"] == 0 for one in told), told
        redis_server.outlast_clients()
        time.sleep(window_ms / 1000 + 0.05)
        driver.tier._sweeper.sweep(KEYSPACE_A)
        books.assert_consistent()
        driver.tier._sweeper.sweep(KEYSPACE_A, audit=True)
        assert not {"drift_entries", "drift_bytes"} & set(driver.tier.counters())
        driver.tier._sweeper.sweep(KEYSPACE_A)
        assert books.leases() == books.charged()

    def test_a_lowered_limit_and_one_for_a_few_blocks_are_kept(
        self, start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn, books: Books
    ) -> None:
        driver = start(redis_server.port, eviction="ARC")
        driver.until("closed")
        gate.allow(KEYSPACE_A, budgets=(TierBudget("shared", limit_bytes=40 * VALUE_BYTES),))
        driver.store([numbered(KEYSPACE_A, number * 6) for number in range(40)])
        for blocks in (10, 3):
            gate.allow(KEYSPACE_A, budgets=(TierBudget("shared", limit_bytes=blocks * VALUE_BYTES),))
            driver.tier._sweeper.turn()
            assert books.totals().holds(blocks * VALUE_BYTES)
            for number in range(12):
                assert driver.store([numbered(KEYSPACE_A, number * 21)]).stored_bytes == BLOCK_BYTES
            assert books.totals().holds(blocks * VALUE_BYTES)
            assert books.totals().used > blocks / 2 * VALUE_BYTES, "room is not wasted"
        books.assert_consistent()

    def test_a_tier_that_goes_back_to_the_order_of_use_evicts_what_arc_kept(
        self, start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn, books: Books
    ) -> None:
        arc = start(redis_server.port, eviction="ARC")
        arc.until("closed")
        gate.allow(KEYSPACE_A, budgets=(TierBudget("shared", limit_bytes=64 * VALUE_BYTES),))
        kept = [numbered(KEYSPACE_A, number * 8) for number in range(32)]
        for _ in range(2):
            arc.store(kept)
        arc.store([numbered(KEYSPACE_A, number * 4 + 1) for number in range(64)])
        assert books.names("#f")
        lru = start(redis_server.port, eviction="LRU")
        lru.until("closed")
        for first in [*range(126)[::9]] * 2:
            lru.store([numbered(KEYSPACE_A, number * 2 + 3) for number in range(first, first + 9)])
        assert books.totals().holds(64 * VALUE_BYTES)
        lru.tier._sweeper.sweep(KEYSPACE_A, audit=True)
        assert not books.names("#b", "#c")
        assert sum(lru.lookup(kept)) <= 2
        books.assert_consistent()
