"""A whole tier against a real Redis and hostile servers: what LMCache would see, without LMCache."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.bundle import TierBudget
from kvstrata.contract.keys import BlockKey, parse_block_key
from kvstrata.contract.link import AdapterAck, apply_request, decode_answer
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.resp import SEAL_BYTES, seal
from kvstrata_sidecar.adapter.runtime import Runtime, acquire, release
from kvstrata_sidecar.adapter.tasks import StoreOutcome, Task
from kvstrata_sidecar.adapter.tier import Block, Tier
from tests.tiers.gate_stand_in import (
    DOMAIN,
    IDENTITY,
    KEYSPACE_A,
    KEYSPACE_B,
    KEYSPACE_UNKNOWN,
    STALE_AFTER_S,
    GateStandIn,
)
from tests.tiers.hostile_server import Answer, HostileServer, says
from tests.tiers.redis_process import RedisProcess

pytestmark = pytest.mark.redis
BLOCK_BYTES = 64 * 1024


class Driver:
    """Waits for a tier's answers as LMCache does."""

    def __init__(self, runtime: Runtime, params: AdapterParams, tier: TierParams) -> None:
        self._answered: queue.Queue[Task] = queue.Queue()
        self.runtime = runtime
        self.tier = Tier(params, tier, runtime.enforcement, self._answered.put)
        runtime.add(self.tier)

    def store(self, blocks: list[Block], fill: int = 1) -> StoreOutcome:
        views = [memoryview(bytes([fill]) * BLOCK_BYTES) for _ in blocks]
        task_id = self.tier.store(blocks, views)
        self.wait(task_id)
        return self.tier.pop_stores()[task_id]

    def lookup(self, blocks: list[Block]) -> list[int]:
        return self._found(self.tier.lookup(blocks))

    def load(self, blocks: list[Block]) -> tuple[list[int], list[bytearray]]:
        buffers = [bytearray(BLOCK_BYTES) for _ in blocks]
        hits = self._found(self.tier.load(blocks, [memoryview(buffer) for buffer in buffers]))
        return hits, buffers

    def until(self, breaker: str, timeout_s: float = 8.0) -> str:
        """Wait until the breaker is in a state and return the tier's detail."""
        give_up_at_s = time.monotonic() + timeout_s
        while (state := self.tier.state()).breaker != breaker:
            assert time.monotonic() < give_up_at_s, state
            time.sleep(0.01)
        return state.detail

    def refused(self, reason: str) -> int:
        return self.tier.counters().get(f"refused_{reason}", 0)

    def _found(self, task_id: int) -> list[int]:
        self.wait(task_id)
        found = self.tier.pop_found(task_id)
        assert found is not None
        return list(found)

    def wait(self, task_id: int) -> None:
        assert self._answered.get(timeout=10).task_id == task_id


def block(keyspace: str, number: int = 1) -> Block:
    return Block(("key", keyspace, number), keyspace, 0x01000100, 0, bytes([number]) * 32)


@pytest.fixture
def start(gate: GateStandIn) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start(port: int, **options: Any) -> Driver:
        endpoints = (Endpoint("127.0.0.1", port),)
        deadlines = {
            "io_timeout_ms": 400,
            "lookup_deadline_ms": 200,
            "load_deadline_ms": 600,
            "store_deadline_ms": 1500,
        }
        # One worker, so that a test knows which connection is warm.
        tier = TierParams("shared", endpoints, **{"workers": 1} | deadlines | options)
        params = AdapterParams(DOMAIN, IDENTITY, tier, gate.policy_dir, gate.link_dir)
        drivers.append(Driver(acquire(params), params, tier))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.tier.close()
        release(driver.runtime)


@pytest.fixture
def driver(start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn) -> Driver:
    driver = start(redis_server.port)
    driver.until("closed")
    gate.allow(KEYSPACE_A, KEYSPACE_B)
    return driver


class TestIsolation:
    def test_a_block_comes_back_to_its_own_keyspace_and_to_no_other(self, driver: Driver) -> None:
        assert driver.store([block(KEYSPACE_A)], fill=7) == StoreOutcome(True, BLOCK_BYTES)
        assert driver.lookup([block(KEYSPACE_A), block(KEYSPACE_B)]) == [1, 0]
        hits, buffers = driver.load([block(KEYSPACE_A), block(KEYSPACE_B)])
        assert hits == [1, 0]
        assert buffers == [bytearray([7] * BLOCK_BYTES), bytearray(BLOCK_BYTES)]

    def test_keys_are_those_of_the_contract(self, driver: Driver, redis_server: RedisProcess) -> None:
        driver.store([block(KEYSPACE_A)])
        (name,) = redis_server.admin().scan_iter()
        assert parse_block_key(name.decode()) == BlockKey(DOMAIN, KEYSPACE_A, IDENTITY, 0x01000100, 0, bytes([1]) * 32)

    @pytest.mark.parametrize(
        ("keyspace", "reason"),
        [
            (KEYSPACE_UNKNOWN, "unknown_keyspace"),
            ("", "malformed_keyspace"),
            ("a" * 31 + "}", "malformed_keyspace"),
            (f"{KEYSPACE_A} GET", "malformed_keyspace"),
        ],
    )
    def test_an_unknown_keyspace_writes_nothing_and_finds_nothing(
        self, driver: Driver, redis_server: RedisProcess, keyspace: str, reason: str
    ) -> None:
        assert driver.store([block(keyspace)]) == StoreOutcome(True, 0)
        assert driver.lookup([block(keyspace)]) == [0]
        assert driver.load([block(keyspace)])[0] == [0]
        assert redis_server.admin().dbsize() == 0
        assert driver.refused(reason) == 3

    def test_a_batch_of_many_tenants_stores_what_is_allowed(self, driver: Driver, redis_server: RedisProcess) -> None:
        outcome = driver.store([block(KEYSPACE_A), block(KEYSPACE_UNKNOWN), block(KEYSPACE_B)])
        assert outcome == StoreOutcome(True, 2 * BLOCK_BYTES)
        assert redis_server.admin().dbsize() == 2

    def test_before_the_first_policy_nothing_is_served(
        self, start: Callable[..., Driver], redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port)
        driver.until("closed")
        assert driver.store([block(KEYSPACE_A)]) == StoreOutcome(True, 0)
        assert driver.lookup([block(KEYSPACE_A)]) == [0]
        assert driver.runtime.state().revision == 0


class TestRetention:
    def test_a_block_lives_as_long_as_the_policy_says(
        self, driver: Driver, redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        driver.store([block(KEYSPACE_A, 1)])
        gate.allow(KEYSPACE_A, budgets=(TierBudget("shared", retention_s=60), TierBudget("other", retention_s=1)))
        driver.store([block(KEYSPACE_A, 2)])
        lives_s = sorted(redis_server.admin().ttl(name) for name in redis_server.admin().scan_iter())
        assert 55 <= lives_s[0] <= 60
        assert 86_000 < lives_s[1] <= 86_400

    def test_a_retention_of_nothing_stores_nothing(
        self, driver: Driver, redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(TierBudget("shared", retention_s=0),))
        assert driver.store([block(KEYSPACE_A)]) == StoreOutcome(True, 0)
        assert redis_server.admin().dbsize() == 0


class TestRemoval:
    def test_a_removed_keyspace_misses_from_the_acknowledgement_on(self, driver: Driver, gate: GateStandIn) -> None:
        driver.store([block(KEYSPACE_A), block(KEYSPACE_B)])
        ack = gate.allow(KEYSPACE_B)
        assert ack.revision == 2
        assert driver.lookup([block(KEYSPACE_A), block(KEYSPACE_B)]) == [0, 1]
        assert driver.load([block(KEYSPACE_A)])[0] == [0]

    def test_the_acknowledgement_waits_for_the_io_on_removed_keyspaces(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver.store([block(KEYSPACE_A)])
        redis_server.freeze()
        loading = threading.Thread(target=driver.load, args=([block(KEYSPACE_A)],))
        loading.start()
        time.sleep(0.1)
        started_s = time.monotonic()
        gate.allow(KEYSPACE_B)
        waited_s = time.monotonic() - started_s
        loading.join()
        redis_server.thaw()
        assert 0.1 < waited_s < 2, "not before the load was given up, and not for ever"
        assert not driver.runtime.enforcement._condemned()

    def test_io_on_a_removed_keyspace_is_cut_short_after_half_a_second(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port, io_timeout_ms=20_000, load_deadline_ms=20_000)
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        driver.store([block(KEYSPACE_A)])
        redis_server.freeze()
        loading = threading.Thread(target=driver.load, args=([block(KEYSPACE_A)],))
        loading.start()
        time.sleep(0.1)
        started_s = time.monotonic()
        gate.allow(KEYSPACE_B)
        assert 0.4 < time.monotonic() - started_s < 2
        loading.join(2)
        assert not loading.is_alive()
        redis_server.thaw()

    def test_a_store_that_waits_in_the_queue_is_refused_when_its_turn_comes_after_the_removal(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port, io_timeout_ms=20_000, store_deadline_ms=20_000)
        driver.until("closed")
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        driver.store([block(KEYSPACE_A, 1)])
        redis_server.freeze()
        view = memoryview(bytes(BLOCK_BYTES))
        first, second = (driver.tier.store([block(keyspace, 2)], [view]) for keyspace in (KEYSPACE_A, KEYSPACE_B))
        gate.allow(KEYSPACE_A)
        redis_server.thaw()
        driver.wait(first)
        driver.wait(second)
        assert driver.tier.pop_stores()[first] == StoreOutcome(True, BLOCK_BYTES)
        assert driver.refused("unknown_keyspace") == 1
        assert redis_server.admin().dbsize() == 2

    def test_an_older_policy_file_is_refused_and_the_newer_stays(self, driver: Driver, gate: GateStandIn) -> None:
        gate.allow(KEYSPACE_B)
        gate.write_policy(gate.view([KEYSPACE_A], revision=1))
        assert b"older" in gate.ask(apply_request(1, 1))
        assert driver.runtime.state().revision == 2

    def test_a_policy_file_older_than_asked_for_is_not_acknowledged(self, driver: Driver, gate: GateStandIn) -> None:
        assert b"error" in gate.ask(apply_request(9, 1))

    def test_garbage_in_the_policy_file_or_on_the_line_changes_nothing(self, driver: Driver, gate: GateStandIn) -> None:
        (gate.policy_dir / "policy.json").write_bytes(b"{")
        assert b"error" in gate.ask(apply_request(2, 1))
        assert b"error" in gate.ask(b"[]\n")
        assert b"error" in gate.ask(b'{"op":"erase"}\n')
        assert driver.runtime.state().revision == 1

    def test_a_policy_file_newer_than_asked_for_is_enforced_and_what_was_asked_for_is_acknowledged(
        self, driver: Driver, gate: GateStandIn
    ) -> None:
        gate.write_policy(gate.view([KEYSPACE_A], revision=5))
        ack = decode_answer(gate.ask(apply_request(4, 1)))
        assert ack == AdapterAck(4, 1, driver.runtime.state().boot)
        assert gate.state().revision == 5


class TestFencing:
    def test_a_stale_pod_neither_stores_nor_finds_until_it_is_fresh_again(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver.store([block(KEYSPACE_A, 1)])
        gate.write_freshness(age_s=STALE_AFTER_S + 1)
        assert driver.lookup([block(KEYSPACE_A, 1)]) == [0]
        assert driver.load([block(KEYSPACE_A, 1)])[0] == [0]
        assert driver.store([block(KEYSPACE_A, 2)]) == StoreOutcome(True, 0)
        assert redis_server.admin().dbsize() == 1
        assert not gate.state().fresh
        gate.write_freshness()
        assert driver.lookup([block(KEYSPACE_A, 1)]) == [1]

    def test_serve_stale_serves_on(self, driver: Driver, gate: GateStandIn) -> None:
        gate.allow(KEYSPACE_A, on_stale="ServeStale")
        gate.write_freshness(age_s=10 * STALE_AFTER_S)
        driver.store([block(KEYSPACE_A)])
        assert driver.lookup([block(KEYSPACE_A)]) == [1]
        assert not gate.state().fresh


class TestFailures:
    def test_a_tier_that_is_down_at_the_start_is_used_once_it_is_up(
        self, start: Callable[..., Driver], gate: GateStandIn, tmp_path: Path
    ) -> None:
        server = RedisProcess(tmp_path)
        driver = start(server.port)
        gate.allow(KEYSPACE_A)
        started_s = time.monotonic()
        assert driver.lookup([block(KEYSPACE_A)]) == [0]
        assert time.monotonic() - started_s < 0.1, "nobody waits for a server that was never seen"
        assert "refused" in driver.until("open").lower()
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
            assert time.monotonic() - started_s < 1
        driver.until("open")
        redis_server.start()
        driver.until("closed")
        driver.store([block(KEYSPACE_A)])
        assert driver.lookup([block(KEYSPACE_A)]) == [1]

    def test_a_restart_between_two_requests_costs_no_failure(self, driver: Driver, redis_server: RedisProcess) -> None:
        driver.store([block(KEYSPACE_A)])
        redis_server.kill()
        redis_server.start()
        assert driver.store([block(KEYSPACE_A)]) == StoreOutcome(True, BLOCK_BYTES)
        assert driver.lookup([block(KEYSPACE_A)]) == [1]
        assert driver.tier.state().errors == 0

    def test_a_frozen_tier_is_a_miss_in_time_then_not_waited_for_then_used_again(
        self, driver: Driver, redis_server: RedisProcess
    ) -> None:
        driver.store([block(KEYSPACE_A)], fill=3)
        redis_server.freeze()
        for _ in range(4):
            started_s = time.monotonic()
            assert driver.lookup([block(KEYSPACE_A)]) == [0]
            assert time.monotonic() - started_s < 0.9
        driver.until("open")
        started_s = time.monotonic()
        assert driver.load([block(KEYSPACE_A)])[0] == [0]
        assert time.monotonic() - started_s < 0.1
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
        assert redis_server.admin().dbsize() == 0

    def test_a_full_tier_refuses_stores_and_serves_loads(self, driver: Driver, redis_server: RedisProcess) -> None:
        driver.store([block(KEYSPACE_A, 1)], fill=5)
        redis_server.admin().config_set("maxmemory", 1)
        assert driver.store([block(KEYSPACE_A, 2)]) == StoreOutcome(True, 0)
        assert driver.store([block(KEYSPACE_A, 3)]) == StoreOutcome(True, 0)
        assert driver.refused("tier_full") == 2
        assert "memory" in driver.tier.state().detail
        assert driver.load([block(KEYSPACE_A, 1)]) == ([1], [bytearray([5] * BLOCK_BYTES)])
        redis_server.admin().config_set("maxmemory", 0)
        time.sleep(1.05)
        assert driver.store([block(KEYSPACE_A, 2)]) == StoreOutcome(True, BLOCK_BYTES)

    def test_a_wrong_password_is_named_and_a_right_one_needs_no_restart(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess, tmp_path: Path
    ) -> None:
        redis_server.admin().config_set("requirepass", "right")
        file = tmp_path / "password"
        driver = start(redis_server.port, password_file=str(file))
        gate.allow(KEYSPACE_A)
        time.sleep(0.05)
        assert "cannot be read" in driver.until("open")
        file.write_text("wrong")
        give_up_at_s = time.monotonic() + 5
        while "WRONGPASS" not in driver.tier.state().detail:
            assert time.monotonic() < give_up_at_s
            time.sleep(0.02)
        file.write_text("right")
        driver.until("closed")
        driver.store([block(KEYSPACE_A)])
        assert driver.lookup([block(KEYSPACE_A)]) == [1]

    @pytest.mark.parametrize(
        "answer",
        [says(b""), says(b"", then_close=True), says(b"garbage\r\n"), says(b"$65552\r\nshort"), says(b"-ERR no\r\n")],
        ids=["silent", "closing", "garbage", "half", "error"],
    )
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
        assert time.monotonic() - started_s < 5
        server.close()

    def test_a_trickling_tier_is_cut_off_at_the_deadline(self, start: Callable[..., Driver], gate: GateStandIn) -> None:
        def trickle(connection: socket.socket, arguments: list[bytes]) -> None:
            connection.sendall(b"$%d\r\n%b" % (SEAL_BYTES + BLOCK_BYTES, seal(arguments[1])))
            while True:
                connection.sendall(b"x")
                time.sleep(0.02)

        server = HostileServer(trickle)
        driver = start(server.port)
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        started_s = time.monotonic()
        assert driver.load([block(KEYSPACE_A)])[0] == [0]
        assert 0.5 < time.monotonic() - started_s < 1.5
        server.close()

    def test_closing_answers_everything_that_is_under_way(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port, io_timeout_ms=20_000, load_deadline_ms=20_000)
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        redis_server.freeze()
        results: list[list[int]] = []
        blocks = [block(KEYSPACE_A, number) for number in range(50)]
        loading = threading.Thread(target=lambda: results.append(driver.load(blocks)[0]))
        loading.start()
        time.sleep(0.1)
        started_s = time.monotonic()
        driver.tier.close()
        assert time.monotonic() - started_s < 5
        loading.join(2)
        assert results == [[0] * 50]
        redis_server.thaw()


class TestDeletion:
    def test_blocks_are_deleted_and_unknown_keyspaces_left_alone(
        self, driver: Driver, redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        driver.store([block(KEYSPACE_A, 1), block(KEYSPACE_A, 2), block(KEYSPACE_B, 1)])
        gate.allow(KEYSPACE_A)
        deleted = driver.tier.delete([block(KEYSPACE_A, 1), block(KEYSPACE_A, 9), block(KEYSPACE_B, 1)])
        assert deleted == [("key", KEYSPACE_A, 1)]
        assert redis_server.admin().dbsize() == 2


class TestRuntime:
    def test_tiers_of_one_process_share_one_link_until_the_last_is_gone(
        self, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        params = AdapterParams(DOMAIN, IDENTITY, None, gate.policy_dir, gate.link_dir)
        first, second = acquire(params), acquire(params)
        assert first is second
        release(first)
        assert gate.state().boot == second.state().boot
        release(second)
        with pytest.raises(OSError, match=r"No such file"):
            gate.state()

    def test_a_second_adapter_with_other_parameters_is_refused(self, gate: GateStandIn) -> None:
        params = AdapterParams(DOMAIN, IDENTITY, None, gate.policy_dir, gate.link_dir)
        runtime = acquire(params)
        with pytest.raises(ValueError, match="same domain"):
            acquire(AdapterParams("e" * 16, IDENTITY, None, gate.policy_dir, gate.link_dir))
        release(runtime)

    def test_each_start_has_a_boot_of_its_own(self, gate: GateStandIn) -> None:
        params = AdapterParams(DOMAIN, IDENTITY, None, gate.policy_dir, gate.link_dir)
        boots = set()
        for _ in range(2):
            runtime = acquire(params)
            boots.add(gate.state().boot)
            release(runtime)
        assert len(boots) == 2

    def test_the_state_names_tiers_and_counts(self, driver: Driver, gate: GateStandIn) -> None:
        driver.store([block(KEYSPACE_A), block(KEYSPACE_UNKNOWN)])
        driver.load([block(KEYSPACE_A)])
        state = gate.state()
        assert (state.revision, state.term, state.keyspaces, state.fresh) == (1, 1, 2, True)
        (tier,) = state.tiers
        assert (tier.name, tier.medium, tier.breaker, tier.stored, tier.loaded, tier.refused, tier.errors) == (
            "shared",
            "Redis",
            "closed",
            1,
            1,
            1,
            0,
        )
        assert state.counters["shared.refused_unknown_keyspace"] == 1
        assert state.counters["shared.stored_bytes"] == BLOCK_BYTES
