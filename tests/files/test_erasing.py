"""Copies in a pod are erased: memory and files together, in a cache server of stand-ins that is a process itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.contract.messages.erase import (
    REQUIRED,
    AdapterErased,
    AdapterVerified,
    Amount,
    Check,
    EraseOutcome,
    EraseRequest,
    VerifyRequest,
)
from kvstrata_sidecar.adapter import erase as erasing
from kvstrata_sidecar.adapter.files import erase as file_erasing
from tests.adapter.memory_stand_in import BLOCK_BYTES as MEMORY_BYTES
from tests.adapter.memory_stand_in import Key, marker
from tests.dataplane.memory_scan import in_file
from tests.files.file_driver import (
    BLOCK_BYTES,
    FILE_BYTES,
    FileDriver,
    aligned,
    block,
    blocks,
    file_of,
    files_in,
)
from tests.files.test_faults import SlowDisk
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn

ROOT = Path(__file__).parents[2]
Start = Callable[..., FileDriver]
COMPLETE, REMAINING = EraseOutcome.COMPLETE, EraseOutcome.REMAINING


def erase(gate: GateStandIn, *keyspaces: str, tiers: tuple[str, ...] = ()) -> AdapterErased:
    return gate.put(EraseRequest(keyspaces, tiers), AdapterErased)


def verify(gate: GateStandIn, keyspace: str, chunks: bytes | None = None) -> AdapterVerified:
    return gate.put(VerifyRequest(keyspace, chunks), AdapterVerified)


def finally_told(
    gate: GateStandIn, *keyspaces: str, that: Callable[[AdapterErased], object], tiers: tuple[str, ...] = ()
) -> AdapterErased:
    """Ask until it is so, as a gate does: an answer does not wait for all that a busy machine has yet to do."""
    give_up_at_s = time.monotonic() + 60
    while not that(said := erase(gate, *keyspaces, tiers=tiers)):
        assert time.monotonic() < give_up_at_s, said
    return said


def finally_complete(gate: GateStandIn, *keyspaces: str) -> AdapterErased:
    return finally_told(gate, *keyspaces, that=lambda said: said.outcome is COMPLETE)


class CacheServer:
    """The process; a new one takes over the files and begins with a memory of its own, as LMCache does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "disk").mkdir(exist_ok=True)
        self._start()

    def _start(self) -> None:
        path = os.pathsep.join(str(ROOT / part) for part in ("operator/src", "sidecar/src", "."))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.files.erasing_server", str(self.directory)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answered("ready")

    def say(self, what: str, keyspace: str, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {keyspace} {number}\n")
        self.process.stdin.flush()
        self._answered(what)

    def _answered(self, what: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{what}\n"

    def markers(self, keyspace: str, *numbers: int) -> tuple[int, int]:
        """Return how often these blocks' contents are in the server's memory, and in files."""
        patterns = [marker(Key(keyspace, number)) for number in numbers]
        files = files_in(self.directory / "disk")
        return sum(in_file(self.directory / "memory", patterns)), sum(sum(in_file(one, patterns)) for one in files)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def restart(self) -> None:
        self._start()


@pytest.fixture
def server(gate: GateStandIn, tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(tmp_path)
    gate.allow(KEYSPACE_A, KEYSPACE_B)
    for number in (1, 2, 3):
        server.say("store", KEYSPACE_A, number)
    server.say("store", KEYSPACE_B, 1)
    yield server
    server.kill()


class TestMemoryAndFiles:
    def test_after_a_complete_erasure_no_byte_is_left_of_it_and_all_of_the_others(
        self, server: CacheServer, gate: GateStandIn
    ) -> None:
        assert server.markers(KEYSPACE_A, 1, 2, 3) == (3, 3), "what is looked for can be found"
        gate.allow(KEYSPACE_B)
        said = finally_complete(gate, KEYSPACE_A)
        assert (said.operations, said.keys, said.elsewhere) == (0, 0, ())
        assert (said.revision, said.term) == (gate.revision, 1)
        memory, files = said.tiers
        assert (memory.medium, memory.found, memory.deleted) == ("CPU", *[Amount(3, 3 * MEMORY_BYTES)] * 2)
        assert (files.medium, files.found.blocks, files.deleted.blocks) == ("NVMe", 3, 3)
        assert all(frozenset(tier.checked) == REQUIRED[tier.medium] for tier in said.tiers)
        assert "flash keeps earlier copies" in files.residue
        assert server.markers(KEYSPACE_A, 1, 2, 3) == (0, 0)
        assert server.markers(KEYSPACE_B, 1) == (1, 1)
        assert finally_complete(gate, KEYSPACE_A).tiers[0].deleted == memory.deleted, "asked again, it tells the same"

    def test_a_reader_delays_it_and_is_named(self, server: CacheServer, gate: GateStandIn) -> None:
        server.say("read", KEYSPACE_A, 2)
        gate.allow(KEYSPACE_B)
        said = finally_told(
            gate,
            KEYSPACE_A,
            that=lambda said: said.tiers[1].complete and Check.OVERWRITTEN in said.tiers[0].checked,
        )
        memory = said.tiers[0]
        assert (said.outcome, memory.reading, memory.remaining) == (REMAINING, 1, Amount(1, MEMORY_BYTES))
        assert memory.held_by == ("tier dram: 1 blocks are being read",)
        assert Check.TABLES not in memory.checked
        assert server.markers(KEYSPACE_A, 1, 2, 3) == (1, 0)
        server.say("release", KEYSPACE_A, 2)
        assert finally_complete(gate, KEYSPACE_A).tiers[0].deleted.blocks == 3
        assert server.markers(KEYSPACE_A, 1, 2, 3) == (0, 0)

    def test_a_server_that_is_killed_in_the_middle_is_asked_again_and_ends_it(
        self, server: CacheServer, gate: GateStandIn
    ) -> None:
        server.say("read", KEYSPACE_A, 2)
        gate.allow(KEYSPACE_B)
        first = erase(gate, KEYSPACE_A, tiers=("dram",))
        assert (first.outcome, [tier.tier for tier in first.tiers]) == (REMAINING, ["dram"])
        for _ in range(2):
            server.kill()
            assert server.markers(KEYSPACE_A, 1, 2, 3)[1] == 3, "its files outlive it"
            server.restart()
            assert erase(gate, KEYSPACE_A).outcome is EraseOutcome.NOT_ENFORCED, "it has no policy yet"
        gate.allow(KEYSPACE_B)
        said = finally_complete(gate, KEYSPACE_A)
        assert said.boot != first.boot
        assert [(tier.medium, tier.found.blocks) for tier in said.tiers] == [("CPU", 0), ("NVMe", 3)]
        assert server.markers(KEYSPACE_A, 1, 2, 3) == (0, 0)
        assert server.markers(KEYSPACE_B, 1) == (0, 1)

    def test_what_could_be_read_before_is_missed_and_what_is_in_force_is_found(
        self, server: CacheServer, gate: GateStandIn
    ) -> None:
        chunks = b"".join(Key("", number).chunk_hash for number in (1, 2, 3))
        before = verify(gate, KEYSPACE_A, chunks)
        assert [(tier.tier, tier.asked, tier.found, tier.kept) for tier in before.tiers] == [
            ("disk", 3, 3, 3), ("dram", 3, 3, 3),
        ]  # fmt: skip
        gate.allow(KEYSPACE_B)
        removed = verify(gate, KEYSPACE_A, chunks).tiers[0]
        assert (removed.found, removed.kept, removed.refusal) == (0, 3, "unknown_keyspace"), "unreachable, not erased"
        finally_complete(gate, KEYSPACE_A)
        for asked in (chunks, None):
            after = verify(gate, KEYSPACE_A, asked)
            assert (after.known, after.in_force, after.chunks) == (True, False, 3)
            assert [(tier.asked, tier.found, tier.kept) for tier in after.tiers] == [(3, 0, 0)] * 2
        control = verify(gate, KEYSPACE_B, chunks[:32])
        assert (control.in_force, [tier.found for tier in control.tiers]) == (True, [1, 1])

    def test_a_keyspace_in_force_is_refused_and_loses_nothing(self, server: CacheServer, gate: GateStandIn) -> None:
        said = erase(gate, KEYSPACE_A, "c" * 32)
        assert (said.outcome, said.tiers) == (EraseOutcome.IN_FORCE, ())
        assert server.markers(KEYSPACE_A, 1, 2, 3) == (3, 3)


@pytest.fixture
def alone(driver: FileDriver, monkeypatch: pytest.MonkeyPatch) -> FileDriver:
    """Files without a memory that anybody governs; it is left out of what is erased."""
    monkeypatch.setattr(file_erasing, "WITHIN_S", 0.6)
    return driver


def row(said: AdapterErased) -> erasing.ErasedTier:
    return next(tier for tier in said.tiers if tier.medium == "NVMe")


class TestFiles:
    def test_without_anybody_who_governs_the_memory_nothing_is_complete(
        self, alone: FileDriver, gate: GateStandIn
    ) -> None:
        alone.store(blocks(KEYSPACE_A, 1, 2))
        gate.allow(KEYSPACE_B)
        for tiers in ((), ("disk",)):
            said = finally_told(gate, KEYSPACE_A, that=lambda said: row(said).complete, tiers=tiers)
            assert said.outcome is REMAINING
            assert said.tiers[0].problem == "this cache server's own memory is not governed"

    def test_a_tier_that_this_pod_does_not_have_is_elsewhere(self, alone: FileDriver, gate: GateStandIn) -> None:
        alone.store(blocks(KEYSPACE_A, 1))
        gate.allow(KEYSPACE_B)
        said = erase(gate, KEYSPACE_A, tiers=("shared",))
        assert ([tier.medium for tier in said.tiers], said.elsewhere) == (["CPU"], ("shared",))
        assert len(files_in(alone.directory)) == 1, "what is not named stays"

    def test_a_file_that_nobody_knows_of_goes_too(self, alone: FileDriver, gate: GateStandIn, directory: Path) -> None:
        alone.store(blocks(KEYSPACE_A, 1))
        stray = file_of(directory, block(KEYSPACE_A, 2))
        stray.write_bytes(b"of a writer that was killed")
        (stray.parent / ".unfinished").write_bytes(b"the same")
        gate.allow(KEYSPACE_B)
        said = row(finally_told(gate, KEYSPACE_A, that=lambda said: row(said).complete))
        assert said.deleted == Amount(1, FILE_BYTES)
        assert files_in(directory) == []

    def test_a_file_that_cannot_be_removed_is_told(
        self, alone: FileDriver, gate: GateStandIn, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alone.store(blocks(KEYSPACE_A, 1))
        gate.allow(KEYSPACE_B)
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
            said = row(erase(gate, KEYSPACE_A))
        assert (said.complete, said.remaining.blocks, said.removing) == (False, 1, 1)
        assert Check.DIRECTORY not in said.checked
        alone.until(lambda: row(erase(gate, KEYSPACE_A)).complete)
        assert files_in(directory) == []


class TestADiskThatHangs:
    @pytest.fixture
    def slow(self, directory: Path) -> SlowDisk:
        return SlowDisk(directory)

    def test_a_read_under_way_is_an_operation_that_delays_it(
        self, start: Start, gate: GateStandIn, slow: SlowDisk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(file_erasing, "WITHIN_S", 0.6)
        driver = start(disk=slow, guarded=lambda: True, workers=2)
        driver.until_ready()
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        driver.store([block()])
        slow.reads_go_on.clear()
        slow.under_way = threading.Semaphore(0)
        task = driver.tier.load([block()], [aligned(BLOCK_BYTES)])
        assert slow.under_way.acquire(timeout=60)
        # The policy drops it; that this is not acknowledged while the read lasts is another test's.
        gate.revision += 1
        driver.runtime.enforcement.apply(gate.view([KEYSPACE_B], revision=gate.revision))
        for tier in driver.runtime.all_tiers():
            tier.policy_changed()
        why = ("tier disk: 1 blocks are being read",)
        said = finally_told(gate, KEYSPACE_A, that=lambda said: row(said).held_by == why)
        assert (said.outcome, said.operations, row(said).reading) == (REMAINING, 1, 1)
        slow.reads_go_on.set()
        driver.wait(task)
        driver.until(lambda: row(erase(gate, KEYSPACE_A)).complete)
        driver.until(lambda: erase(gate, KEYSPACE_A).operations == 0)
        assert files_in(driver.directory) == []


def test_a_file_that_made_room_is_waited_for_until_it_is_written_over(
    start: Start, gate: GateStandIn, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_erasing, "WITHIN_S", 0.6)
    slow = SlowDisk(directory)
    driver = start(disk=slow, guarded=lambda: True, capacity_bytes=4 * FILE_BYTES, workers=1)
    driver.until_ready()
    gate.allow(KEYSPACE_A, KEYSPACE_B)
    driver.store(blocks(KEYSPACE_A, 1, 2, 3), fill=0x41)
    gate.allow(KEYSPACE_B)
    slow.one_by_one = threading.Semaphore(0)
    slow.under_way = threading.Semaphore(0)
    task = driver.tier.store(blocks(KEYSPACE_B, 5, 6), [aligned(BLOCK_BYTES, 0x42) for _ in range(2)])
    assert slow.under_way.acquire(timeout=60), "the first has a free place"
    slow.one_by_one.release()
    assert slow.under_way.acquire(timeout=60), "the second is written over a file that made room"
    (reserved,) = driver.tier._files.index._space.reserved.values()
    assert reserved.spare is not None
    assert (directory / "kvs1" / reserved.spare.name).read_bytes()[:1] == b"\x41"
    why = ("tier disk: 1 files that made room are not written over yet",)
    said = row(finally_told(gate, KEYSPACE_A, that=lambda said: row(said).held_by == why))
    assert (said.complete, said.remaining, said.rewriting) == (False, Amount(), 1)
    slow.one_by_one.release()
    driver.wait(task)
    driver.until(lambda: row(erase(gate, KEYSPACE_A)).complete)
    assert not any(b"\x41" * 64 in path.read_bytes() for path in files_in(directory))
