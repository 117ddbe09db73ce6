"""Writers that are frozen or held back before a deletion and go on after it leave nothing to read and no orphan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvstrata.contract.messages.erase_report import Outcome
from kvstrata.contract.receipt.facts import Amount
from kvstrata_sidecar.adapter.policy.refusal import Refusal
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from tests.support.redis_binary import needs_redis
from tests.tiers.eraser import VALUE, erase, look, name_of, order, reserve, set_value, write
from tests.tiers.faulty_proxy import FaultyProxy, Trigger
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import Driver, block
from tests.tiers.writers import Writer

pytestmark = needs_redis

WITHIN_S = 60.0
WINDOW_MS = 5_000
"""How long a value lives that is not committed, and how late a busy machine may commit it; pods say thirty seconds."""


@pytest.fixture
def connection(redis_server: RedisProcess, connect_to: Callable[..., Connection]) -> Connection:
    return connect_to(redis_server.port)


def names(server: RedisProcess) -> set[str]:
    """What the names of the keyspace end with."""
    return {name.decode().rsplit(":", 1)[1] for name in server.admin().scan_iter(f"*{KEYSPACE_A}*", count=1000)}


def until_empty(server: RedisProcess) -> None:
    """Wait until what nobody committed has gone by itself."""
    give_up_at_s = time.monotonic() + WITHIN_S
    while not (seen := look(server.port)).empty:
        assert time.monotonic() < give_up_at_s, seen
        time.sleep(0.05)


class TestByTheCommand:
    def test_one_that_had_reserved_writes_for_nothing(self, redis_server: RedisProcess, connection: Connection) -> None:
        connection.ask([reserve(KEYSPACE_A, 5)])
        erase(order(redis_server.port))
        assert write(connection, KEYSPACE_A, 5) == "gone"
        assert look(redis_server.port).empty

    def test_one_that_comes_only_now_is_refused(self, redis_server: RedisProcess, connection: Connection) -> None:
        erase(order(redis_server.port))
        assert connection.ask([reserve(KEYSPACE_A, 5)])[0].outcome is Refusal.TOMBSTONE
        assert look(redis_server.port).empty

    def test_one_in_the_middle_of_a_value_loses_it_and_it_is_counted(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        connection.ask([reserve(KEYSPACE_A, 5)])
        set_value(connection, b":".join(name_of(KEYSPACE_A, 5)), [VALUE], 30_000)
        assert erase(order(redis_server.port)).sums[1] == Amount(1, len(VALUE))
        assert look(redis_server.port).empty

    def test_what_one_leaves_that_dies_between_value_and_commit_is_seen_and_goes_by_itself(
        self, redis_server: RedisProcess, connection: Connection
    ) -> None:
        connection.ask([reserve(KEYSPACE_A, 5)])
        erase(order(redis_server.port))
        name, admin = b":".join(name_of(KEYSPACE_A, 5)), redis_server.admin()
        set_value(connection, name, [VALUE], 30_000)
        seen = look(redis_server.port)
        assert not seen.empty
        assert seen.nodes[0].names == (name.decode(),)
        assert 0 < admin.pttl(name) <= 30_000
        admin.pexpire(name, 1)  # as if it were that late
        until_empty(redis_server)


class TestProcesses:
    def test_a_process_that_is_frozen_before_and_thawed_after_leaves_nothing(self, redis_server: RedisProcess) -> None:
        writer = Writer(redis_server.port, KEYSPACE_A, limit=0, window_ms=WINDOW_MS, seed=3, scale=200)
        try:
            writer.first_store()
            writer.freeze()
            report = erase(order(redis_server.port))
            assert report.sums[1].keys > 0
            assert report.end.outcome is Outcome.ERASED
            writer.thaw()
            redis_server.admin().config_resetstat()
            give_up_at_s = time.monotonic() + WITHIN_S
            while redis_server.admin().info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0) < 20:
                assert time.monotonic() < give_up_at_s, "it does not store any more"
                time.sleep(0.02)
            until_empty(redis_server)
        finally:
            writer.kill()
        while names(redis_server) != {"#s"}:  # a claim of the killed writer's sweep ends by itself
            assert time.monotonic() < give_up_at_s, names(redis_server)
            time.sleep(0.05)

    def test_a_pod_that_heard_nothing_of_the_roll_finds_nothing_and_stores_nothing_afterwards(
        self, redis_server: RedisProcess, driver: Driver
    ) -> None:
        blocks = [block(KEYSPACE_A, number) for number in range(8)]
        assert driver.store(blocks).stored_bytes > 0
        assert driver.lookup(blocks) == [1] * 8
        erase(order(redis_server.port))
        assert driver.lookup(blocks) == [0] * 8
        assert driver.load(blocks)[0] == [0] * 8
        assert driver.store(blocks).stored_bytes == 0
        assert driver.lookup(blocks) == [0] * 8
        assert look(redis_server.port).empty


class TestSockets:
    @pytest.fixture
    def proxy(self, redis_server: RedisProcess) -> Iterator[FaultyProxy]:
        made = FaultyProxy(redis_server.port)
        yield made
        made.close()

    @pytest.mark.parametrize(
        ("stays", "seen"),
        [
            (lambda _: True, "its reservation"),
            (lambda data: b"\r\nSET\r\n" in data, "value and commit"),
        ],
        ids=["all that it sends", "its value"],
    )
    def test_what_a_network_held_back_arrives_after_the_look_for_nothing(
        self,
        redis_server: RedisProcess,
        proxy: FaultyProxy,
        start: Callable[..., Driver],
        gate: GateStandIn,
        stays: Trigger,
        seen: str,
    ) -> None:
        driver = start(proxy.port, window_ms=WINDOW_MS)
        driver.until("closed")
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        assert driver.store([block(KEYSPACE_A, 1)]).stored_bytes > 0
        proxy.hold_from = stays
        task = driver.tier.store([block(KEYSPACE_A, 2)], [memoryview(b"late" * 250)])
        assert proxy.holding.wait(WITHIN_S), f"{seen} is on its way"

        gate.allow(KEYSPACE_B)
        driver.wait(task)
        assert driver.tier.pop_stores()[task].stored_bytes == 0
        assert erase(order(redis_server.port)).end.outcome is Outcome.ERASED
        until_empty(redis_server)
        proxy.release()
        driver.until("closed")
        redis_server.outlast_clients()
        until_empty(redis_server)
        assert names(redis_server) == {"#s"}
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        assert driver.lookup([block(KEYSPACE_A, 1), block(KEYSPACE_A, 2)]) == [0, 0]
