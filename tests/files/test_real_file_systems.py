"""File systems of this test's own, on loop devices: full, read-only, frozen, slow, without power."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstrata_sidecar.adapter.tier.buffers import address_of
from tests.files.file_driver import (
    BLOCK_BYTES,
    DEADLINE_MS,
    FileDriver,
    aligned,
    block,
    blocks,
    files_in,
    on_disk_bytes,
)
from tests.files.file_systems import FileSystem, mounted, run, slow_group
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn

Start = Callable[..., FileDriver]
BYTES_PER_S = 8 * 1024


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[FileSystem]:
    with mounted(tmp_path) as file_system:
        yield file_system


@pytest.fixture
def driver(start: Start, gate: GateStandIn, file_system: FileSystem) -> FileDriver:
    driver = start(file_system.path, guarded=lambda: True)
    driver.until_ready()
    gate.allow(KEYSPACE_A)
    return driver


def test_blocks_go_past_the_page_cache(driver: FileDriver, file_system: FileSystem) -> None:
    assert driver.tier._files.disk.direct
    driver.store_content(blocks(KEYSPACE_A, 1, 2))
    assert driver.load_content(blocks(KEYSPACE_A, 1, 2)) == [1, 1]


def test_a_disk_that_others_fill_gives_what_it_has_and_recovers(driver: FileDriver, file_system: FileSystem) -> None:
    driver.store_content(blocks(KEYSPACE_A, 1, 2))
    free_bytes = shutil.disk_usage(file_system.path).free
    with open(file_system.path / "others", "wb") as others:
        os.posix_fallocate(others.fileno(), 0, free_bytes - (1 << 20))
    driver.tier._housekeeper.wake()
    for number in range(10, 80):
        driver.store_content([block(number=number)])
    assert driver.tier.state().breaker == "closed"
    assert [1] in [driver.load_content([one]) for one in blocks(KEYSPACE_A, 1, 2, *range(10, 80))]
    driver.until(lambda: driver.tier.state().full or driver.tier.state().floor_reached)
    # What is used least makes room, as at any other limit.
    driver.until(lambda: driver.store_content([block(number=80)]).stored_bytes > 0)
    driver.until(lambda: driver.store_content([block(number=81)]).stored_bytes > 0)
    assert 1 in driver.load_content(blocks(KEYSPACE_A, 80, 81))
    driver.until(lambda: driver.tier.state().used_bytes == on_disk_bytes(file_system.path))
    (file_system.path / "others").unlink()
    driver.until(lambda: not driver.tier.state().floor_reached)
    last = [block(number=99)]
    driver.until(lambda: driver.store_content(last).stored_bytes > 0 or driver.lookup(last) == [1])
    assert driver.load_content(last) == [1]


def test_a_file_system_that_turns_read_only_is_read(driver: FileDriver, file_system: FileSystem) -> None:
    driver.store_content([block()])
    os.sync()
    run("mount", "-o", "remount,ro", str(file_system.path))
    driver.store_content([block(number=2)])
    assert driver.tier.state().read_only
    assert driver.load_content(blocks(KEYSPACE_A, 1, 2)) == [1, 0]
    assert driver.refused("read_only") == 1


def test_a_read_only_file_system_is_recovered_from(
    start: Start, gate: GateStandIn, driver: FileDriver, file_system: FileSystem
) -> None:
    driver.store_content([block()])
    driver.close()
    run("mount", "-o", "remount,ro", str(file_system.path))
    again = start(file_system.path)
    gate.allow(KEYSPACE_A)
    again.until(lambda: again.lookup([block()]) == [1])
    assert again.load_content([block()]) == [1]


def test_a_frozen_file_system_costs_misses_and_no_time(driver: FileDriver, file_system: FileSystem) -> None:
    driver.store_content([block()])
    run("fsfreeze", "-f", str(file_system.path))
    try:
        task = driver.tier.store([block(number=2)], [aligned(BLOCK_BYTES)])
        driver.until(lambda: driver.runtime.enforcement.under_way([KEYSPACE_A]) == 1)
        driver.outlast_deadlines()
        driver.wait(task)
        assert driver.tier.pop_stores()[task].stored_bytes == 0
        driver.until(lambda: driver.tier.state().breaker != "closed")
        begun_s = time.monotonic()
        assert driver.lookup([block()]) == [0]
        driver.store([block(number=3)])
        assert time.monotonic() - begun_s < DEADLINE_MS / 3000, "no call waits for a disk that hangs"
    finally:
        run("fsfreeze", "-u", str(file_system.path))
    driver.until_ready()
    driver.until(lambda: driver.load_content([block()]) == [1])
    driver.until(lambda: len(files_in(file_system.path)) == 1)


def test_what_a_slow_disk_reads_late_ends_up_in_nobodys_memory(driver: FileDriver, file_system: FileSystem) -> None:
    driver.store([block()], fill=7)
    with slow_group(file_system.device(), BYTES_PER_S) as group:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        _is_read_late(driver)


def _is_read_late(driver: FileDriver) -> None:
    view = aligned(BLOCK_BYTES)
    address = address_of(view)
    assert address is not None
    spans = driver.runtime.spans
    task = driver.tier.load([block()], [view])
    driver.until(lambda: bool(spans._held))
    driver.outlast_deadlines()
    driver.wait(task)
    assert driver.tier.pop_found(task) == b"\0"
    assert spans.touches(address, BLOCK_BYTES), "65 kB at 8 kB/s take longer"
    assert bytes(view) == bytes(BLOCK_BYTES)
    driver.until(lambda: not spans._held)
    assert bytes(view) == bytes([7]) * BLOCK_BYTES, "so the memory had to be kept back until now"


def test_after_a_loss_of_power_each_block_is_right_or_a_miss(
    start: Start, gate: GateStandIn, driver: FileDriver, file_system: FileSystem
) -> None:
    for number in range(1, 120):
        driver.store_content([block(number=number)])
        if number == 60:
            os.sync()
    driver.close()
    file_system.lose_power()
    again = start(file_system.path)
    again.until_ready()
    gate.allow(KEYSPACE_A)
    hits = 0
    for number in range(1, 120):
        hits += sum(again.load_content([block(number=number)]))
    assert hits >= 60
    again.until(lambda: again.tier.state().used_bytes == on_disk_bytes(file_system.path))


def test_another_file_system_in_the_directorys_place_is_used_from_then_on(
    driver: FileDriver, file_system: FileSystem
) -> None:
    driver.store([block()])
    run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(file_system.path))
    try:
        driver.tier._housekeeper.wake()
        driver.until(lambda: driver.lookup([block()]) == [0])
        driver.until_ready()
        assert driver.store_content([block(number=2)]).stored_bytes == BLOCK_BYTES
        assert driver.load_content([block(number=2)]) == [1]
    finally:
        driver.close()
        driver.until(lambda: subprocess.run(("umount", str(file_system.path)), check=False).returncode == 0)


def test_no_inodes_left_is_a_full_disk(start: Start, gate: GateStandIn, file_system: FileSystem) -> None:
    driver = start(file_system.path)
    driver.until_ready()
    gate.allow(KEYSPACE_A)
    (file_system.path / "many").mkdir()
    with suppress(OSError):
        for number in range(100_000):
            os.close(os.open(file_system.path / "many" / str(number), os.O_CREAT | os.O_WRONLY))
    assert driver.store([block()]).stored_bytes == 0
    assert driver.tier.state().full
    assert driver.tier.state().used_bytes == 0
