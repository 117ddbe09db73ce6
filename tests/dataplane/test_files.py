"""A real LMCache server with a tier of files: what leaves its memory is on the disk, also when it is started anew."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.messages.erase import EraseOutcome
from kvstrata.contract.policy.bundle import EnforcedBudget
from tests.dataplane import memory_scan
from tests.dataplane.conftest import PATIENT, PATIENT_FILES, StartServer, file_tier, tier
from tests.dataplane.fresh import CHUNKS
from tests.dataplane.lmcache_server import LMCacheServer, adapter
from tests.dataplane.test_lmcache_bench import run
from tests.files.file_driver import files_in, on_disk_bytes
from tests.files.file_systems import mounted, slow_group
from tests.tiers.data_keys import FIRST
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn
from tests.tiers.keyed_gate import KeyedGate
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

WITHIN_S = 60.0


@dataclass
class Pod:
    """A cache container with memory, files and Redis, in this order."""

    server: LMCacheServer
    gate: GateStandIn
    redis: RedisProcess
    disk: Path

    def tier(self, name: str) -> Any:
        return next(one for one in self.gate.state().tiers if one.name == name)

    def until(self, what: Any) -> None:
        give_up_at_s = time.monotonic() + WITHIN_S
        while not what():
            assert time.monotonic() < give_up_at_s, self.gate.state()
            time.sleep(0.02)

    def until_ready(self) -> None:
        self.until(lambda: all(one.breaker == "closed" and not one.recovering for one in self.gate.state().tiers))

    def store(self, sequence: int, keyspace: str, marker: bytes) -> None:
        """Store, and wait until both tiers have it."""
        before = {name: self.tier(name).stored for name in ("disk", "shared")}
        assert self.server.store_marked(sequence, keyspace, marker)["stored"]
        self.until(lambda: all(self.tier(name).stored >= count + CHUNKS for name, count in before.items()))

    def marked(self, marker: bytes) -> int:
        """How often a marker is in the server's process."""
        return memory_scan.in_process(self.server.process.pid, [marker])[0]

    def files(self, keyspace: str) -> list[Path]:
        return [path for path in files_in(self.disk) if path.parent.name == keyspace]


@pytest.fixture(scope="module")
def shared_pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    directory = tmp_path_factory.mktemp("pod")
    gate = GateStandIn(directory)
    redis = RedisProcess(directory)
    redis.start()
    disk = directory / "disk"
    disk.mkdir()
    tiers = [file_tier(disk, **PATIENT_FILES), tier(redis.port, **PATIENT)]
    server = start_server(directory, gate, tiers, memory={"tier": "dram"})
    yield Pod(server, gate, redis, disk)
    redis.kill()


@pytest.fixture
def pod(shared_pod: Pod) -> Pod:
    shared_pod.until_ready()
    return shared_pod


def test_what_left_the_memory_is_served_by_the_files_and_then_by_the_memory(
    pod: Pod, sequence: int, keyspace: str
) -> None:
    marker = os.urandom(16)
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace, marker)
    before = {name: pod.tier(name).loaded for name in ("disk", "shared")}
    pod.server.forget_memory()
    assert pod.server.read(sequence, keyspace)["hits"] == CHUNKS
    assert pod.tier("disk").loaded == before["disk"] + CHUNKS
    assert pod.tier("shared").loaded == before["shared"]
    assert pod.server.read(sequence, keyspace)["hits"] == CHUNKS
    assert pod.tier("disk").loaded == before["disk"] + CHUNKS, "the memory kept what it loaded"


def test_files_serve_while_redis_hangs(pod: Pod, sequence: int, keyspace: str) -> None:
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace, os.urandom(16))
    pod.server.forget_memory()
    pod.redis.freeze()
    try:
        assert pod.server.read(sequence, keyspace)["hits"] == CHUNKS
    finally:
        pod.redis.thaw()


def test_redis_serves_what_the_files_have_not(pod: Pod, sequence: int, keyspace: str) -> None:
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace, os.urandom(16))
    for path in pod.files(keyspace):
        path.unlink()
    pod.server.forget_memory()
    assert pod.server.read(sequence, keyspace)["hits"] == 0, "a file that somebody removed is a miss"
    assert pod.server.read(sequence, keyspace)["hits"] == CHUNKS


def test_each_tier_keeps_its_own_retention(pod: Pod, sequence: int, keyspace: str) -> None:
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace, os.urandom(16))
    pod.gate.enforce({keyspace: (EnforcedBudget("dram", retention_s=1), EnforcedBudget("disk", retention_s=3600))})
    pod.until(lambda: not any(row.tier == "dram" and row.blocks for row in pod.gate.state().usage))
    assert len(pod.files(keyspace)) == CHUNKS
    pod.gate.enforce({keyspace: (EnforcedBudget("dram", retention_s=3600), EnforcedBudget("disk", retention_s=3))})
    pod.until(lambda: not pod.files(keyspace))


def test_an_erasure_leaves_no_file_and_no_byte(pod: Pod, sequence: int, keyspace: str) -> None:
    marker = os.urandom(16)
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace, marker)
    pod.server.forget_memory()
    assert pod.server.read(sequence, keyspace)["hits"] == CHUNKS
    pod.gate.allow()
    pod.until(lambda: pod.gate.erase(keyspace).outcome is EraseOutcome.COMPLETE)
    answer = pod.gate.erased(keyspace)
    assert (answer.deleted.blocks, answer.remaining.blocks) == (2 * CHUNKS, 0)
    assert "flash keeps earlier copies" in answer.residue
    assert pod.files(keyspace) == []
    pod.until(lambda: pod.marked(marker) == 0)


@pytest.mark.claim("blocks in files outlive a killed cache server")
def test_a_server_that_was_killed_serves_from_its_files(pod: Pod, sequence: int, keyspace: str) -> None:
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace, os.urandom(16))
    pod.server.kill_and_start_again()
    pod.until_ready()
    pod.gate.allow(keyspace)
    # Files of what the policy does not allow any more go meanwhile.
    pod.until(lambda: pod.tier("disk").used_bytes == on_disk_bytes(pod.disk))
    pod.redis.freeze()
    try:
        assert pod.server.read(sequence, keyspace)["hits"] == CHUNKS
    finally:
        pod.redis.thaw()


def test_the_disk_holds_ciphertext_where_that_is_required(
    start_server: StartServer, tmp_path: Path, sequence: int
) -> None:
    gate, disk, marker = GateStandIn(tmp_path), tmp_path / "disk", os.urandom(16)
    disk.mkdir()
    server = start_server(
        tmp_path, gate, [file_tier(disk, encryption="Required", **PATIENT_FILES)], memory={"tier": "dram"}
    )
    KeyedGate(gate).allow({KEYSPACE_A: (FIRST,)})
    pod = Pod(server, gate, RedisProcess(tmp_path), disk)
    pod.until_ready()
    assert server.store_marked(sequence, KEYSPACE_A, marker)["stored"]
    pod.until(lambda: pod.tier("disk").stored == CHUNKS)
    assert not any(marker in path.read_bytes() for path in files_in(disk))
    server.forget_memory()
    assert server.read(sequence, KEYSPACE_A)["hits"] == CHUNKS
    assert (pod.tier("disk").loaded, pod.tier("disk").encrypted) == (CHUNKS, True)


def test_what_a_slow_disk_reads_late_is_in_nobodys_memory(
    start_server: StartServer, tmp_path: Path, sequence: int
) -> None:
    gate, marker = GateStandIn(tmp_path), os.urandom(16)
    with mounted(tmp_path) as file_system:
        disk = file_system.path
        tiers = [file_tier(disk, load_deadline_ms=1500, capacity_bytes=32 << 20)]
        server = start_server(tmp_path, gate, tiers, memory={"tier": "dram"})
        gate.allow(KEYSPACE_A)
        pod = Pod(server, gate, RedisProcess(tmp_path), disk)
        pod.until_ready()
        assert server.store_marked(sequence, KEYSPACE_A, marker)["stored"]
        pod.until(lambda: pod.tier("disk").stored == CHUNKS)
        server.forget_memory()
        pod.until(lambda: pod.marked(marker) == 0)
        with slow_group(file_system.device(), 4096) as group:
            (group / "cgroup.procs").write_text(str(server.process.pid))
            begun_s = time.monotonic()
            assert server.read(sequence, KEYSPACE_A)["hits"] == 0
            assert time.monotonic() - begun_s < 15, "the chunks take 16 s and more"

            def seen_open() -> bool:
                """Whether the disk is out of use; a busy machine may miss it before a probe succeeds."""
                looked_s = time.monotonic()
                while time.monotonic() < looked_s + 2:
                    if pod.tier("disk").breaker == "open":
                        return True
                    time.sleep(0.02)
                server.forget_memory()
                server.read(sequence, KEYSPACE_A)
                return False

            pod.until(seen_open)
            assert server.store_marked(sequence + 1, KEYSPACE_A, os.urandom(16))["stored"], "others go on"
        pod.until_ready()
        pod.until(lambda: pod.marked(marker) == 0)
        assert gate.state().counters.get("memory.remaining.bytes", 0) == 0
        pod.until(lambda: server.read(sequence, KEYSPACE_A)["hits"] == CHUNKS)
        server.stop()


def test_what_bench_l2_stores_is_what_it_loads(tmp_path: Path) -> None:
    gate, disk = GateStandIn(tmp_path), tmp_path / "disk"
    disk.mkdir()
    files = file_tier(disk, workers=4, capacity_bytes=256 << 20, **PATIENT_FILES)
    done = run(
        gate, "l2", "--l2-adapter", json.dumps(adapter(gate, files)),
        "--num-keys", "16", "--in-flight", "2", "--data-size-kb", "512", "--rounds", "3", "--warmup-rounds", "1",
        "--lookup-max-hit-rate", "0.5", "--no-skip-verify",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(r"\[Verify\].*", done.stdout)
    assert not re.search(r"mismatch|FAIL", done.stdout), done.stdout[-4000:]
    assert len(files_in(disk)) >= 16 * 2 * 3
