"""A server that comes back with a backup of its data: what was left is out of reach, and the books mend themselves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.block_value import value_bytes
from kvstrata.contract.store.redis_keys import revoked_key
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import make_due, stop
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block, stored

pytestmark = needs_redis
LIMIT = 12 * value_bytes(BLOCK_BYTES)
LEFT = [block(KEYSPACE_A, number) for number in range(0, 128, 16)]
KEPT = [block(KEYSPACE_B, number) for number in range(0, 128, 16)]
NEWER = [block(KEYSPACE_B, number) for number in range(8, 136, 16)]


def allow(gate: GateStandIn, *keyspaces: str) -> None:
    gate.allow(*keyspaces, budgets=(EnforcedBudget("shared", limit_bytes=LIMIT, retention_s=3600),))


def back_up(server: RedisProcess, directory: Path) -> None:
    server.admin().save()
    shutil.copy(directory / "dump.rdb", directory / "backup.rdb")


def restore(server: RedisProcess, directory: Path) -> None:
    server.kill()
    shutil.copy(directory / "backup.rdb", directory / "dump.rdb")
    server.start()


def until(holds: Callable[[], bool]) -> None:
    give_up_at_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up_at_s
        time.sleep(0.05)


def of(server: RedisProcess, keyspace: str) -> list[str]:
    return [name for name in stored(server) if keyspace in name]


def test_blocks_of_a_keyspace_that_was_left_come_back_and_nobody_reaches_them(
    driver: Driver, gate: GateStandIn, redis_server: RedisProcess, tmp_path: Path
) -> None:
    allow(gate, KEYSPACE_A, KEYSPACE_B)
    driver.store(LEFT, fill=1)
    driver.store(KEPT, fill=2)
    back_up(redis_server, tmp_path)
    allow(gate, KEYSPACE_B)
    redis_server.admin().flushall()
    restore(redis_server, tmp_path)
    assert len(of(redis_server, KEYSPACE_A)) == len(LEFT)
    until(lambda: sum(driver.lookup(KEPT)) == len(KEPT))
    hits, buffers = driver.load(KEPT)
    assert hits == [1] * len(KEPT)
    assert {bytes(buffer) for buffer in buffers} == {bytes([2]) * BLOCK_BYTES}
    assert sum(driver.lookup(LEFT)) == 0
    assert sum(driver.load(LEFT)[0]) == 0
    assert all(redis_server.admin().pttl(name) > 0 for name in of(redis_server, KEYSPACE_A)), "they end by themselves"
    allow(gate, KEYSPACE_A, KEYSPACE_B)
    until(lambda: sum(driver.lookup(LEFT)) == len(LEFT))  # nothing but the policy kept them away


def test_a_ledger_that_is_older_than_what_a_scope_holds_is_made_anew_and_the_limit_stands(
    driver: Driver, gate: GateStandIn, redis_server: RedisProcess, tmp_path: Path
) -> None:
    books = Books(redis_server, KEYSPACE_B)
    allow(gate, KEYSPACE_B)
    driver.store(KEPT)
    back_up(redis_server, tmp_path)
    driver.store(NEWER)
    before = books.version()
    restore(redis_server, tmp_path)

    def store_again() -> bool:
        driver.store(NEWER, fill=3)
        assert books.totals().holds(LIMIT)
        return books.live() and sum(driver.lookup(NEWER)) > 0

    until(store_again)
    assert before
    stop(driver.tier)
    books.assert_consistent()


def test_a_revocation_that_was_seen_stands_although_the_set_came_back_without_it(
    driver: Driver, gate: GateStandIn, redis_server: RedisProcess, tmp_path: Path
) -> None:
    allow(gate, KEYSPACE_A, KEYSPACE_B)
    driver.store(LEFT)
    back_up(redis_server, tmp_path)
    redis_server.admin().zadd(revoked_key(DOMAIN), {KEYSPACE_A: 1})

    def refused() -> bool:
        make_due(driver.tier, 0.0)
        return sum(driver.lookup(LEFT)) == 0

    until(refused)
    restore(redis_server, tmp_path)
    allow(gate, KEYSPACE_A, KEYSPACE_B)
    until(lambda: driver.store(KEPT).stored_bytes > 0)
    assert len(of(redis_server, KEYSPACE_A)) == len(LEFT)
    assert sum(driver.lookup(LEFT)) == 0
