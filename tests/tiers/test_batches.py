"""Several blocks in one exchange: what becomes of the others when something happens to one of them."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from tests.tiers.books import Books
from tests.tiers.data_keys import FIRST
from tests.tiers.faulty_proxy import FaultyProxy
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn
from tests.tiers.hostile_server import HostileServer
from tests.tiers.keyed_gate import KeyedGate
from tests.tiers.lying_server import World, bulk, right_answer
from tests.tiers.redis_cluster import until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block, spread


class HangsUp:
    """A server that hangs up when the second block is asked for, and has changed them all when it is asked again."""

    def __init__(self) -> None:
        self.world = World()
        self.changes = False
        self.asked: Counter[bytes] = Counter()
        self.server = HostileServer(self.answer)
        self.world.ports += [self.server.port, self.server.port]

    def answer(self, connection: socket.socket, arguments: list[bytes]) -> None:
        if arguments[0] == b"SET":
            self.world.values[arguments[1]] = arguments[2]
        if arguments[0] != b"GET" or not self.changes:
            connection.sendall(right_answer(arguments, self.world))
            return
        self.asked[arguments[1]] += 1
        value = bytearray(self.world.values[arguments[1]])
        if self.asked.total() == 2:
            connection.shutdown(socket.SHUT_RDWR)
            return
        if self.asked.total() > 2:
            value[-1] ^= 1
        connection.sendall(bulk(bytes(value)))


@pytest.fixture
def hangs_up() -> Iterator[HangsUp]:
    one = HangsUp()
    yield one
    one.server.close()


@pytest.mark.parametrize("encryption", ["Required", "Disabled"])
def test_a_block_that_counts_is_not_read_again(
    start: Callable[..., Driver], gate: GateStandIn, hangs_up: HangsUp, encryption: str
) -> None:
    driver = start(hangs_up.server.port, workers=1, encryption=encryption)
    driver.until("closed")
    KeyedGate(gate).allow({KEYSPACE_A: (FIRST,)})
    blocks = [block(KEYSPACE_A, spread(number)) for number in range(2)]
    driver.store(blocks, fill=7)
    hangs_up.changes = True
    hits, buffers = driver.load(blocks)
    assert hits[0] == 1
    assert bytes(buffers[0]) == bytes([7]) * BLOCK_BYTES
    assert sorted(hangs_up.asked.values()) == [1, 2], "the one that had not come was asked for again"
    assert encryption == "Disabled" or hits[1] == 0


class TestStores:
    def test_a_server_without_memory_has_stores_rest_also_if_it_took_some_of_a_batch(
        self, driver: Driver, redis_server: RedisProcess
    ) -> None:
        driver.store([block(KEYSPACE_A, 250)])
        admin = redis_server.admin()
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 6 * BLOCK_BYTES)
        driver.store([block(KEYSPACE_A, spread(number)) for number in range(16)])
        counters = driver.tier.counters()
        assert counters["stored"] > 1
        assert counters["refused_tier_full"] == 17 - counters["stored"]
        assert driver.tier.state().full

    @pytest.mark.parametrize("acknowledged", [1, 5, 9])
    def test_what_was_acknowledged_before_the_connection_broke_is_stored(
        self,
        start: Callable[..., Driver],
        gate: GateStandIn,
        redis_server: RedisProcess,
        acknowledged: int,
    ) -> None:
        books = Books(redis_server, KEYSPACE_A)
        proxy = FaultyProxy(redis_server.port)
        driver = start(proxy.port, workers=1)
        driver.until("closed")
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=100 * BLOCK_BYTES),))
        driver.store([block(KEYSPACE_A, 255)])
        seen = 0

        def cut(data: bytes) -> bytes | None:
            nonlocal seen
            seen += data.count(b"+OK\r\n")
            if seen <= acknowledged:
                return data
            proxy.fault = None
            return None

        proxy.fault = cut
        blocks = [block(KEYSPACE_A, spread(number)) for number in range(12)]
        driver.store(blocks)
        counters = driver.tier.counters()
        assert counters["stored"] + counters["stores_present"] == 13, "the second attempt finds those of the first"
        assert driver.lookup(blocks) == [1] * 12
        until(lambda: books.totals().held == 0, books.totals)
        books.assert_consistent()
        proxy.close()
