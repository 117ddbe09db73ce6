"""A real Redis tier is handed blocks by the memory: what arrives is told to the memory, and LMCache hears nothing."""

from __future__ import annotations

import queue
import time

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import Task
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, KEYSPACE_UNKNOWN, GateStandIn
from tests.tiers.redis_cluster import until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block, stored
from tests.tiers.writer_by_hand import PLACE

pytestmark = pytest.mark.redis


def handed_down(driver: Driver, blocks: list[Block], within_s: float = 10.0) -> Task:
    answers: queue.Queue[Task] = queue.Queue()
    views = [memoryview(bytes([7]) * BLOCK_BYTES) for _ in blocks]
    driver.tier.hand_down(blocks, views, within_s, answers.put)
    return answers.get(timeout=60)


def test_what_is_there_is_told_and_only_the_rest_is_written(driver: Driver) -> None:
    known, new, foreign = block(KEYSPACE_A, 1), block(KEYSPACE_A, 2), block(KEYSPACE_UNKNOWN, 3)
    driver.store([known], fill=1)
    task = handed_down(driver, [known, new, foreign])
    assert (list(task.found), task.keys, task.sizes) == ([1, 1, 0], [new.key], [BLOCK_BYTES])
    assert driver.tier.pop_stores() == {}, "LMCache did not ask for it"
    hits, buffers = driver.load([known, new])
    assert (hits, [buffer[0] for buffer in buffers]) == ([1, 1], [1, 7])


def test_a_copy_is_as_old_as_the_block(driver: Driver, gate: GateStandIn, redis_server: RedisProcess) -> None:
    gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", retention_s=3600),))
    old, older = block(KEYSPACE_A, 1), block(KEYSPACE_A, 2)
    driver.runtime.enforcement.ages.inherit(old.key, 3000.0)
    driver.runtime.enforcement.ages.inherit(older.key, 3601.0)
    assert list(handed_down(driver, [old, older]).found) == [1, 0]
    assert driver.lookup([old, older]) == [1, 0]
    admin, (name,) = redis_server.admin(), stored(redis_server)
    assert 0 < admin.pttl(name) <= 600_000, "an hour less its age"
    base, member = PLACE.base.decode(), PLACE.member.decode()
    assert 0 < admin.zscore(f"{base}:#x", member) - 1000 * admin.time()[0] <= 601_000, "by the index, too"


def test_a_denied_scope_is_told_so_beforehand(driver: Driver, gate: GateStandIn) -> None:
    gate.enforce({KEYSPACE_A: (EnforcedBudget("shared", 0),), KEYSPACE_B: (EnforcedBudget("shared", retention_s=9),)})
    assert driver.tier.life_s(block(KEYSPACE_A)) == 0.0
    assert driver.tier.life_s(block(KEYSPACE_B)) == 9.0
    assert driver.tier.takes(block(KEYSPACE_B))
    assert not driver.tier.takes(block(KEYSPACE_UNKNOWN))


@pytest.mark.short_deadlines
def test_a_tier_that_is_away_takes_nothing_and_answers_in_time(driver: Driver, redis_server: RedisProcess) -> None:
    redis_server.freeze()
    try:

        def is_away() -> bool:
            begun_s = time.monotonic()
            assert list(handed_down(driver, [block(KEYSPACE_A)], within_s=1.0).found) == [0]
            assert time.monotonic() < begun_s + 20, "it would hang for ever"
            return driver.tier.state().breaker != "closed"

        until(is_away, driver.tier.state)  # failures in a row open the breaker
        assert not driver.tier.takes(block(KEYSPACE_A))
        assert driver.tier.life_s(block(KEYSPACE_A)) > 0, "the policy lets it live there"
        assert list(handed_down(driver, [block(KEYSPACE_A)]).found) == [0]
    finally:
        redis_server.thaw()
    driver.until("closed")
    assert stored(redis_server) == []
