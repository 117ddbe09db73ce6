"""A whole tier whose server is down, dies, freezes, fills up, locks it out or lies: misses in bounded time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.contract.store.block_value import Header, pack_header
from kvstrata_sidecar.adapter.params import Endpoint
from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.tiers.gate_stand_in import (
    KEYSPACE_A,
    GateStandIn,
)
from tests.tiers.hostile_server import Answer, HostileServer, committed_for_ever, says
from tests.tiers.redis_cluster import until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES, Driver, block, stored

pytestmark = pytest.mark.redis


HANGS_MS = 30_000
"""How long I/O may take where a test shows that no call waits for it; `SOON_S` is much shorter."""

SOON_S = 15.0


class TestFailures:
    def test_a_tier_that_is_down_at_the_start_is_used_once_it_is_up(
        self, start: Callable[..., Driver], gate: GateStandIn, tmp_path: Path
    ) -> None:
        server = RedisProcess(tmp_path)
        driver = start(server.port)
        gate.allow(KEYSPACE_A)
        assert driver.lookup([block(KEYSPACE_A)]) == [0]
        assert driver.refused("breaker_open") == 1, "no call waits for a server that was never seen"
        until(lambda: "refused" in driver.tier.state().detail.lower(), driver.tier.state)
        server.start()
        driver.until("closed")
        driver.store([block(KEYSPACE_A)])
        assert driver.lookup([block(KEYSPACE_A)]) == [1]
        server.kill()

    def test_a_killed_tier_is_a_miss_and_comes_back_without_a_restart(
        self, driver: Driver, redis_server: RedisProcess
    ) -> None:
        driver.store([block(KEYSPACE_A)])
        redis_server.kill()
        for _ in range(4):
            started_s = time.monotonic()
            assert driver.lookup([block(KEYSPACE_A)]) == [0]
            assert driver.load([block(KEYSPACE_A)])[0] == [0]
            assert driver.store([block(KEYSPACE_A)]).stored_bytes == 0
            assert time.monotonic() - started_s < 9, "each might take 10 s"
        driver.until("open")
        redis_server.start()
        driver.until("closed")
        driver.store([block(KEYSPACE_A)])
        assert driver.lookup([block(KEYSPACE_A)]) == [1]

    def test_a_defect_of_ours_is_a_miss_and_the_log_says_once_what_it_is(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(*_: object) -> None:
            raise TypeError("no such argument")

        driver.store([block(KEYSPACE_A)])
        monkeypatch.setattr(ClusterTransport, "get_each", broken)
        for _ in range(3):
            assert driver.load([block(KEYSPACE_A)])[0] == [0]
        assert caplog.text.count("TypeError: no such argument") == 1

    def test_a_restart_between_two_requests_costs_no_failure(self, driver: Driver, redis_server: RedisProcess) -> None:
        """Of what a restart does, but without a moment in which nobody listens: upkeep would notice that by itself."""
        driver.store([block(KEYSPACE_A)])
        with redis_server.admin() as admin:
            admin.flushall()
            admin.script_flush()
            admin.client_kill_filter(_type="normal", skipme=True)
        assert driver.store([block(KEYSPACE_A)]) == StoreOutcome(True, BLOCK_BYTES)
        assert driver.lookup([block(KEYSPACE_A)]) == [1]
        assert driver.tier.state().errors == 0

    def test_a_frozen_tier_is_a_miss_in_time_then_not_waited_for_then_used_again(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port, io_timeout_ms=HANGS_MS, lookup_deadline_ms=300)
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        driver.store([block(KEYSPACE_A)], fill=3)
        redis_server.freeze()
        for _ in range(4):
            started_s = time.monotonic()
            assert driver.lookup([block(KEYSPACE_A)]) == [0]
            assert time.monotonic() - started_s < SOON_S
        until(lambda: driver.tier.state().breaker != "closed", driver.tier.state)
        refused = driver.refused("breaker_open")
        assert driver.load([block(KEYSPACE_A)])[0] == [0]
        assert driver.refused("breaker_open") == refused + 1
        redis_server.thaw()
        driver.until("closed")
        assert driver.load([block(KEYSPACE_A)]) == ([1], [bytearray([3] * BLOCK_BYTES)])

    def test_no_answer_is_given_while_io_can_touch_the_buffer(self, driver: Driver, redis_server: RedisProcess) -> None:
        driver.store([block(KEYSPACE_A)], fill=3)
        redis_server.freeze()
        _, (buffer,) = driver.load([block(KEYSPACE_A)])
        buffer[:] = bytes([9]) * BLOCK_BYTES
        redis_server.thaw()
        driver.until("closed")
        assert buffer == bytearray([9] * BLOCK_BYTES)

    def test_a_store_that_was_cut_off_never_carries_what_the_buffer_holds_next(
        self, driver: Driver, redis_server: RedisProcess
    ) -> None:
        memory = bytearray([1]) * (64 << 20)
        redis_server.freeze()
        task_id = driver.tier.store([block(KEYSPACE_A)], [memoryview(memory)])
        driver.wait(task_id)
        assert driver.tier.pop_stores()[task_id].stored_bytes == 0
        memory[:] = bytes([2]) * len(memory)
        redis_server.thaw()
        driver.until("closed")
        assert stored(redis_server) == []

    def test_an_endpoint_that_becomes_a_replica_is_left_for_the_next_by_all_connections(
        self, start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn, tmp_path: Path
    ) -> None:
        directory = tmp_path / "other"
        directory.mkdir()
        other = RedisProcess(directory)
        other.start()
        try:
            endpoints = (Endpoint("127.0.0.1", redis_server.port), Endpoint("127.0.0.1", other.port))
            driver = start(0, endpoints=endpoints)
            driver.until("closed")
            gate.allow(KEYSPACE_A)
            assert driver.store([block(KEYSPACE_A, 1)]).stored_bytes == BLOCK_BYTES
            assert driver.lookup([block(KEYSPACE_A, 1)]) == [1]
            redis_server.admin().replicaof("127.0.0.1", 1)  # it answers with what it had
            until(lambda: driver.store([block(KEYSPACE_A, 2)]).stored_bytes == BLOCK_BYTES)
            assert len(stored(other)) == 1
            until(lambda: driver.lookup([block(KEYSPACE_A, 1), block(KEYSPACE_A, 2)]) == [0, 1])
        finally:
            other.kill()

    def test_a_tier_whose_only_server_is_a_replica_is_not_used_and_says_so(
        self, start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        redis_server.admin().replicaof("127.0.0.1", 1)
        driver = start(redis_server.port)
        until(lambda: "it is a replica" in driver.tier.state().detail)
        gate.allow(KEYSPACE_A)
        assert driver.store([block(KEYSPACE_A)]).stored_bytes == 0
        redis_server.admin().replicaof("NO", "ONE")
        driver.until("closed")
        until(lambda: driver.store([block(KEYSPACE_A)]).stored_bytes == BLOCK_BYTES)

    def test_a_full_tier_refuses_stores_and_serves_loads(self, driver: Driver, redis_server: RedisProcess) -> None:
        driver.store([block(KEYSPACE_A, 1)], fill=5)
        redis_server.admin().config_set("maxmemory", 1)
        assert driver.store([block(KEYSPACE_A, 2)]) == StoreOutcome(True, 0)
        assert driver.store([block(KEYSPACE_A, 3)]) == StoreOutcome(True, 0)
        assert driver.refused("tier_full") == 2
        assert "memory" in driver.tier.state().detail
        assert driver.tier.state().full
        assert driver.load([block(KEYSPACE_A, 1)]) == ([1], [bytearray([5] * BLOCK_BYTES)])
        redis_server.admin().config_set("maxmemory", 0)
        time.sleep(1.05)
        assert driver.store([block(KEYSPACE_A, 2)]) == StoreOutcome(True, BLOCK_BYTES)
        assert not driver.tier.state().full

    def test_a_wrong_password_is_named_and_a_right_one_needs_no_restart(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess, tmp_path: Path
    ) -> None:
        redis_server.admin().config_set("requirepass", "right")
        file = tmp_path / "password"
        driver = start(redis_server.port, password_file=str(file))
        gate.allow(KEYSPACE_A)
        until(lambda: "cannot be read" in driver.tier.state().detail, driver.tier.state)
        file.write_text("wrong")
        until(lambda: "WRONGPASS" in driver.tier.state().detail, driver.tier.state)
        file.write_text("right")
        driver.until("closed")
        driver.store([block(KEYSPACE_A)])
        assert driver.lookup([block(KEYSPACE_A)]) == [1]

    @pytest.mark.parametrize(
        "answer",
        [says(b""), says(b"", then_close=True), says(b"garbage\r\n"), says(b"$65552\r\nshort"), says(b"-ERR no\r\n")],
        ids=["silent", "closing", "garbage", "half", "error"],
    )
    @pytest.mark.short_deadlines
    def test_a_hostile_tier_costs_misses_and_bounded_time(
        self, start: Callable[..., Driver], gate: GateStandIn, answer: Answer
    ) -> None:
        server = HostileServer(answer)
        driver = start(server.port)
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        started_s = time.monotonic()
        for number in range(1, 4):
            assert driver.lookup([block(KEYSPACE_A, number)]) == [0]
            assert driver.load([block(KEYSPACE_A, number)])[0] == [0]
            assert driver.store([block(KEYSPACE_A, number)]).stored_bytes == 0
        assert time.monotonic() - started_s < SOON_S
        server.close()

    @pytest.mark.short_deadlines
    def test_a_trickling_tier_is_cut_off_at_the_deadline(self, start: Callable[..., Driver], gate: GateStandIn) -> None:
        def trickle(connection: socket.socket, arguments: list[bytes]) -> None:
            if arguments[0] != b"GET":
                connection.sendall(committed_for_ever(arguments))
                return
            header = pack_header(arguments[1], Header(BLOCK_BYTES))
            connection.sendall(b"$%d\r\n%b" % (VALUE_BYTES, header))
            while True:
                connection.sendall(b"x")
                time.sleep(0.02)

        server = HostileServer(trickle)
        driver = start(server.port, io_timeout_ms=HANGS_MS)
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        started_s = time.monotonic()
        assert driver.load([block(KEYSPACE_A)])[0] == [0]
        assert 0.5 < time.monotonic() - started_s < SOON_S
        server.close()

    def test_closing_answers_everything_that_is_under_way(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port, io_timeout_ms=HANGS_MS, load_deadline_ms=HANGS_MS)
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        redis_server.freeze()
        results: list[list[int]] = []
        blocks = [block(KEYSPACE_A, number) for number in range(50)]
        loading = threading.Thread(target=lambda: results.append(driver.load(blocks)[0]))
        loading.start()
        until(lambda: driver.runtime.enforcement.under_way([KEYSPACE_A]) > 0)
        started_s = time.monotonic()
        driver.tier.close()
        assert time.monotonic() - started_s < SOON_S
        loading.join(30)
        assert results == [[0] * 50]
        redis_server.thaw()
