"""A tier on a real Redis on which one that was deleted has left blocks, encrypted or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.store.block_value import HEADER_BYTES, unpack_header
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.keyed_gate import KeyedGate
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import stop, sweep
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block, stored

pytestmark = needs_redis

KEYS = {KEYSPACE_A: (DataKey(1, b"a" * 32),), KEYSPACE_B: (DataKey(1, b"b" * 32),)}
FILL = 0x41


@pytest.fixture
def plain(start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn) -> Driver:
    driver = start(redis_server.port, encryption="Disabled")
    driver.until("closed")
    stop(driver.tier)
    KeyedGate(gate).allow(KEYS)
    return driver


@pytest.fixture
def begin(start: Callable[..., Driver], redis_server: RedisProcess) -> Callable[[], Driver]:
    """Starts a pod that encrypts."""

    def begin() -> Driver:
        driver = start(redis_server.port, encryption="Required")
        driver.until("closed")
        stop(driver.tier)
        return driver

    return begin


def plaintexts(server: RedisProcess) -> list[str]:
    found = []
    for name in stored(server):
        value = server.admin().get(name)
        header = unpack_header(name.encode(), value[:HEADER_BYTES]) if isinstance(value, bytes) else None
        if header is not None and not header.encrypted:
            found.append(name)
    return found


def test_plaintext_is_deleted_when_the_index_is_compared_with_its_values(
    plain: Driver, begin: Callable[[], Driver], redis_server: RedisProcess
) -> None:
    plain.store([block(KEYSPACE_A, number) for number in range(1, 200)], fill=FILL)
    plain.store([block(KEYSPACE_B)], fill=FILL)
    plain.tier.close()
    sealed = begin()
    sealed.store([block(KEYSPACE_A, 250)], fill=FILL)
    assert len(plaintexts(redis_server)) == 200
    for keyspace in KEYS:
        sweep(sealed.tier, keyspace, audit=True)
    assert sealed.tier.counters()["plaintext_removed"] == 200
    assert len(stored(redis_server)) == 1
    assert sealed.load([block(KEYSPACE_A, 250)]) == ([1], [bytearray([FILL]) * BLOCK_BYTES])
    assert "drift_entries" not in sealed.tier.counters()
    Books(redis_server, KEYSPACE_A).assert_consistent()


def test_plaintext_is_not_read_and_its_block_is_stored_anew(
    plain: Driver, begin: Callable[[], Driver], redis_server: RedisProcess
) -> None:
    plain.store([block(KEYSPACE_A)], fill=FILL)
    sealed = begin()
    assert sealed.load([block(KEYSPACE_A)])[0] == [0]
    assert sealed.store([block(KEYSPACE_A)], fill=FILL).stored_bytes == BLOCK_BYTES
    assert sealed.load([block(KEYSPACE_A)]) == ([1], [bytearray([FILL]) * BLOCK_BYTES])
    assert plaintexts(redis_server) == []
    Books(redis_server, KEYSPACE_A).assert_consistent()


def test_a_tier_without_encryption_stores_an_encrypted_block_anew_and_leaves_the_others(
    begin: Callable[[], Driver], plain: Driver, redis_server: RedisProcess
) -> None:
    sealed = begin()
    sealed.store([block(KEYSPACE_A, 1)], fill=FILL)
    sealed.store([block(KEYSPACE_A, 2)], fill=FILL)
    assert plain.store([block(KEYSPACE_A, 1)], fill=FILL).stored_bytes == BLOCK_BYTES
    assert plain.load([block(KEYSPACE_A, 1)]) == ([1], [bytearray([FILL]) * BLOCK_BYTES])
    sweep(plain.tier, KEYSPACE_A, audit=True)
    assert sealed.load([block(KEYSPACE_A, 2)])[0] == [1]
    Books(redis_server, KEYSPACE_A).assert_consistent()
