"""A tier of plain files on a directory that is not empty: blocks are found again, and nothing else is kept."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.contract.policy.budget import EnforcedBudget
from tests.files.file_driver import BLOCK_BYTES, FILE_BYTES, FileDriver, block, blocks, file_of, files_in, on_disk_bytes
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn

Start = Callable[..., FileDriver]


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
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", limit_bytes=5 * FILE_BYTES),))
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
        first.tier._files.index.take_touched()
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
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", retention_s=90),))
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
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", retention_s=1800),))
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
        # It is half-open while it is tried again.
        late.until(lambda: late.tier.state().breaker == "open")
        os.close(holder)
        late.until_ready()
        late.close()
