"""A directory with files of different fingerprints, and of an earlier version, which had none in its names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata_sidecar.adapter.files.housekeeping import FORMER_LIFE_S
from tests.files.file_driver import FILE_BYTES, FileDriver, block, blocks, files_in, purge
from tests.support.earlier import EarlierPod
from tests.tiers.gate_stand_in import FINGERPRINT, KEYSPACE_A, GateStandIn

Start = Callable[..., FileDriver]
OTHER_FINGERPRINT = "9" * 16


@pytest.fixture
def mixed(start: Start, gate: GateStandIn, directory: Path, tmp_path: Path) -> Path:
    """A directory with blocks 1 and 2 of this fingerprint, 1 of another, and 1 and 3 of the earlier version."""
    earlier = EarlierPod(directory, tmp_path / "earlier")
    assert earlier.ask("store", numbers=[1, 3], fill=3)
    earlier.close()
    driver = start(directory)
    driver.until_ready()
    gate.allow(KEYSPACE_A)
    driver.store(blocks(KEYSPACE_A, 1, 2), fill=1)
    driver.store([block(KEYSPACE_A)._replace(fingerprint=OTHER_FINGERPRINT)], fill=2)
    driver.close()
    return directory


def test_files_without_a_fingerprint_are_misses_and_counted(start: Start, gate: GateStandIn, mixed: Path) -> None:
    driver = start(mixed)
    driver.until_ready()
    gate.allow(KEYSPACE_A)
    assert driver.lookup(blocks(KEYSPACE_A, 1, 2, 3)) == [1, 1, 0]
    hits, (view,) = driver.load([block(KEYSPACE_A)])
    assert (hits, view[0]) == ([1], 1)
    assert driver.lookup([block(KEYSPACE_A)._replace(fingerprint=OTHER_FINGERPRINT)]) == [1]
    assert [row.used_bytes for row in driver.tier.usage()] == [5 * FILE_BYTES]


def test_an_erasure_removes_the_files_of_all_fingerprints_and_of_none(
    start: Start, gate: GateStandIn, mixed: Path
) -> None:
    driver = start(mixed)
    driver.until_ready()
    gate.allow(KEYSPACE_A)
    gate.allow()
    assert purge(driver.tier._eraser, [KEYSPACE_A], 30.0) is not None
    assert files_in(mixed) == []


def test_after_a_day_the_files_of_other_fingerprints_go_once_the_engine_has_reported_its_own(
    start: Start, gate: GateStandIn, mixed: Path
) -> None:
    driver = start(mixed)
    driver.until_ready()
    gate.allow(KEYSPACE_A)
    driver.let_pass(FORMER_LIFE_S + 1)
    driver.tier.policy_changed()
    driver.until(lambda: len(files_in(mixed)) == 3)
    assert driver.lookup(blocks(KEYSPACE_A, 1, 2)) == [1, 1]
    driver.runtime.enforcement.fingerprints = lambda: [FINGERPRINT]
    driver.tier.policy_changed()
    driver.until(lambda: len(files_in(mixed)) == 2)
    assert driver.lookup(blocks(KEYSPACE_A, 1, 2)) == [1, 1]


def test_the_earlier_version_finds_none_of_its_own_in_a_directory_of_this_one_and_stores(
    start: Start, gate: GateStandIn, directory: Path, tmp_path: Path
) -> None:
    driver = start(directory)
    driver.until_ready()
    gate.allow(KEYSPACE_A)
    driver.store(blocks(KEYSPACE_A, 1, 2))
    driver.close()
    earlier = EarlierPod(directory, tmp_path / "earlier")
    assert earlier.ask("lookup", numbers=[1, 2]) == [0, 0]
    assert earlier.ask("state") == ["closed", 0, 2], (
        "a directory has one owner, which removes files that it cannot read"
    )
    assert earlier.ask("store", numbers=[1], fill=5)
    assert earlier.ask("load", numbers=[1, 2]) == [5, -1]
    assert earlier.ask("usage") == [FILE_BYTES]
    earlier.close()
    driver = start(directory)
    driver.until_ready()
    gate.allow(KEYSPACE_A)
    assert driver.lookup(blocks(KEYSPACE_A, 1, 2)) == [0, 0]
    assert [row.used_bytes for row in driver.tier.usage()] == [FILE_BYTES]


def test_the_earlier_version_erases_a_directory_that_it_takes_over(
    start: Start, gate: GateStandIn, directory: Path, tmp_path: Path
) -> None:
    driver = start(directory)
    driver.until_ready()
    gate.allow(KEYSPACE_A)
    driver.store(blocks(KEYSPACE_A, 1, 2))
    driver.close()
    earlier = EarlierPod(directory, tmp_path / "earlier")
    earlier.ask("store", numbers=[3])
    assert earlier.ask("erase") == [1, 0]
    assert files_in(directory) == []
    earlier.close()
