"""Files are handed blocks by the memory: what arrives is told to the memory, and LMCache hears nothing."""

from __future__ import annotations

import queue

from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import Task
from tests.files.file_driver import BLOCK_BYTES, FileDriver, aligned, block
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, KEYSPACE_UNKNOWN, GateStandIn


def handed_down(driver: FileDriver, wanted: list[Block]) -> Task:
    answers: queue.Queue[Task] = queue.Queue()
    driver.tier.hand_down(wanted, [aligned(BLOCK_BYTES, 7) for _ in wanted], 60.0, answers.put)
    return answers.get(timeout=60)


def test_what_is_there_is_told_and_only_the_rest_is_written(driver: FileDriver) -> None:
    known, new, foreign = block(number=1), block(number=2), block(KEYSPACE_UNKNOWN, 3)
    driver.store([known], fill=1)
    task = handed_down(driver, [known, new, foreign])
    assert (list(task.found), task.keys, task.sizes) == ([1, 1, 0], [new.key], [BLOCK_BYTES])
    assert driver.tier.pop_stores() == {}, "LMCache did not ask for it"
    hits, views = driver.load([known, new])
    assert (hits, [view[0] for view in views]) == ([1, 1], [1, 7])


def test_a_copy_is_as_old_as_the_block_and_one_that_is_too_old_is_none(driver: FileDriver, gate: GateStandIn) -> None:
    gate.enforce({KEYSPACE_A: (EnforcedBudget("disk", retention_s=600),)})
    old, older = block(number=1), block(number=2)
    driver.runtime.enforcement.ages.inherit(old.key, 400.0)
    driver.runtime.enforcement.ages.inherit(older.key, 601.0)
    assert list(handed_down(driver, [old, older]).found) == [1, 0]
    driver.let_pass(100)
    assert driver.lookup([old]) == [1]
    driver.let_pass(100)
    assert driver.lookup([old]) == [0]


def test_a_denied_scope_is_told_so_beforehand(driver: FileDriver, gate: GateStandIn) -> None:
    gate.enforce({KEYSPACE_A: (EnforcedBudget("disk", 0),), KEYSPACE_B: (EnforcedBudget("disk", retention_s=9),)})
    assert driver.tier.life_s(block(KEYSPACE_A)) == 0.0
    assert driver.tier.life_s(block(KEYSPACE_B)) == 9.0
    assert driver.tier.takes(block(KEYSPACE_B))
    assert not driver.tier.takes(block(KEYSPACE_UNKNOWN))
