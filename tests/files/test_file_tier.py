"""A tier of plain files on a real directory, as LMCache uses it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.contract.budget import TierBudget
from kvstrata_sidecar.adapter.tasks import StoreOutcome
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

    @pytest.mark.parametrize("size", [1, 56, 4039, 4040, 4041, 4096, 5000, 8192, 3 * 4096 + 17])
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
        gate.allow(KEYSPACE_A, budgets=(TierBudget("disk", retention_s=1),))
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
        gate.allow(KEYSPACE_A, budgets=(TierBudget("disk", retention_s=1),))
        driver.store([block()])
        assert driver.lookup([block()]) == [1]
        driver.until(lambda: driver.lookup([block()]) == [0], 5)
        driver.until(lambda: not files_in(directory), 5)
        assert driver.tier.counters()["expired"] == 1

    def test_a_copy_inherits_what_remains(self, driver: FileDriver, gate: GateStandIn) -> None:
        gate.allow(KEYSPACE_A, budgets=(TierBudget("disk", retention_s=60),))
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
        gate.allow(KEYSPACE_A, KEYSPACE_B, budgets=(TierBudget("disk", retention_s=50),))
        assert driver.lookup(blocks(KEYSPACE_A, 1, 2)) == [0, 1]
        driver.until(lambda: len(files_in(directory)) == 1)


class TestBudgets:
    def test_a_limit_is_kept_on_the_disk_and_the_least_recently_used_go(
        self, driver: FileDriver, gate: GateStandIn, directory: Path
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(TierBudget("disk", limit_bytes=3 * FILE_BYTES),))
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
        hits = second.tier.ages()["hit"]
        assert (sum(hits.buckets), hits.sum_s >= 2 * 3600) == (2, True)
        assert "eviction" not in second.tier.ages()
        gate.allow(KEYSPACE_A, budgets=(TierBudget("disk", limit_bytes=FILE_BYTES),))
        second.until(lambda: "eviction" in second.tier.ages())
        assert second.tier.ages()["eviction"].sum_s >= 3600

    def test_a_block_larger_than_the_limit_is_refused_and_costs_nobody(
        self, driver: FileDriver, gate: GateStandIn
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(TierBudget("disk", limit_bytes=FILE_BYTES),))
        driver.store([block()])
        driver.store([block(number=2)], size=2 * BLOCK_BYTES)
        assert driver.lookup([block()]) == [1]
        assert driver.refused("over_budget") == 1

    def test_a_lowered_limit_is_put_through(self, driver: FileDriver, gate: GateStandIn, directory: Path) -> None:
        driver.store(blocks(KEYSPACE_A, *range(1, 9)))
        gate.allow(KEYSPACE_A, budgets=(TierBudget("disk", limit_bytes=2 * FILE_BYTES),))
        driver.until(lambda: on_disk_bytes(directory) <= 2 * FILE_BYTES)

    def test_a_full_tier_makes_room_but_not_of_what_is_guaranteed(self, start: Start, gate: GateStandIn) -> None:
        driver = start(capacity_bytes=10 * FILE_BYTES)
        driver.until_ready()
        gate.enforce({KEYSPACE_A: (TierBudget("disk", guaranteed_bytes=4 * FILE_BYTES),), KEYSPACE_B: ()})
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
        gate.enforce({KEYSPACE_A: (TierBudget("disk", limit_bytes=5 * FILE_BYTES),), KEYSPACE_B: ()})
        driver.store([*blocks(KEYSPACE_A, 1, 2), block(KEYSPACE_B, 1)])
        rows = {row.scope: (row.tier, row.used_bytes, row.blocks, row.limit_bytes) for row in gate.state().usage}
        assert rows[KEYSPACE_A[:12]] == ("disk", 2 * FILE_BYTES, 2, 5 * FILE_BYTES)
        assert rows[KEYSPACE_B[:12]] == ("disk", FILE_BYTES, 1, None)
        gate.allow(KEYSPACE_A)
        assert {row.scope for row in gate.state().usage} == {KEYSPACE_A[:12], ""}


class TestStartingAnew:
    def test_blocks_are_found_again_in_their_order_of_use(
        self, start: Start, gate: GateStandIn, directory: Path
    ) -> None:
        first = start()
        first.until_ready()
        gate.allow(KEYSPACE_A)
        first.store(blocks(KEYSPACE_A, *range(12)), fill=3)
        used = [7, 2, 11, 0, 5, 9, 4, 1, 10, 3, 8, 6]
        first.close()
        for turn, number in enumerate(used):
            file = file_of(directory, block(number=number))
            os.utime(file, (time.time() - 1000 + turn, file.stat().st_mtime))
        second = start()
        second.until_ready()
        assert second.tier.state().used_bytes == on_disk_bytes(directory) == 12 * FILE_BYTES
        gate.allow(KEYSPACE_A, budgets=(TierBudget("disk", limit_bytes=5 * FILE_BYTES),))
        second.until(lambda: on_disk_bytes(directory) <= 5 * FILE_BYTES)
        kept = [number for number in range(12) if second.lookup([block(number=number)]) == [1]]
        assert kept == sorted(used[-5:])
        assert bytes(second.load([block(number=8)])[1][0]) == bytes([3]) * BLOCK_BYTES

    def test_uses_outlive_the_process(self, start: Start, gate: GateStandIn, directory: Path) -> None:
        first = start()
        first.until_ready()
        gate.allow(KEYSPACE_A)
        first.store(blocks(KEYSPACE_A, 1, 2))
        for number in (1, 2):
            file = file_of(directory, block(number=number))
            os.utime(file, (time.time() - 1000, file.stat().st_mtime))
        first.tier._files.shelf.take_touched()
        first.lookup([block(number=1)])
        first.close()
        used_s = [file_of(directory, block(number=number)).stat().st_atime for number in (1, 2)]
        assert used_s[0] > time.time() - 100 > used_s[1]

    def test_ages_count_on(self, start: Start, gate: GateStandIn) -> None:
        first = start()
        first.until_ready()
        gate.allow(KEYSPACE_A)
        first.runtime.enforcement.ages.inherit(block().key, 100)
        first.store(blocks(KEYSPACE_A, 1, 2))
        first.close()
        second = start()
        second.until_ready()
        gate.allow(KEYSPACE_A, budgets=(TierBudget("disk", retention_s=90),))
        assert second.lookup(blocks(KEYSPACE_A, 1, 2)) == [0, 1]

    def test_what_is_no_block_is_removed(self, start: Start, gate: GateStandIn, directory: Path) -> None:
        first = start()
        first.until_ready()
        gate.allow(KEYSPACE_A)
        first.store([block()])
        first.close()
        good = file_of(directory, block())
        os.utime(good, ns=(time.time_ns(), time.time_ns()))
        junk = ["x", "..p", f".{good.name}.abcd", good.name[:-1] + "e", good.name.replace(".0.", ".00."), "é\udc80"]
        for name in junk:
            (good.parent / name).write_bytes(b"")
        for name, size in ((".1.", 100), (".2.", 4097)):
            (good.parent / good.name.replace(".0.", name)).write_bytes(bytes(size))
        later = good.parent / good.name.replace(".0.", ".3.")
        later.write_bytes(bytes(4096))
        os.utime(later, (time.time() + 3600, time.time() + 3600))
        (directory / "kvs1" / "stray").write_bytes(b"")
        second = start()
        second.until_ready()
        assert files_in(directory) == [good]
        counts = second.tier.counters()
        assert counts["orphan_scans"] == 1
        assert counts["orphan_files"] == counts["files_removed"] >= len(junk)
        gate.allow(KEYSPACE_A)
        assert second.load([block()])[0] == [1]

    @pytest.mark.parametrize("kind", ["link", "file"])
    def test_nothing_is_written_where_a_link_in_a_keyspaces_place_leads(
        self, start: Start, gate: GateStandIn, directory: Path, tmp_path: Path, kind: str
    ) -> None:
        elsewhere, planted = tmp_path / "elsewhere", directory / "kvs1" / KEYSPACE_A
        elsewhere.mkdir()
        planted.parent.mkdir(parents=True)
        if kind == "link":
            planted.symlink_to(elsewhere)
        else:
            planted.write_bytes(b"")
        driver = start()
        driver.until_ready()
        gate.allow(KEYSPACE_A)
        assert driver.store([block()]).stored_bytes == BLOCK_BYTES
        assert driver.load([block()])[0] == [1]
        assert list(elsewhere.iterdir()) == []
        assert planted.is_dir()
        assert not planted.is_symlink()

    def test_a_clock_that_went_back_makes_no_block_younger(
        self, start: Start, gate: GateStandIn, directory: Path
    ) -> None:
        first = start()
        first.until_ready()
        gate.allow(KEYSPACE_A)
        first.store([block()])
        first.close()
        hour_ahead = time.time() + 3600
        os.utime(directory / "clock", (hour_ahead, hour_ahead))
        second = start()
        second.until_ready()
        gate.allow(KEYSPACE_A, budgets=(TierBudget("disk", retention_s=1800),))
        assert second.lookup([block()]) == [0]

    def test_one_directory_has_one_writer(self, driver: FileDriver, tmp_path: Path, directory: Path) -> None:
        other_gate = tmp_path / "other"
        other_gate.mkdir()
        gate = GateStandIn(other_gate)
        driver.close()
        holder = os.open(directory / "kvs1", os.O_RDONLY)
        fcntl.flock(holder, fcntl.LOCK_EX)
        late = FileDriver(gate, directory)
        late.until(lambda: "another process" in late.tier.state().detail)
        assert late.tier.state().breaker == "open"
        os.close(holder)
        late.until_ready()
        late.close()


class TestPurge:
    def test_all_files_of_a_keyspace_go_and_nobody_elses(self, driver: FileDriver, directory: Path) -> None:
        driver.store([*blocks(KEYSPACE_A, 1, 2, 3), block(KEYSPACE_B, 1)])
        stray = file_of(directory, block()).parent / ".left.behind"
        stray.write_bytes(b"plain")
        purged = driver.tier._purger.purge([KEYSPACE_A], 10)
        assert purged is not None
        assert (purged.gone_bytes, purged.gone_blocks, purged.held_blocks) == (3 * FILE_BYTES, 3, 0)
        assert "flash keeps earlier copies" in purged.residue
        assert "before were removed without being overwritten" in purged.residue
        assert files_in(directory) == [file_of(directory, block(KEYSPACE_B, 1))]
        assert not stray.parent.exists()
        again = driver.tier._purger.purge([KEYSPACE_A], 10)
        assert again is not None
        assert again.gone_blocks == 3

    def test_plain_files_are_overwritten_before_they_go(self, driver: FileDriver, directory: Path) -> None:
        driver.store([block()], fill=9)
        kept = os.open(file_of(directory, block()), os.O_RDONLY)
        driver.tier._purger.purge([KEYSPACE_A], 10)
        assert os.fstat(kept).st_nlink == 0
        assert os.pread(kept, 1 << 20, 0) == bytes(FILE_BYTES)
        os.close(kept)

    def test_what_comes_after_a_purge_stays(self, driver: FileDriver) -> None:
        driver.store([block()])
        driver.tier._purger.purge([KEYSPACE_A], 10)
        driver.store([block()])
        assert driver.load([block()])[0] == [1]
