"""Readers of a pool on a tier of files: one file for all of them, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.policy.pools import PoolVersion, pack_hashes
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.files.file_driver import BLOCK_BYTES, FileDriver, blocks, file_of, files_in
from tests.tiers.data_keys import FIRST, OTHER
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.pool_gate import POOL, PoolGate, content, reader, reader_space

NUMBERS = (1, 2, 3)
READERS = range(1, 9)


@pytest.fixture
def gate(tmp_path: Path) -> GateStandIn:
    return GateStandIn(tmp_path)


@pytest.fixture
def pools(gate: GateStandIn) -> PoolGate:
    return PoolGate(gate)


@pytest.fixture
def start(gate: GateStandIn, pools: PoolGate, tmp_path: Path) -> Iterator[Callable[..., FileDriver]]:
    started: list[FileDriver] = []

    def start(**options: Any) -> FileDriver:
        directory = tmp_path / "files"
        directory.mkdir()
        started.append(FileDriver(gate, directory, **options))
        pools.publish([])
        started[0].until_ready()
        return started[0]

    yield start
    for driver in started:
        driver.close()


def docs(*, warming: bool = False, tiers: tuple[str, ...] = ("disk",), keys: tuple[DataKey, ...] = ()) -> PoolVersion:
    hashes = pack_hashes(one.chunk_hash for one in blocks(POOL, *NUMBERS))
    return replace(content(POOL, (1,), warming=warming, keys=keys), hashes=hashes, tiers=tiers)


def scoped(driver: FileDriver, number: int) -> dict[str, int]:
    return dict(driver.tier.counts.by_scope().get(reader_space(number)[:12], {}))


def filled_with(driver: FileDriver, keyspace: str, *numbers: int) -> list[int | None]:
    """What each block that is loaded is filled with, None for a miss."""
    hits, views = driver.load(blocks(keyspace, *numbers))
    for hit, view in zip(hits, views, strict=True):
        assert len(set(view)) == 1
        assert hit or view[0] == 0xEE
    return [view[0] if hit else None for hit, view in zip(hits, views, strict=True)]


@pytest.mark.parametrize("encryption", ["Disabled", "Required"])
def test_readers_share_one_file_of_each_chunk(
    start: Callable[..., FileDriver], pools: PoolGate, encryption: str
) -> None:
    driver = start(encryption=encryption)
    keys = (FIRST,) if encryption == "Required" else ()
    own = (OTHER,) if keys else ()
    pools.publish([reader(n, "docs", keys=own) for n in READERS] + [reader(20, keys=own)], docs=(docs(keys=keys),))
    assert driver.store(blocks(POOL, *NUMBERS), fill=7) == StoreOutcome(True, 3 * BLOCK_BYTES)
    for number in READERS:
        prompt = blocks(reader_space(number), *NUMBERS, 9)
        assert driver.lookup(prompt) == [1, 1, 1, 0]
        assert filled_with(driver, reader_space(number), *NUMBERS) == [7, 7, 7]
        assert driver.store(prompt[:3], fill=9) == StoreOutcome(True, 0)
        assert driver.tier.holds(reader_space(number), prompt[0])
        counts = scoped(driver, number)
        assert (counts["pool_hits"], counts["pool_bytes"], counts["stores_in_pool"]) == (3, 3 * BLOCK_BYTES, 3)
    assert driver.lookup(blocks(reader_space(20), *NUMBERS)) == [0, 0, 0]
    assert filled_with(driver, reader_space(20), *NUMBERS) == [None] * 3
    assert not driver.tier.holds(reader_space(20), blocks(reader_space(20), 1)[0])
    encrypted = encryption == "Required"
    assert files_in(driver.directory) == sorted(
        file_of(driver.directory, one, encrypted=encrypted) for one in blocks(POOL, *NUMBERS)
    )


def test_copies_of_before_go_and_what_the_pool_lacks_is_the_readers_own(
    start: Callable[..., FileDriver], pools: PoolGate
) -> None:
    driver = start()
    pools.publish([reader(1)], docs=(docs(),))
    driver.store(blocks(POOL, 1), fill=7)
    driver.store(blocks(reader_space(1), 1, 2, 9), fill=8)
    pools.publish([reader(1, "docs")], docs=(docs(),))
    assert driver.lookup(blocks(reader_space(1), 1, 2, 9)) == [1, 1, 1]
    driver.until(lambda: scoped(driver, 1).get("copies_discarded") == 1)
    kept = [*blocks(POOL, 1), *blocks(reader_space(1), 2, 9)]
    assert files_in(driver.directory) == sorted(file_of(driver.directory, one) for one in kept)
    assert filled_with(driver, reader_space(1), 1, 2, 9) == [7, 8, 8]


@pytest.mark.parametrize(("warming", "tiers"), [(True, ("disk",)), (False, ("shared",))], ids=["warming", "elsewhere"])
def test_a_pool_that_is_warming_or_kept_in_another_tier_is_read_by_nobody(
    start: Callable[..., FileDriver], pools: PoolGate, warming: bool, tiers: tuple[str, ...]
) -> None:
    driver = start()
    pools.publish([reader(1, "docs")], docs=(docs(),))
    driver.store(blocks(POOL, *NUMBERS), fill=7)
    pools.publish([reader(1, "docs")], docs=(docs(warming=warming, tiers=tiers),))
    assert driver.lookup(blocks(reader_space(1), *NUMBERS)) == [0, 0, 0]
    assert driver.store(blocks(reader_space(1), 1)) == StoreOutcome(True, BLOCK_BYTES)


def test_under_a_pools_keyspace_only_its_own_chunks_are_written(
    start: Callable[..., FileDriver], pools: PoolGate
) -> None:
    driver = start()
    pools.publish([reader(1, "docs")], docs=(docs(),))
    assert driver.store(blocks(POOL, 9)) == StoreOutcome(True, 0)
    assert driver.refused("not_in_pool") == 1
    assert files_in(driver.directory) == []


def test_a_reader_that_left_while_its_load_waited_gets_nothing(
    start: Callable[..., FileDriver], pools: PoolGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start()
    pools.publish([reader(1, "docs")], docs=(docs(),))
    driver.store(blocks(POOL, 1), fill=7)
    finder = driver.tier._places  # as if the policy changed between the decision and the worker
    decide = finder.to_read

    def late(wanted: list) -> object:  # type: ignore[type-arg]
        decided = decide(wanted)
        pools.publish([reader(1)], docs=(docs(),))
        return decided

    monkeypatch.setattr(finder, "to_read", late)
    assert filled_with(driver, reader_space(1), 1) == [None]
    assert driver.refused("not_a_reader") == 1
