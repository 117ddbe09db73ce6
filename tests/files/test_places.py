"""A folder that pods of a node share: each has a place, successors inherit, and what nobody has is emptied in time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.contract.messages.erase import Amount, Check, ErasedTier
from kvstrata.contract.store.block_file import ROOT
from kvstrata_sidecar.adapter.files.directories import MOST_PLACES, Folder, PlacedDisk, Reaper
from kvstrata_sidecar.adapter.files.disk import Disk
from kvstrata_sidecar.adapter.files.health import DiskError
from kvstrata_sidecar.adapter.files.housekeeping import FORMER_LIFE_S, TURN_S
from tests.files.file_driver import FILE_BYTES, FileDriver, block, blocks, file_of, files_in
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn

Start = Callable[..., FileDriver]
OTHER_IDENTITY = "0" * 16


@pytest.fixture
def folder(directory: Path) -> Folder:
    return Folder(directory, DOMAIN, "disk", "chat")


def taken(folder: Folder, model: str = "chat") -> PlacedDisk:
    disk = PlacedDisk(Folder(folder.path, folder.domain, folder.tier, model))
    disk.open()
    return disk


class TestTakingAPlace:
    def test_each_has_one_for_itself_and_the_next_gets_the_first_that_is_free(self, folder: Folder) -> None:
        disks = [taken(folder) for _ in range(3)]
        assert [disk.path for disk in disks] == [folder.place(number) for number in range(3)]
        disks[1].close()
        assert taken(folder).path == folder.place(1)
        assert taken(folder, "other").path == folder.of_tier / "other" / "0"

    def test_when_all_are_taken_the_next_one_waits_and_says_so(self, folder: Folder) -> None:
        held = []
        for number in range(MOST_PLACES):
            path = folder.place(number) / ROOT
            path.mkdir(parents=True)
            held.append(os.open(path, os.O_RDONLY))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        with pytest.raises(DiskError, match="64 cache servers"):
            taken(folder)
        os.close(held.pop())
        assert taken(folder).path == folder.place(MOST_PLACES - 1)
        for descriptor in held:
            os.close(descriptor)

    def test_a_folder_that_is_not_there_is_not_made(self, folder: Folder, tmp_path: Path) -> None:
        with pytest.raises(DiskError, match="No such file"):
            taken(Folder(tmp_path / "disks", DOMAIN, "disk", "chat"))
        assert not (tmp_path / "disks").exists()

    def test_the_next_pod_on_a_node_finds_its_predecessors_blocks(
        self, start: Start, gate: GateStandIn, folder: Folder
    ) -> None:
        first = start(folder.path, place="chat")
        first.until_ready()
        gate.allow(KEYSPACE_A)
        first.store(blocks(KEYSPACE_A, 1, 2))
        first.close()
        second = start(folder.path, place="chat")
        second.until_ready()
        gate.allow(KEYSPACE_A)
        assert second.load(blocks(KEYSPACE_A, 1, 2))[0] == [1, 1]
        assert files_in(folder.place(0)) == [file_of(folder.place(0), block(number=number)) for number in (1, 2)]

    def test_what_another_model_computed_there_is_kept_for_a_day_for_a_rollback_and_goes_then(
        self, start: Start, gate: GateStandIn, folder: Folder
    ) -> None:
        first = start(folder.path, place="chat")
        first.until_ready()
        gate.allow(KEYSPACE_A)
        first.store(blocks(KEYSPACE_A, 1, 2))
        first.close()
        second = start(folder.path, place="chat", identity=OTHER_IDENTITY)
        second.until_ready()
        gate.allow(KEYSPACE_A)
        second.store(blocks(KEYSPACE_A, 1, 3))
        assert second.lookup(blocks(KEYSPACE_A, 1, 2, 3)) == [1, 0, 1], "nothing of the former is found"
        second.let_pass(FORMER_LIFE_S - 60)
        second.tier.policy_changed()
        time.sleep(1.5 * TURN_S)
        assert len(files_in(folder.place(0))) == 4
        second.let_pass(61)
        second.until(lambda: len(files_in(folder.place(0))) == 2)
        assert {path.name[:16] for path in files_in(folder.place(0))} == {OTHER_IDENTITY}
        assert second.tier.counters()["former_removed"] == 2
        assert second.lookup(blocks(KEYSPACE_A, 1, 2, 3)) == [1, 0, 1]
        assert [row.used_bytes for row in second.tier.usage()] == [2 * FILE_BYTES], "their room is given back"


class TestReaping:
    def left_behind(self, folder: Folder, model: str, age_s: float, keyspace: str = KEYSPACE_A) -> Path:
        """Leave a file in a place that nobody has."""
        path = file_of(folder.of_tier / model / "0", block(keyspace))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(4096))
        moment_s = time.time() - age_s
        os.utime(path, (moment_s, moment_s))
        return path

    def test_what_is_too_old_goes_in_places_that_nobody_has_of_any_model(self, folder: Folder) -> None:
        reaper = Reaper(folder, {KEYSPACE_A: 100.0}.get, unknown_s=1000.0)
        old, young = self.left_behind(folder, "gone", 150), self.left_behind(folder, "chat", 50)
        unknown = self.left_behind(folder, "gone", 150, KEYSPACE_B)
        forgotten = self.left_behind(folder, "other", 1500, KEYSPACE_B)
        unfinished = young.with_name(f".{young.name}.abcd")
        unfinished.write_bytes(b"")
        assert reaper.reap() == 3
        assert [path.exists() for path in (old, young, unknown, forgotten, unfinished)] == [0, 1, 1, 0, 0]
        assert not old.parent.exists()

    def test_a_place_that_somebody_has_is_left_alone_however_old_its_blocks(self, folder: Folder) -> None:
        path = self.left_behind(folder, "chat", 10**6)
        disk = taken(folder)
        assert Reaper(folder, lambda _: 1.0).reap() == 0
        assert path.exists()
        disk.close()
        assert Reaper(folder, lambda _: 1.0).reap() == 1

    def test_a_place_that_cannot_be_looked_through_hides_no_other(self, folder: Folder) -> None:
        broken = folder.of_tier / "broken" / "0" / ROOT
        broken.parent.mkdir(parents=True)
        broken.write_bytes(b"")
        files = [self.left_behind(folder, model, 10**6) for model in ("above", "chat")]
        full = file_of(folder.of_tier / "below" / "0", block())
        full.mkdir(parents=True)
        os.utime(full, (0, 0))
        assert Reaper(folder, lambda _: 1.0).reap() == 2
        assert not any(path.exists() for path in files)

    def test_other_tiers_and_other_domains_are_not_looked_at(self, folder: Folder) -> None:
        others = [
            self.left_behind(Folder(folder.path, DOMAIN, "other", "chat"), "chat", 10**6),
            self.left_behind(Folder(folder.path, "e" * 16, "disk", "chat"), "chat", 10**6),
        ]
        assert Reaper(folder, lambda _: 1.0).reap() == 0
        assert all(path.exists() for path in others)


class TestErasing:
    @pytest.fixture
    def driver(self, start: Start, gate: GateStandIn, folder: Folder) -> FileDriver:
        driver = start(folder.path, place="chat")
        driver.until_ready()
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        driver.store(blocks(KEYSPACE_A, 1))
        gate.allow(KEYSPACE_B)
        return driver

    def left_behind(self, place: Path, keyspace: str = KEYSPACE_A) -> Path:
        path = file_of(place, block(keyspace, 2))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x41" * FILE_BYTES)
        return path

    def erased(self, driver: FileDriver) -> ErasedTier:
        found: list[ErasedTier] = []

        def complete() -> bool:
            found.append(driver.tier.erase([KEYSPACE_A], lambda *_: None))
            return found[-1].complete

        driver.until(complete)
        return found[-1]

    def test_files_in_places_that_ended_cache_servers_had_go_with_the_own_ones_overwritten(
        self, driver: FileDriver, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other_model = folder.of_tier / "gone" / "0"
        going = [self.left_behind(folder.place(1)), self.left_behind(other_model)]
        spare = other_model / ROOT / ".0123"
        spare.write_bytes(b"\x41" * FILE_BYTES)
        staying = [
            self.left_behind(folder.place(1), KEYSPACE_B),
            self.left_behind(Folder(folder.path, DOMAIN, "other", "chat").place(0)),
            self.left_behind(Folder(folder.path, "e" * 16, "disk", "chat").place(0)),
        ]
        overwritten: list[str] = []
        kept = Disk.overwrite

        def noted(disk: Disk, keyspace: str, name: str) -> None:
            overwritten.append(name)
            kept(disk, keyspace, name)

        monkeypatch.setattr(Disk, "overwrite", noted)
        row = self.erased(driver)
        assert (row.deleted, row.found) == (Amount(3, 3 * FILE_BYTES), Amount(3, 3 * FILE_BYTES))
        assert Check.PLACES in row.checked
        assert not any(path.exists() for path in [*going, spare])
        assert all(path.exists() for path in staying)
        assert {going[0].name, spare.name} <= set(overwritten)

    def test_files_in_a_place_that_another_cache_server_has_are_left_to_it_and_reported(
        self, driver: FileDriver, folder: Folder
    ) -> None:
        path = self.left_behind(folder.place(1))
        disk = taken(folder)
        assert disk.path == folder.place(1)
        row = self.erased(driver)
        assert Check.PLACES not in row.checked
        assert (row.complete, path.exists()) == (True, True)
        disk.close()
        assert Check.PLACES in self.erased(driver).checked
        assert not path.exists()

    def test_a_place_that_cannot_be_looked_through_is_no_empty_one_and_hides_no_other(
        self, driver: FileDriver, folder: Folder
    ) -> None:
        file_of(folder.of_tier / "broken" / "0", block(KEYSPACE_A)).mkdir(parents=True)
        root = folder.of_tier / "another" / "0" / ROOT
        root.parent.mkdir(parents=True)
        root.write_bytes(b"")
        path = self.left_behind(folder.place(1))
        row = self.erased(driver)
        assert (row.complete, Check.PLACES in row.checked, path.exists()) == (True, False, False)


def test_without_a_folder_of_the_node_there_are_no_places_of_others(driver: FileDriver, gate: GateStandIn) -> None:
    gate.allow(KEYSPACE_B)
    assert Check.PLACES not in driver.tier.erase([KEYSPACE_A], lambda *_: None).checked
