"""Writers that are killed, frozen or late: what is left on a real Redis, and that one sweep puts it right."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import WRITE_WINDOW_MS, Terms
from kvstrata_sidecar.adapter.tier.encryption import PlainSealer
from tests.support.amounts import SEED
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import sweep
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES, Driver, block, stored
from tests.tiers.writer_by_hand import BODY, PLACE, ByHand, end_reservation, outlast_the_window
from tests.tiers.writers import Writer

pytestmark = [
    *needs_redis,
    pytest.mark.claim(
        "writers that are killed, frozen or late leave nothing that is read, and right accounts after a sweep"
    ),
]
WINDOW_MS = 800
"""How long the processes that write have for a store: some freeze for longer."""


def outlast_all_windows() -> None:
    time.sleep(WINDOW_MS / 1000 + 0.05)


class TestWritersThatAreKilled:
    @pytest.mark.parametrize("limit", [12_000_000, 0], ids=["at a limit", "without a limit"])
    def test_one_sweep_leaves_no_orphan_no_ghost_and_right_accounting(
        self, idle: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books, limit: int
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=limit or None),))
        chance = random.Random(1 + SEED)
        kills_in_the_middle = turn = 0
        while turn < 3 or (turn < 12 and kills_in_the_middle == 0):
            turn += 1
            writers = [
                Writer(redis_server.port, KEYSPACE_A, limit=limit, window_ms=WINDOW_MS, seed=4 * turn + n, scale=4096)
                for n in range(4)
            ]
            for writer in writers:
                writer.first_line()
            for writer in writers:
                time.sleep(chance.random() / 5)
                before = books.reservations()
                writer.kill()
                kills_in_the_middle += before > 0 and books.reservations() > 0
        assert kills_in_the_middle > 0, "some died between reservation and commit"
        redis_server.outlast_clients()
        outlast_all_windows()
        sweep(idle.tier, KEYSPACE_A)
        books.assert_consistent()
        assert books.totals().used > 0
        sweep(idle.tier, KEYSPACE_A, audit=True)
        assert not {"drift_entries", "drift_bytes"} & set(idle.tier.counters())
        if limit:
            sweep(idle.tier, KEYSPACE_A)
            assert books.leases() == books.charged()
            assert books.totals().holds(limit)

    def test_writers_that_freeze_beyond_the_window_and_wake_leave_nothing_wrong(
        self, idle: Driver, redis_server: RedisProcess, books: Books
    ) -> None:
        limit = 12_000_000
        writers = [
            Writer(redis_server.port, KEYSPACE_A, limit=limit, window_ms=WINDOW_MS, seed=seed, scale=4096)
            for seed in range(3)
        ]
        for writer in writers:
            writer.first_line()
        chance = random.Random(2 + SEED)
        for turn in range(6):
            writer = writers[turn % 3]
            writer.freeze()
            time.sleep(WINDOW_MS / 1000 * (0.5 + chance.random()))
            sweep(idle.tier, KEYSPACE_A)
            totals = books.totals()
            assert totals.used + totals.held <= totals.lease <= totals.granted <= limit
            writer.thaw()
            time.sleep(0.05)
        for writer in writers:
            writer.kill()
        redis_server.outlast_clients()
        outlast_all_windows()
        sweep(idle.tier, KEYSPACE_A)
        books.assert_consistent()


class TestWritersThatAreLate:
    def test_a_value_that_was_never_committed_is_no_hit_and_goes_by_itself(
        self, idle: Driver, late: ByHand, redis_server: RedisProcess, books: Books
    ) -> None:
        assert late.reserve(b"t") is True
        late.set()
        assert idle.lookup([block(KEYSPACE_A)]) == [0]
        assert idle.load([block(KEYSPACE_A)])[0] == [0]
        outlast_the_window(redis_server)
        assert stored(redis_server) == []
        sweep(idle.tier, KEYSPACE_A, audit=False)
        books.assert_consistent()

    def test_a_set_without_a_reservation_is_no_hit_and_goes_by_itself(
        self, idle: Driver, late: ByHand, redis_server: RedisProcess
    ) -> None:
        late.set()
        assert idle.lookup([block(KEYSPACE_A)]) == [0]
        assert 0 < redis_server.admin().pttl(PLACE.name.decode()) <= WRITE_WINDOW_MS

    def test_a_commit_after_its_reservation_was_swept_takes_the_value_along(
        self, idle: Driver, late: ByHand, redis_server: RedisProcess, books: Books
    ) -> None:
        late.reserve(b"t")
        outlast_the_window(redis_server)
        sweep(idle.tier, KEYSPACE_A)
        assert late.set_and_commit(b"t") is False
        assert stored(redis_server) == []
        books.assert_consistent()

    def test_the_sweep_of_a_dead_reservation_takes_its_value_along(
        self, idle: Driver, late: ByHand, redis_server: RedisProcess, books: Books
    ) -> None:
        late.reserve(b"t")
        late.set()
        end_reservation(redis_server)
        assert len(stored(redis_server)) == 1
        sweep(idle.tier, KEYSPACE_A)
        assert stored(redis_server) == []
        books.assert_consistent()

    def test_a_late_set_over_anothers_block_changes_neither_its_life_nor_its_bytes(
        self, idle: Driver, late: ByHand, redis_server: RedisProcess, books: Books
    ) -> None:
        late.reserve(b"t")
        outlast_the_window(redis_server)
        assert idle.store([block(KEYSPACE_A)], fill=7).stored_bytes == BLOCK_BYTES
        expires_ms = redis_server.admin().pexpiretime(PLACE.name.decode())
        assert late.set_and_commit(b"t") is False
        assert redis_server.admin().pexpiretime(PLACE.name.decode()) == expires_ms > 0
        assert idle.load([block(KEYSPACE_A)]) == ([1], [bytearray(BODY)])
        books.assert_consistent()

    def test_a_late_set_whose_writer_then_dies_costs_the_block_and_is_counted_as_drift(
        self, idle: Driver, late: ByHand, redis_server: RedisProcess, books: Books
    ) -> None:
        idle.store([block(KEYSPACE_A)])
        late.set()
        outlast_the_window(redis_server)
        assert idle.load([block(KEYSPACE_A)])[0] == [0]
        sweep(idle.tier, KEYSPACE_A, audit=True)
        books.assert_consistent()
        assert idle.tier.counters()["drift_entries"] == 1
        assert idle.tier.counters()["drift_bytes"] == VALUE_BYTES
        assert idle.store([block(KEYSPACE_A)]).stored_bytes == BLOCK_BYTES

    def test_a_late_set_does_not_make_a_block_readable_beyond_its_life(
        self, idle: Driver, late: ByHand, redis_server: RedisProcess
    ) -> None:
        late.reserve(b"t")
        assert late.set_and_commit(b"t")
        assert idle.lookup([block(KEYSPACE_A)]) == [1]
        admin, long_ago_ms = redis_server.admin(), 1
        admin.zadd(f"{PLACE.base.decode()}:#x", {PLACE.member.decode(): long_ago_ms})
        admin.pexpireat(PLACE.name.decode(), long_ago_ms)
        assert stored(redis_server) == [], "its life is over"
        late.set()
        assert len(stored(redis_server)) == 1, "the value is there again, for the window"
        assert idle.lookup([block(KEYSPACE_A)]) == [0]
        assert idle.load([block(KEYSPACE_A)])[0] == [0]

    def test_what_a_block_took_to_be_written_is_a_part_of_its_life(
        self, late: ByHand, redis_server: RedisProcess
    ) -> None:
        terms = Terms(life_ms=100_000, age_ms=90_000)
        late.reserve(b"t", terms)
        time.sleep(0.5)
        assert late.set_and_commit(b"t", terms)
        base = PLACE.base.decode()
        assert redis_server.admin().pttl(PLACE.name.decode()) <= 9_500
        expiry_ms = redis_server.admin().zscore(f"{base}:#x", PLACE.member.decode())
        computed_ms = int((redis_server.admin().hget(f"{base}:#m", PLACE.member.decode()) or b"").split(b":")[1])
        assert abs(expiry_ms - computed_ms - 100_000) <= 1

    def test_two_writers_of_one_block_store_it_once(self, idle: Driver, late: ByHand, books: Books) -> None:
        assert late.reserve(b"t") is True
        assert idle.store([block(KEYSPACE_A)]).stored_bytes == 0, "another is about to"
        assert late.set_and_commit(b"t")
        assert idle.store([block(KEYSPACE_A)]).stored_bytes == 0
        assert idle.tier.counters()["stores_present"] == 2
        assert idle.tier.state().refused == 0
        books.assert_consistent()

    def test_a_reservation_asked_for_twice_by_one_writer_is_charged_once(self, late: ByHand, books: Books) -> None:
        assert late.reserve(b"t") is True
        assert late.reserve(b"t") is True
        assert books.totals().held == VALUE_BYTES
        assert late.set_and_commit(b"t")
        books.assert_consistent()

    def test_nobody_commits_or_gives_up_anothers_reservation(
        self, late: ByHand, redis_server: RedisProcess, books: Books
    ) -> None:
        late.reserve(b"first")
        outlast_the_window(redis_server)
        assert late.reserve(b"second") is True, "the first is dead"
        assert late.set_and_commit(b"first") is False
        abandon = protocol.call(
            "abandon", protocol.state_key(PLACE.base), protocol.read_number, member=PLACE.member, token=b"first"
        )
        assert late.connection.ask([abandon]) == [0]
        assert books.reservations() == 1
        assert books.totals().held == VALUE_BYTES
        assert late.set_and_commit(b"second")
        books.assert_consistent()

    def test_a_store_that_was_cut_off_gives_its_reservation_back_at_once(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess, books: Books
    ) -> None:
        driver = start(redis_server.port)
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        driver.store([block(KEYSPACE_A)])
        driver.tier.delete([block(KEYSPACE_A)])
        cut = threading.Event()

        class CutOff(PlainSealer):
            def seal(
                self, keyspace: str, key: bytes, view: memoryview, computed_ms: int
            ) -> Sequence[bytes | memoryview]:
                if not cut.is_set():
                    cut.set()
                    driver.tier._io_threads.abort(lambda part: True)
                return super().seal(keyspace, key, view, computed_ms)

        object.__setattr__(driver.tier._deps, "sealer", CutOff)
        assert driver.store([block(KEYSPACE_A)]).stored_bytes == 0
        assert cut.is_set()
        give_up_at_s = time.monotonic() + 20
        while books.reservations():
            assert time.monotonic() < give_up_at_s, "long before the window of 30 s ends"
            time.sleep(0.05)
        books.assert_consistent()
