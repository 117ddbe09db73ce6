"""Whoever writes what into a tier of files: readers of a pool get the pool's bytes or none.

The same on shared servers is in tests/tiers/test_pool_poison.py, in memory in tests/adapter/test_memory_loans.py.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.policy.pools import PoolVersion, pack_hashes
from tests.files import file_driver
from tests.files.file_driver import BLOCK_BYTES, FileDriver, aligned, blocks, file_of, files_in
from tests.tiers.data_keys import FIRST, OTHER
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.pool_gate import POOL, PoolGate, content, reader, reader_space

Start = Callable[..., FileDriver]

NUMBERS = (1, 2, 3)
RIGHT, WRONG = 7, 8
READER, WRITER, OUTSIDER = 1, 2, 3
"""Who reads the pool and stores nothing, who may read it and stores the same tokens, and who may not read it."""

EMPTY = 0xEE
"""What is in memory before a block is loaded into it."""


@pytest.fixture(params=["Disabled", "Required"], ids=["plain", "encrypted"])
def encryption(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pools(gate: GateStandIn) -> PoolGate:
    return PoolGate(gate)


class Scene:
    """A tier with a pool, one who reads it and one who does not; each start is another cache server."""

    def __init__(self, start: Start, pools: PoolGate, encryption: str) -> None:
        self._start = start
        self._pools = pools
        self._encryption = encryption
        self.driver = self._begin()

    @property
    def encrypted(self) -> bool:
        return self._encryption == "Required"

    @property
    def version(self) -> PoolVersion:
        hashes = pack_hashes(one.chunk_hash for one in blocks(POOL, *NUMBERS))
        return replace(content(POOL, (1,), keys=self._keys(FIRST)), hashes=hashes, tiers=("disk",))

    def start_anew(self) -> None:
        self.driver.close()
        self.driver = self._begin()

    def file(self, keyspace: str, number: int) -> Path:
        return file_of(self.driver.directory, blocks(keyspace, number)[0], encrypted=self.encrypted)

    def read(self, *numbers: int) -> list[int | None]:
        """What the pool's reader gets of each chunk, None for a miss, whose memory has to be left without a byte."""
        wanted = blocks(reader_space(READER), *numbers)
        hits, views = self.driver.load(wanted)
        assert all(len(set(view)) == 1 for view in views)
        assert all(hit or view[0] in (0, EMPTY) for hit, view in zip(hits, views, strict=True))
        return [view[0] if hit else None for hit, view in zip(hits, views, strict=True)]

    def _begin(self) -> FileDriver:
        driver = self._start(encryption=self._encryption)
        self._pools.publish(
            [self._tenant(READER, "docs"), self._tenant(WRITER, "docs"), self._tenant(OUTSIDER)],
            docs=(self.version,),
        )
        driver.until_ready()
        return driver

    def _tenant(self, number: int, *names: str) -> Entry:
        return reader(number, *names, keys=self._keys(OTHER))

    def _keys(self, key: DataKey) -> tuple[DataKey, ...]:
        return (key,) if self.encrypted else ()


@pytest.fixture
def scene(start: Start, pools: PoolGate, encryption: str) -> Scene:
    return Scene(start, pools, encryption)


def test_a_pool_outlives_its_cache_server_beside_a_readers_copy_of_other_bytes(scene: Scene) -> None:
    scene.driver.store(blocks(POOL, 1), fill=RIGHT)
    scene.driver.store(blocks(reader_space(OUTSIDER), *NUMBERS), fill=WRONG)
    scene.start_anew()
    assert scene.read(*NUMBERS) == [RIGHT, None, None]
    assert scene.file(reader_space(OUTSIDER), 1).exists(), "it is nobody else's to remove"


@pytest.mark.parametrize("meanwhile", [True, False], ids=["while-it-runs", "before-it-starts"])
def test_a_file_that_somebody_copied_into_a_pools_directory_is_a_miss_and_goes(scene: Scene, meanwhile: bool) -> None:
    scene.driver.store(blocks(reader_space(OUTSIDER), 1), fill=WRONG)
    scene.driver.store(blocks(POOL, *NUMBERS), fill=RIGHT)
    shutil.copy2(scene.file(reader_space(OUTSIDER), 1), scene.file(POOL, 1))
    shutil.copy2(scene.file(POOL, 2), scene.file(POOL, 3))
    if not meanwhile:
        scene.start_anew()
    assert scene.read(*NUMBERS) == [None, RIGHT, None]
    assert not scene.file(POOL, 1).exists()
    scene.driver.store(blocks(POOL, 1, 3), fill=RIGHT)
    assert scene.read(*NUMBERS) == [RIGHT] * 3


def test_what_another_identity_computed_of_the_same_tokens_is_another_block(
    start: Start, pools: PoolGate, encryption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_driver, "IDENTITY", "0" * 16)
    other = Scene(start, pools, encryption)
    other.driver.store(blocks(POOL, 1, 2), fill=WRONG)
    (theirs,) = [path for path in files_in(other.driver.directory) if path.name == other.file(POOL, 2).name]
    monkeypatch.undo()
    other.start_anew()
    assert other.read(1, 2) == [None, None]
    theirs.rename(other.file(POOL, 2))
    other.start_anew()
    assert other.read(1, 2) == [None, None], "nor under this one's name"


def test_nothing_but_the_pools_chunks_is_stored_under_its_keyspace(scene: Scene) -> None:
    scene.driver.store(blocks(POOL, 9), fill=WRONG)
    assert files_in(scene.driver.directory) == []
    assert scene.driver.refused("not_in_pool") == 1


def test_whatever_readers_and_the_warmer_do_at_once_nobody_gets_other_bytes_than_the_pools(scene: Scene) -> None:
    driver, stop = scene.driver, threading.Event()

    def warm() -> None:
        random = Random(1)
        while not stop.is_set():
            driver.tier.store(blocks(POOL, number := random.choice(NUMBERS)), [aligned(BLOCK_BYTES, RIGHT)])
            if random.random() < 0.3:
                driver.tier.delete(blocks(POOL, number))

    def write(space: str) -> None:
        random = Random(space)
        while not stop.is_set():
            driver.tier.store(blocks(space, random.choice(NUMBERS)), [aligned(BLOCK_BYTES, WRONG)])
            stop.wait(0.001)

    writers = [threading.Thread(target=write, args=(reader_space(one),)) for one in (WRITER, OUTSIDER)]
    threads = [threading.Thread(target=warm), *writers]
    for thread in threads:
        thread.start()
    try:
        seen = {one for _ in range(200) for one in scene.read(*NUMBERS)}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert RIGHT in seen
    assert seen <= {RIGHT, None}
