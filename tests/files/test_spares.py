"""Files of blocks that made room are written over, and go soon where nobody does that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.store.block_file import ROOT
from kvstrata_sidecar.adapter.files import disk, housekeeping
from tests.files.file_driver import (
    BLOCK_BYTES,
    FILE_BYTES,
    FileDriver,
    block,
    blocks,
    file_of,
    files_in,
    on_disk_bytes,
    purge,
)
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn

Start = Callable[..., FileDriver]


@pytest.fixture
def kept_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "SPARE_S", 3600.0)


def full(start: Start, gate: GateStandIn) -> FileDriver:
    """Return a tier with room for four blocks, all of which are there."""
    driver = start(capacity_bytes=4 * FILE_BYTES)
    driver.until_ready()
    gate.allow(KEYSPACE_A, KEYSPACE_B)
    driver.store(blocks(KEYSPACE_A, 1, 2, 3, 4))
    return driver


def spares_in(directory: Path) -> list[Path]:
    return [path for path in (directory / ROOT).iterdir() if path.is_file()]


@pytest.mark.usefixtures("kept_long")
def test_a_full_tier_writes_new_blocks_over_files_of_old_ones(start: Start, gate: GateStandIn, directory: Path) -> None:
    driver = full(start, gate)
    inodes = {path.stat().st_ino for path in files_in(directory)}
    for number in range(5, 25):
        driver.store([block(KEYSPACE_B, number)], fill=number)
        assert on_disk_bytes(directory) <= 4 * FILE_BYTES
        assert driver.tier.state().used_bytes == on_disk_bytes(directory)
        hits, views = driver.load([block(KEYSPACE_B, number)])
        assert hits == [1]
        assert bytes(views[0]) == bytes([number]) * BLOCK_BYTES
    assert {path.stat().st_ino for path in files_in(directory)} <= inodes, "no file was made"


def test_a_spare_that_nobody_writes_over_goes_within_seconds(start: Start, gate: GateStandIn, directory: Path) -> None:
    driver = full(start, gate)
    driver.store([block(KEYSPACE_B, 5)])
    driver.until(lambda: not spares_in(directory))
    driver.until(lambda: driver.tier.state().used_bytes == on_disk_bytes(directory))
    assert driver.lookup([block(KEYSPACE_B, 5)]) == [1]


@pytest.mark.usefixtures("kept_long")
def test_spares_of_another_size_make_room_at_once(start: Start, gate: GateStandIn, directory: Path) -> None:
    driver = full(start, gate)
    driver.store([block(KEYSPACE_B, 5)])
    assert spares_in(directory), "room is made for a little more than one block"
    for number in (6, 7, 8):
        driver.store([block(KEYSPACE_B, number)], size=2 * BLOCK_BYTES)
        assert driver.lookup([block(KEYSPACE_B, number)]) == [1]
        assert on_disk_bytes(directory) <= 4 * FILE_BYTES


@pytest.mark.usefixtures("kept_long")
def test_a_purge_overwrites_spares_and_removes_them(
    start: Start, gate: GateStandIn, directory: Path, tmp_path: Path
) -> None:
    driver = full(start, gate)
    driver.store([block(KEYSPACE_B, 5)])
    (spare,) = spares_in(directory)
    os.link(spare, tmp_path / "witness")
    assert purge(driver.tier._eraser, [KEYSPACE_A]) is not None
    assert spares_in(directory) == []
    assert (tmp_path / "witness").read_bytes() == bytes(FILE_BYTES)
    assert driver.tier.state().used_bytes == on_disk_bytes(directory) == FILE_BYTES


@pytest.mark.usefixtures("kept_long")
def test_a_tier_that_ends_or_starts_leaves_no_spare(start: Start, gate: GateStandIn, directory: Path) -> None:
    driver = full(start, gate)
    driver.store([block(KEYSPACE_B, 5)])
    assert spares_in(directory)
    driver.close()
    assert spares_in(directory) == []
    (directory / ROOT / ".left").write_bytes(b"by a process that was killed")
    again = start(capacity_bytes=4 * FILE_BYTES)
    again.until_ready()
    assert spares_in(directory) == []


@pytest.mark.usefixtures("kept_long")
def test_a_store_that_fails_leaves_neither_spare_nor_account(
    start: Start, gate: GateStandIn, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = full(start, gate)

    def refuse(*_: object) -> None:
        raise OSError(5, "the disk has it not")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "transfer", refuse)
        driver.store([block(KEYSPACE_B, 5)])
    assert driver.lookup([block(KEYSPACE_B, 5)]) == [0]
    assert driver.tier.state().used_bytes == on_disk_bytes(directory)
    driver.store([block(KEYSPACE_B, 6)])
    assert driver.lookup([block(KEYSPACE_B, 6)]) == [1]


@pytest.mark.usefixtures("kept_long")
def test_a_spare_that_somebody_removed_is_no_loss(start: Start, gate: GateStandIn, directory: Path) -> None:
    driver = full(start, gate)
    driver.store([block(KEYSPACE_B, 5)])
    for spare in spares_in(directory):
        spare.unlink()
    driver.store([block(KEYSPACE_B, 6)])
    assert driver.lookup([block(KEYSPACE_B, 6)]) == [1]
    assert file_of(directory, block(KEYSPACE_B, 6)).stat().st_size == FILE_BYTES


def test_what_is_too_old_becomes_no_spare(start: Start, gate: GateStandIn, directory: Path) -> None:
    driver = start(capacity_bytes=4 * FILE_BYTES)
    driver.until_ready()
    gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("disk", retention_s=1),))
    driver.store(blocks(KEYSPACE_A, 1, 2, 3))
    driver.until(lambda: not any(path.parent.name == KEYSPACE_A for path in files_in(directory)))
    assert spares_in(directory) == []
