"""A tier of files tells what was used last in it, and being loaded to warm a memory up is no use."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.store.block_file import key_of, parts_of
from tests.files.file_driver import RANK, FileDriver, blocks
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, KEYSPACE_UNKNOWN, RESOLVED, GateStandIn


def told(driver: FileDriver, *keyspaces: str) -> list[int]:
    """Return the numbers of what the tier names, the hottest first."""
    hot = driver.tier.hottest(keyspaces)
    assert hot is not None
    assert all((one.rank, one.group) == (RANK, 0) and 0 <= one.age_s < 60 for one in hot)
    return [
        int.from_bytes(one.chunk_hash[:4], "big") for one in sorted(hot, key=lambda one: one.last_use, reverse=True)
    ]


def test_what_was_used_last_is_told_as_the_hottest_and_a_warm_up_is_no_use(gate: GateStandIn, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    driver = FileDriver(gate, tmp_path / "disk")
    try:
        assert driver.tier.hottest([KEYSPACE_A]) is None or not driver.tier.state().recovering
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        driver.until_ready()
        for one in (*blocks(KEYSPACE_A, 1, 2, 3), *blocks(KEYSPACE_B, 4)):
            driver.store([one])
        assert told(driver, KEYSPACE_A, KEYSPACE_B) == [4, 3, 2, 1]
        assert told(driver, KEYSPACE_A) == [3, 2, 1]
        assert told(driver, KEYSPACE_UNKNOWN) == []
        driver.lookup(blocks(KEYSPACE_A, 1))
        assert told(driver, KEYSPACE_A) == [1, 3, 2]
        warmed = blocks(KEYSPACE_A, 2)
        driver.runtime.enforcement.warmed = frozenset(one.key for one in warmed)
        assert driver.lookup(warmed) == [1]
        assert driver.load(warmed)[0] == [1]
        assert told(driver, KEYSPACE_A) == [1, 3, 2]
        driver.runtime.enforcement.warmed = frozenset()
        driver.lookup(warmed)
        assert told(driver, KEYSPACE_A) == [2, 1, 3]
        driver.lookup(blocks(KEYSPACE_A, 1, 2, 3))
        assert told(driver, KEYSPACE_A) == [1, 2, 3], "a prompt's end goes first"
        gate.allow(KEYSPACE_B)
        assert told(driver, KEYSPACE_A, KEYSPACE_B) == [4]
    finally:
        driver.close()


@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.binary(min_size=1, max_size=40))
def test_a_key_is_read_as_it_was_made(rank: int, group: int, chunk_hash: bytes) -> None:
    assert parts_of(key_of(KEYSPACE_A, RESOLVED, rank, group, chunk_hash)) == (RESOLVED, rank, group, chunk_hash)
