"""A tier of encrypted files: what the disk holds, and what becomes of it when keys come and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.files.file_driver import BLOCK_BYTES, FileDriver, block, blocks, file_of, files_in, purge
from tests.tiers.data_keys import FIRST, OTHER, SECOND
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.keyed_gate import KeyedGate

Start = Callable[..., FileDriver]


@pytest.fixture
def keyed(gate: GateStandIn) -> KeyedGate:
    return KeyedGate(gate)


@pytest.fixture
def driver(start: Start, keyed: KeyedGate) -> FileDriver:
    driver = start(encryption="Required")
    driver.until_ready()
    keyed.allow({KEYSPACE_A: (FIRST,), KEYSPACE_B: (OTHER,)})
    return driver


def test_the_disk_holds_ciphertext_only(driver: FileDriver, directory: Path) -> None:
    driver.store([block()], fill=ord("S"))
    assert b"SSSSSSSS" not in file_of(directory, block(), encrypted=True).read_bytes()
    hits, views = driver.load([block()])
    assert hits == [1]
    assert bytes(views[0]) == b"S" * BLOCK_BYTES


def test_a_keyspace_without_a_key_reaches_no_file(driver: FileDriver, keyed: KeyedGate, directory: Path) -> None:
    keyed.allow({KEYSPACE_A: (), KEYSPACE_B: (OTHER,)})
    driver.store([block()])
    assert files_in(directory) == []
    assert driver.refused("no_key") == 1
    assert driver.tier.state().keyless == 1


def test_blocks_are_read_with_the_key_that_sealed_them_while_it_is_held(driver: FileDriver, keyed: KeyedGate) -> None:
    driver.store([block()])
    keyed.allow({KEYSPACE_A: (SECOND, FIRST), KEYSPACE_B: (OTHER,)})
    assert driver.load([block()])[0] == [1]
    keyed.allow({KEYSPACE_A: (SECOND,), KEYSPACE_B: (OTHER,)})
    assert driver.load([block()])[0] == [0]


def test_blocks_outlive_the_process(start: Start, driver: FileDriver, keyed: KeyedGate) -> None:
    driver.store(blocks(KEYSPACE_A, 1, 2), fill=4)
    driver.close()
    again = start(encryption="Required")
    again.until_ready()
    keyed.allow({KEYSPACE_A: (FIRST,)})
    hits, views = again.load(blocks(KEYSPACE_A, 1, 2))
    assert hits == [1, 1]
    assert bytes(views[1]) == bytes([4]) * BLOCK_BYTES


def test_plain_files_of_a_deleted_tier_go_before_anything_is_said_to_be_encrypted(
    start: Start, gate: GateStandIn, keyed: KeyedGate, directory: Path
) -> None:
    plain = start()
    plain.until_ready()
    gate.allow(KEYSPACE_A)
    plain.store(blocks(KEYSPACE_A, 1, 2))
    plain.close()
    driver = start(encryption="Required")
    keyed.allow({KEYSPACE_A: (FIRST,)})
    driver.until_ready()
    assert files_in(directory) == []
    state = driver.tier.state()
    assert (state.encrypted, state.recovering) == (True, False)


def test_a_purge_of_ciphertext_leaves_no_readable_residue(driver: FileDriver, directory: Path) -> None:
    driver.store([*blocks(KEYSPACE_A, 1, 2), block(KEYSPACE_B, 1)])
    purged = purge(driver.tier._eraser, [KEYSPACE_A])
    assert purged is not None
    assert (purged.gone.blocks, purged.residue) == (2, "")
    assert files_in(directory) == [file_of(directory, block(KEYSPACE_B, 1), encrypted=True)]
