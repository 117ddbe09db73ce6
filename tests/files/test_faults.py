"""Disks that fail: what is answered, counted and told, and that nothing of LMCache's is touched late."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.store.block_file import PAGE_BYTES
from kvstrata_sidecar.adapter.files.disk import Disk
from kvstrata_sidecar.adapter.files.file_format import address_of
from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from kvstrata_sidecar.upstream.pool import Pool
from tests.adapter.memory_stand_in import NO_MEMORY, STORE_TAG, SUCCESS, Manager, MemoryObject
from tests.files.file_driver import BLOCK_BYTES, FileDriver, aligned, block, blocks, file_of, files_in, purge
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn

Start = Callable[..., FileDriver]


class SlowDisk(Disk):
    """A real directory; its reads, writes or probes begin at once and end when they are let go.

    With `one_by_one` a write goes on for each of its releases.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads_go_on, self.writes_go_on = threading.Event(), threading.Event()
        self.reads_go_on.set()
        self.writes_go_on.set()
        self.probes_go_on = threading.Event()
        self.probes_go_on.set()
        self.one_by_one: threading.Semaphore | None = None
        self.under_way = threading.Semaphore(0)

    def read(self, keyspace: str, name: str, buffers: Sequence[memoryview]) -> bool:
        self.under_way.release()
        self.reads_go_on.wait(20)
        return super().read(keyspace, name, buffers)

    def write(self, *args: Any, **options: Any) -> None:
        self.under_way.release()
        if self.one_by_one is None:
            self.writes_go_on.wait(20)
        else:
            self.one_by_one.acquire(timeout=20)
        super().write(*args, **options)

    def probe(self) -> None:
        self.probes_go_on.wait(20)
        super().probe()


@pytest.fixture
def slow(directory: Path) -> SlowDisk:
    return SlowDisk(directory)


@pytest.fixture
def hanging(start: Start, gate: GateStandIn, slow: SlowDisk) -> FileDriver:
    driver = start(disk=slow, guarded=lambda: True, workers=2)
    driver.until_ready()
    gate.allow(KEYSPACE_A, KEYSPACE_B)
    return driver


class TestADiskThatHangs:
    def test_a_load_is_answered_at_its_deadline_and_its_memory_is_kept_back_until_the_disk_lets_go(
        self, hanging: FileDriver, slow: SlowDisk
    ) -> None:
        hanging.store([block()], fill=7)
        slow.under_way = threading.Semaphore(0)
        slow.reads_go_on.clear()
        view = aligned(BLOCK_BYTES, 0)
        address = address_of(view)
        assert address is not None
        task = hanging.tier.load([block()], [view])
        assert slow.under_way.acquire(timeout=60)
        hanging.outlast_deadlines()
        hanging.wait(task)
        assert hanging.tier.pop_found(task) == b"\0"
        spans = hanging.runtime.spans
        assert spans.touches(address, 1)
        assert spans.touches(address + BLOCK_BYTES - 1, 1)
        assert not spans.touches(address + BLOCK_BYTES, 1)
        slow.reads_go_on.set()
        hanging.until(lambda: not len(spans._held))
        assert hanging.tier.counters().get("loaded", 0) == 0

    def test_the_first_operation_that_is_overdue_opens_the_breaker_and_a_probe_closes_it(
        self, hanging: FileDriver, slow: SlowDisk
    ) -> None:
        hanging.store(blocks(KEYSPACE_A, 1, 2))
        slow.under_way = threading.Semaphore(0)
        slow.reads_go_on.clear()
        slow.probes_go_on.clear()
        task = hanging.tier.load([block()], [aligned(BLOCK_BYTES)])
        assert slow.under_way.acquire(timeout=60)
        hanging.outlast_deadlines()
        hanging.wait(task)
        hanging.until(lambda: hanging.lookup([block(number=2)]) == [0])
        assert hanging.refused("breaker_open") > 0
        slow.probes_go_on.set()
        hanging.until(lambda: hanging.tier.state().breaker == "closed")
        slow.reads_go_on.set()
        hanging.until(lambda: hanging.load([block(number=2)])[0] == [1])

    def test_a_store_that_comes_back_late_leaves_no_file(
        self, hanging: FileDriver, slow: SlowDisk, directory: Path
    ) -> None:
        slow.writes_go_on.clear()
        task = hanging.tier.store([block()], [aligned(BLOCK_BYTES, 1)])
        assert slow.under_way.acquire(timeout=60)
        hanging.outlast_deadlines()
        hanging.wait(task)
        assert hanging.tier.pop_stores()[task] == StoreOutcome(False, 0)
        slow.writes_go_on.set()
        hanging.until(lambda: not len(hanging.runtime.spans._held))
        hanging.until(lambda: not files_in(directory))
        assert hanging.tier.state().used_bytes == 0

    def test_an_invalidation_waits_for_the_io_on_what_it_drops(
        self, hanging: FileDriver, slow: SlowDisk, gate: GateStandIn
    ) -> None:
        hanging.store([block()])
        slow.reads_go_on.clear()
        slow.under_way = threading.Semaphore(0)
        hanging.tier.load([block()], [aligned(BLOCK_BYTES)])
        assert slow.under_way.acquire(timeout=60)
        acknowledged = threading.Event()

        def apply() -> None:
            gate.allow(KEYSPACE_B)
            acknowledged.set()

        thread = threading.Thread(target=apply)
        thread.start()
        assert not acknowledged.wait(2.0)
        slow.reads_go_on.set()
        assert acknowledged.wait(60)
        thread.join()

    def test_a_purge_waits_for_who_reads_and_asking_again_adds_no_thread(
        self, hanging: FileDriver, slow: SlowDisk, gate: GateStandIn, directory: Path
    ) -> None:
        hanging.store(blocks(KEYSPACE_A, 1, 2))
        slow.reads_go_on.clear()
        slow.under_way = threading.Semaphore(0)
        hanging.tier.load([block()], [aligned(BLOCK_BYTES)])
        assert slow.under_way.acquire(timeout=60)
        purger = hanging.tier._eraser
        first = purge(purger, [KEYSPACE_A])
        assert first is not None
        assert (first.gone.blocks, first.held_blocks) == (1, 1)
        for _ in range(5):
            purge(purger, [KEYSPACE_A], 0.05, wait_s=30)
        # One that works, and one whose turn is over and that the system has yet to end.
        assert sum(thread.name == "kvs-purge" for thread in threading.enumerate()) <= 2
        slow.reads_go_on.set()
        hanging.until(lambda: (purged := purge(purger, [KEYSPACE_A])) is not None and purged.held_blocks == 0)
        assert files_in(directory) == []

    def test_without_anybody_who_keeps_memory_back_the_answer_waits(
        self, start: Start, gate: GateStandIn, slow: SlowDisk
    ) -> None:
        driver = start(disk=slow)
        driver.until_ready()
        gate.allow(KEYSPACE_A)
        driver.store([block()])
        slow.under_way = threading.Semaphore(0)
        slow.reads_go_on.clear()
        task = driver.tier.load([block()], [aligned(BLOCK_BYTES)])
        assert slow.under_way.acquire(timeout=60)
        driver.outlast_deadlines()
        driver.until(lambda: driver.tier.counters().get("late_load") == 1)
        assert driver.tier.pop_found(task) is None
        slow.reads_go_on.set()
        driver.wait(task)


class TestMemoryThatADiskMayTouch:
    def test_it_is_overwritten_and_given_back_when_the_disk_has_let_go_and_holds_nobody_else_up(self) -> None:
        manager, spans = Manager(8), Spans()
        pool = Pool(manager, SUCCESS, NO_MEMORY, STORE_TAG, spans)
        pool.guard()
        base = manager._memory_manager.base
        lent, other = MemoryObject(base, 2), MemoryObject(base + 3 * PAGE_BYTES, 1)
        with spans.held(memoryview((ctypes.c_ubyte * 10).from_address(base + PAGE_BYTES))):
            pool.scrubber.take([lent, other])
            deadline_s = time.monotonic() + 60
            while pool.scrubber.pending_bytes > 2 * PAGE_BYTES:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            assert not pool.settle(0.05), "what is kept back is not overwritten yet"
        assert pool.settle(60)
        assert pool.scrubber.pending_bytes == 0
        pool.close()


class TestErrorsOfTheDisk:
    @pytest.fixture
    def failing(self, driver: FileDriver, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int | None], None]:
        """Let one call of the operating system fail with an error; None makes it well again."""
        own = {name: getattr(os, name) for name in ("pwritev", "preadv", "pwrite", "unlink", "rename")}

        def fail(name: str, code: int | None) -> None:
            def fails(*_: Any, **__: Any) -> int:
                assert code is not None
                raise OSError(code, os.strerror(code))

            monkeypatch.setattr(os, name, own[name] if code is None else fails)

        return fail

    def test_a_full_disk_refuses_stores_for_a_moment_and_says_so(
        self, driver: FileDriver, failing: Callable[[str, int | None], None], directory: Path
    ) -> None:
        driver.store([block()])
        failing("pwritev", errno.ENOSPC)
        assert driver.store([block(number=2)]).stored_bytes == 0
        state = driver.tier.state()
        assert (state.full, state.breaker) == (True, "closed")
        assert "full" in state.detail
        assert driver.load([block()])[0] == [1]
        assert files_in(directory) == [file_of(directory, block())]
        failing("pwritev", None)
        driver.until(lambda: driver.store([block(number=2)]).stored_bytes > 0)
        assert not driver.tier.state().full

    def test_a_read_only_file_system_is_read(
        self, driver: FileDriver, failing: Callable[[str, int | None], None]
    ) -> None:
        driver.store([block()])
        failing("pwritev", errno.EROFS)
        driver.store([block(number=2)])
        driver.store([block(number=2)])
        assert driver.refused("read_only") == 2
        assert driver.tier.state().read_only
        assert driver.load([block()])[0] == [1]

    def test_a_block_that_cannot_be_read_goes_and_three_in_a_row_open_the_breaker(
        self, driver: FileDriver, failing: Callable[[str, int | None], None], directory: Path
    ) -> None:
        driver.store(blocks(KEYSPACE_A, 1, 2, 3, 4))
        failing("preadv", errno.EIO)
        failing("pwrite", errno.EIO)
        assert driver.load([block(number=1)])[0] == [0]
        assert not file_of(directory, block(number=1)).exists()
        assert driver.tier.state().breaker == "closed"
        driver.load(blocks(KEYSPACE_A, 2, 3))
        assert driver.tier.state().breaker != "closed"
        assert "Input/output error" in driver.tier.state().detail
        failing("preadv", None)
        failing("pwrite", None)
        driver.until(lambda: driver.tier.state().breaker == "closed")
        assert driver.load([block(number=4)])[0] == [1]

    def test_a_file_that_cannot_be_removed_counts_until_it_is_gone(
        self, driver: FileDriver, failing: Callable[[str, int | None], None], directory: Path
    ) -> None:
        driver.store([block()])
        used_bytes = driver.tier.state().used_bytes
        failing("unlink", errno.EPERM)
        driver.tier.delete([block()])
        assert driver.lookup([block()]) == [0]
        assert driver.tier.state().used_bytes == used_bytes
        failing("unlink", None)
        driver.until(lambda: not files_in(directory) and driver.tier.state().used_bytes == 0)

    def test_a_file_that_somebody_removed_or_cut_is_a_miss_and_stored_again(
        self, driver: FileDriver, directory: Path
    ) -> None:
        driver.store(blocks(KEYSPACE_A, 1, 2))
        file_of(directory, block(number=1)).unlink()
        os.truncate(file_of(directory, block(number=2)), PAGE_BYTES)
        assert driver.load(blocks(KEYSPACE_A, 1, 2))[0] == [0, 0]
        assert driver.lookup(blocks(KEYSPACE_A, 1, 2)) == [0, 0]
        assert driver.store(blocks(KEYSPACE_A, 1, 2)).stored_bytes == 2 * BLOCK_BYTES

    def test_a_directory_that_was_removed_is_made_anew_and_what_it_held_forgotten(
        self, driver: FileDriver, directory: Path
    ) -> None:
        driver.store([block()])
        os.rename(directory, directory.with_name("elsewhere"))
        driver.tier._housekeeper.wake()
        driver.until(lambda: driver.tier.state().breaker != "closed")
        assert driver.lookup([block()]) == [0]
        directory.mkdir()
        driver.until_ready()
        assert driver.store([block()]).stored_bytes == BLOCK_BYTES
        assert len(files_in(directory)) == 1

    def test_a_directory_that_is_not_there_yet_is_waited_for(self, start: Start, tmp_path: Path) -> None:
        driver = start(tmp_path / "late")
        driver.until(lambda: "No such file" in driver.tier.state().detail)
        (tmp_path / "late").mkdir()
        driver.until_ready()
