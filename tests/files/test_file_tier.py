"""A tier of plain files on a real directory, as LMCache uses it: what is found, and under which policy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.store.block_file import PAGE_BYTES
from kvstrata.contract.store.block_value import HEADER_BYTES
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.files.file_driver import (
    BLOCK_BYTES,
    FILE_BYTES,
    FileDriver,
    aligned,
    block,
    blocks,
    file_of,
    files_in,
    on_disk_bytes,
)
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, KEYSPACE_UNKNOWN, GateStandIn

Start = Callable[..., FileDriver]


class TestStoringAndLoading:
    def test_what_was_stored_is_found_and_loaded(self, driver: FileDriver, directory: Path) -> None:
        wanted = blocks(KEYSPACE_A, 1, 2, 3)
        assert driver.store(wanted, fill=7) == StoreOutcome(True, 3 * BLOCK_BYTES)
        assert driver.lookup([*wanted, block(KEYSPACE_A, 4)]) == [1, 1, 1, 0]
        hits, views = driver.load([*wanted, block(KEYSPACE_A, 4)])
        assert hits == [1, 1, 1, 0]
        assert all(bytes(view) == bytes([7]) * BLOCK_BYTES for view in views[:3])
        assert bytes(views[3]) == bytes([0xEE]) * BLOCK_BYTES
        assert [path.stat().st_mode & 0o777 for path in files_in(directory)] == [0o600] * 3
        assert on_disk_bytes(directory) == driver.tier.state().used_bytes == 3 * FILE_BYTES

    @pytest.mark.parametrize("size", [1, 64, 4031, 4032, 4033, 4096, 5000, 8192, 3 * 4096 + 17])
    def test_blocks_may_be_of_any_size_and_lie_anywhere_in_memory(self, driver: FileDriver, size: int) -> None:
        odd = memoryview(bytearray(os.urandom(size + 3)))[3:]
        for number, view in ((1, aligned(size, 5)), (2, odd)):
            driver.wait(task := driver.tier.store([block(number=number)], [view]))
            assert driver.tier.pop_stores()[task].stored_bytes == size
            for target in (aligned(size), memoryview(bytearray(size + 1))[1:]):
                driver.wait(task := driver.tier.load([block(number=number)], [target]))
                assert driver.tier.pop_found(task) == b"\1"
                assert bytes(target) == bytes(view)

    def test_a_block_of_another_size_than_asked_for_is_a_miss_and_goes(self, driver: FileDriver) -> None:
        driver.store([block()])
        assert driver.load([block()], size=2 * BLOCK_BYTES)[0] == [0]
        assert driver.lookup([block()]) == [0]

    @pytest.mark.parametrize("pages", [1, -1, 0], ids=["longer", "shorter", "as long"])
    @pytest.mark.parametrize("later", ["version", "codec"])
    def test_a_file_of_a_later_version_is_found_and_read_once_and_stays(
        self, driver: FileDriver, directory: Path, later: str, pages: int
    ) -> None:
        driver.store([block()])
        (path,) = files_in(directory)
        header = path.read_bytes()[-HEADER_BYTES:]
        # The codec's byte follows magic, flags and generation.
        header = b"kvs4" + header[4:] if later == "version" else header[:6] + b"\7" + header[7:]
        written = bytes(FILE_BYTES + pages * PAGE_BYTES - HEADER_BYTES) + header
        path.write_bytes(written)
        assert driver.lookup([block()]) == [1], "only its content shows the version"
        for _ in range(3):
            assert driver.load([block()])[0] == [0]
            assert driver.lookup([block()]) == [0]
            assert driver.store([block()]) == StoreOutcome(True, 0)
        assert path.read_bytes() == written
        assert driver.tier.state().used_bytes == FILE_BYTES
        counters = driver.tier.counters()
        assert counters["load_misses"] == 3
        assert "unreadable" not in counters
        assert "errors" not in counters
        assert driver.tier.delete([block()]), "erasure and eviction reach it"
        assert files_in(directory) == []

    def test_what_is_there_is_not_written_again(self, driver: FileDriver, directory: Path) -> None:
        driver.store([block()])
        (before,) = files_in(directory)
        inode = before.stat().st_ino
        assert driver.store([block()]) == StoreOutcome(True, 0)
        assert before.stat().st_ino == inode
        assert driver.tier.counters()["stores_present"] == 1

    def test_a_lookup_is_answered_before_it_returns(self, driver: FileDriver) -> None:
        driver.store([block()])
        assert driver.tier.pop_found(driver.tier.lookup([block()])) == b"\1"

    def test_a_block_is_deleted_once(self, driver: FileDriver, directory: Path) -> None:
        driver.store(blocks(KEYSPACE_A, 1, 2))
        assert driver.tier.delete(blocks(KEYSPACE_A, 1, 3)) == [block(KEYSPACE_A, 1).key]
        assert driver.lookup(blocks(KEYSPACE_A, 1, 2)) == [0, 1]
        assert files_in(directory) == [file_of(directory, block(KEYSPACE_A, 2))]


class TestSizes:
    def test_a_block_takes_what_its_file_does_and_one_that_is_not_there_nothing(
        self, driver: FileDriver, directory: Path
    ) -> None:
        driver.store(blocks(KEYSPACE_A, 1, 2))
        driver.store([block(KEYSPACE_A, 3)], size=5000)
        there = [block(KEYSPACE_A, number) for number in (1, 2, 3)]
        sizes = driver.tier.sizes([*there, block(KEYSPACE_A, 4), block(KEYSPACE_B, 1)])
        assert sizes == [*(file_of(directory, one).stat().st_size for one in there), 0, 0]

    def test_what_may_not_be_read_takes_nothing(self, driver: FileDriver, gate: GateStandIn) -> None:
        driver.store([block()])
        gate.allow(KEYSPACE_B)
        assert driver.tier.sizes([block()]) == [0]
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", retention_s=1),))
        driver.until(lambda: driver.tier.sizes([block()]) == [0])
        assert driver.lookup([block()]) == [0]

    def test_to_ask_is_no_use_of_a_block(self, start: Start, gate: GateStandIn) -> None:
        driver = start(capacity_bytes=4 * FILE_BYTES)
        driver.until_ready()
        gate.allow(KEYSPACE_A)
        for number in (1, 2, 3, 4):
            driver.store([block(KEYSPACE_A, number)])
        assert driver.tier.sizes([block(KEYSPACE_A, 1)]) == [FILE_BYTES]
        driver.store([block(KEYSPACE_A, 5)])
        assert driver.lookup(blocks(KEYSPACE_A, 1, 4, 5)) == [0, 1, 1]


class TestThePolicy:
    def test_a_keyspace_outside_of_the_policy_reaches_no_file(self, driver: FileDriver, directory: Path) -> None:
        stranger = block(KEYSPACE_UNKNOWN)
        assert driver.store([stranger]) == StoreOutcome(True, 0)
        assert driver.lookup([stranger]) == [0]
        assert driver.load([stranger])[0] == [0]
        assert files_in(directory) == []
        assert driver.refused("unknown_keyspace") == 3

    def test_nothing_is_done_before_the_first_policy(self, start: Start) -> None:
        driver = start()
        driver.until_ready()
        driver.store([block()])
        assert driver.refused("no_policy") == 1

    def test_what_leaves_the_policy_is_unreadable_at_once_and_back_with_it(
        self, driver: FileDriver, gate: GateStandIn, directory: Path
    ) -> None:
        driver.store([block()])
        gate.allow(KEYSPACE_B)
        assert driver.lookup([block()]) == [0]
        assert driver.load([block()])[0] == [0]
        assert len(files_in(directory)) == 1
        gate.allow(KEYSPACE_A)
        assert driver.load([block()])[0] == [1]

    def test_a_block_is_unreadable_and_then_removed_when_its_retention_is_over(
        self, driver: FileDriver, gate: GateStandIn, directory: Path
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", retention_s=600),))
        driver.store([block()])
        assert driver.lookup([block()]) == [1]
        driver.let_pass(500)
        assert driver.lookup([block()]) == [1]
        driver.let_pass(100)
        assert driver.lookup([block()]) == [0]
        driver.until(lambda: not files_in(directory))
        assert driver.tier.counters()["expired"] == 1

    def test_a_copy_inherits_what_remains(self, driver: FileDriver, gate: GateStandIn) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", retention_s=60),))
        driver.runtime.enforcement.ages.inherit(block().key, 61)
        driver.store([block()])
        assert driver.lookup([block()]) == [0]
        assert driver.refused("retention") == 1
        driver.runtime.enforcement.ages.inherit(block(number=2).key, 30)
        driver.store([block(number=2)])
        driver.load([block(number=2)])
        assert 30 <= driver.runtime.enforcement.ages.age_s(block(number=2).key) < 40

    def test_a_shortened_retention_removes_what_is_too_old(
        self, driver: FileDriver, gate: GateStandIn, directory: Path
    ) -> None:
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        driver.runtime.enforcement.ages.inherit(block().key, 100)
        driver.store(blocks(KEYSPACE_A, 1, 2))
        gate.allow(KEYSPACE_A, KEYSPACE_B, budgets=(EnforcedBudget("disk", retention_s=50),))
        assert driver.lookup(blocks(KEYSPACE_A, 1, 2)) == [0, 1]
        driver.until(lambda: len(files_in(directory)) == 1)
