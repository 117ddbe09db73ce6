"""How much a tier of plain files takes of a real directory, and who makes room."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from kvstrata.contract.policy.budget import EnforcedBudget
from tests.files.file_driver import BLOCK_BYTES, FILE_BYTES, FileDriver, block, blocks, file_of, on_disk_bytes
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn

Start = Callable[..., FileDriver]


class TestBudgets:
    def test_a_limit_is_kept_on_the_disk_and_the_least_recently_used_go(
        self, driver: FileDriver, gate: GateStandIn, directory: Path
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", limit_bytes=3 * FILE_BYTES),))
        for number in range(1, 6):
            driver.store([block(number=number)])
            driver.lookup([block(number=1)])
            assert on_disk_bytes(directory) <= 3 * FILE_BYTES
        assert driver.lookup(blocks(KEYSPACE_A, 1, 2, 3, 4, 5)) == [1, 0, 0, 1, 1]
        assert driver.tier.counters()["evicted"] == 2

    def test_ages_are_counted_when_blocks_are_loaded_and_when_they_make_room(
        self, start: Start, gate: GateStandIn, directory: Path
    ) -> None:
        first = start()
        first.until_ready()
        gate.allow(KEYSPACE_A)
        first.store(blocks(KEYSPACE_A, 1, 2))
        first.close()
        for number in (1, 2):
            os.utime(file_of(directory, block(number=number)), (time.time() - 3600, time.time() - 3600))
        second = start()
        second.until_ready()
        gate.allow(KEYSPACE_A)
        assert second.load(blocks(KEYSPACE_A, 1, 2, 3))[0] == [1, 1, 0]
        hits = second.tier.counts.ages()["hit"]
        assert (sum(hits.buckets), hits.sum_s >= 2 * 3600) == (2, True)
        assert "eviction" not in second.tier.counts.ages()
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", limit_bytes=FILE_BYTES),))
        second.until(lambda: "eviction" in second.tier.counts.ages())
        assert second.tier.counts.ages()["eviction"].sum_s >= 3600

    def test_a_block_larger_than_the_limit_is_refused_and_costs_nobody(
        self, driver: FileDriver, gate: GateStandIn
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", limit_bytes=FILE_BYTES),))
        driver.store([block()])
        driver.store([block(number=2)], size=2 * BLOCK_BYTES)
        assert driver.lookup([block()]) == [1]
        assert driver.refused("over_budget") == 1

    def test_a_lowered_limit_is_put_through(self, driver: FileDriver, gate: GateStandIn, directory: Path) -> None:
        driver.store(blocks(KEYSPACE_A, *range(1, 9)))
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", limit_bytes=2 * FILE_BYTES),))
        driver.until(lambda: on_disk_bytes(directory) <= 2 * FILE_BYTES)

    def test_a_full_tier_makes_room_but_not_of_what_is_guaranteed(self, start: Start, gate: GateStandIn) -> None:
        driver = start(capacity_bytes=10 * FILE_BYTES)
        driver.until_ready()
        gate.enforce({KEYSPACE_A: (EnforcedBudget("disk", guaranteed_bytes=4 * FILE_BYTES),), KEYSPACE_B: ()})
        driver.store(blocks(KEYSPACE_A, 1, 2, 3, 4))
        for number in range(30):
            driver.store([block(KEYSPACE_B, number)])
            assert on_disk_bytes(driver.directory) <= 10 * FILE_BYTES
        assert driver.lookup(blocks(KEYSPACE_A, 1, 2, 3, 4)) == [1] * 4

    def test_blocks_of_no_policy_are_the_first_to_make_room(self, start: Start, gate: GateStandIn) -> None:
        driver = start(capacity_bytes=8 * FILE_BYTES)
        driver.until_ready()
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        driver.store(blocks(KEYSPACE_B, 1, 2, 3, 4))
        driver.store(blocks(KEYSPACE_A, 1, 2, 3, 4))
        driver.lookup(blocks(KEYSPACE_B, 1, 2, 3, 4))
        gate.allow(KEYSPACE_A)
        driver.store([block(KEYSPACE_A, 5)])
        assert driver.lookup(blocks(KEYSPACE_A, 1, 2, 3, 4, 5)) == [1] * 5

    def test_no_more_blocks_are_kept_than_the_index_may_hold(self, start: Start, gate: GateStandIn) -> None:
        driver = start(max_blocks=5)
        driver.until_ready()
        gate.allow(KEYSPACE_A)
        for number in range(12):
            driver.store([block(number=number)])
            assert driver.tier.counters()["blocks"] <= 5
        assert driver.lookup([block(number=11)]) == [1]
        assert "index" in driver.tier.state().detail

    def test_what_the_file_system_has_to_keep_free_is_kept_free(self, start: Start, gate: GateStandIn) -> None:
        driver = start(free_floor_percent=99)
        driver.until_ready()
        gate.allow(KEYSPACE_A)
        driver.until(lambda: driver.tier.state().floor_reached)
        driver.store([block()])
        assert driver.lookup([block()]) == [0]
        assert driver.refused("tier_full") == 1

    def test_usage_is_told_by_scope_with_its_bounds(self, driver: FileDriver, gate: GateStandIn) -> None:
        gate.enforce({KEYSPACE_A: (EnforcedBudget("disk", limit_bytes=5 * FILE_BYTES),), KEYSPACE_B: ()})
        driver.store([*blocks(KEYSPACE_A, 1, 2), block(KEYSPACE_B, 1)])
        rows = {row.scope: (row.tier, row.used_bytes, row.blocks, row.limit_bytes) for row in gate.state().usage}
        assert rows[KEYSPACE_A[:12]] == ("disk", 2 * FILE_BYTES, 2, 5 * FILE_BYTES)
        assert rows[KEYSPACE_B[:12]] == ("disk", FILE_BYTES, 1, None)
        gate.allow(KEYSPACE_A)
        assert {row.scope for row in gate.state().usage} == {KEYSPACE_A[:12], ""}
