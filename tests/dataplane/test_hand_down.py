"""What leaves the memory of a real LMCache server is in the next slower tier, also if it was not stored there first."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from tests.dataplane.conftest import PATIENT, PATIENT_FILES, StartServer, file_tier, tier
from tests.dataplane.fresh import CHUNKS, fresh_keyspace, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.files.file_driver import files_in
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

LATE_S = 10
"""How late a busy machine may notice the end of a life: blocks are so old when they are copied, and a copy that is as
young as its making lives so much longer."""


@dataclass
class Pod:
    """A cache container with memory, perhaps files, and Redis, in this order."""

    server: LMCacheServer
    gate: GateStandIn
    redis: RedisProcess
    disk: Path
    before: Mapping[str, int] = field(default_factory=dict)

    def blocks(self, keyspace: str, name: str) -> int:
        """How many blocks a keyspace has in a tier of this pod's own."""
        return sum(row.blocks for row in self.gate.state().usage if (row.scope, row.tier) == (keyspace[:12], name))

    def count(self, name: str) -> int:
        """What was counted in this test."""
        return self.gate.state().counters.get(name, 0) - self.before.get(name, 0)

    def until_ready(self) -> None:
        until(lambda: all(one.breaker == "closed" and not one.recovering for one in self.gate.state().tiers))

    def files(self, keyspace: str) -> int:
        return sum(path.parent.name == keyspace for path in files_in(self.disk))


def started(directory: Path, start_server: StartServer, *, files: bool) -> Iterator[Pod]:
    gate, redis, disk = GateStandIn(directory), RedisProcess(directory), directory / "disk"
    redis.start()
    disk.mkdir()
    tiers = [*([file_tier(disk, **PATIENT_FILES)] if files else []), tier(redis.port, **PATIENT)]
    yield Pod(start_server(directory, gate, tiers, memory={"tier": "dram"}), gate, redis, disk)
    redis.kill()


@pytest.fixture(scope="module")
def shared_deep_pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    yield from started(tmp_path_factory.mktemp("deep"), start_server, files=True)


@pytest.fixture(scope="module")
def shared_pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    yield from started(tmp_path_factory.mktemp("pod"), start_server, files=False)


@pytest.fixture
def deep_pod(shared_deep_pod: Pod) -> Pod:
    """A pod with memory, files and Redis."""
    return ready(shared_deep_pod)


@pytest.fixture
def pod(shared_pod: Pod) -> Pod:
    """A pod with memory and Redis."""
    return ready(shared_pod)


def ready(pod: Pod) -> Pod:
    pod.until_ready()
    pod.before = pod.gate.state().counters
    return pod


@contextmanager
def away(redis: RedisProcess) -> Iterator[None]:
    """Without Redis; it comes back empty."""
    redis.kill()
    try:
        yield
    finally:
        redis.start()


@pytest.mark.claim("a block that leaves memory is in the next slower tier first")
def test_what_was_loaded_from_redis_is_in_the_files_when_it_leaves_the_memory(
    deep_pod: Pod, sequence: int, keyspace: str
) -> None:
    pod, redis_only = deep_pod, (EnforcedBudget("disk", limit_bytes=0),)
    pod.gate.enforce({keyspace: redis_only})
    assert pod.server.store(sequence, keyspace, 7)["stored"]
    until(lambda: pod.count("shared.stored") == CHUNKS)
    assert pod.files(keyspace) == 0
    pod.server.forget_memory()
    budgets = (EnforcedBudget("dram", retention_s=15), EnforcedBudget("disk", retention_s=3600))
    pod.gate.enforce({keyspace: budgets})
    until(lambda: pod.server.read(sequence, keyspace)["hits"] == CHUNKS)
    assert pod.count("shared.loaded") >= CHUNKS
    until(lambda: pod.blocks(keyspace, "dram") == 0)
    assert pod.count("memory.handed_down_blocks") == CHUNKS
    assert pod.count("memory.left_uncopied_blocks") == 0
    assert pod.count("shared.stored") == CHUNKS, "Redis was not asked to store them again"
    with away(pod.redis):
        found = pod.server.read(sequence, keyspace)
    assert (found["hits"], found["values"]) == (CHUNKS, [7.0])
    assert pod.count("disk.loaded") == CHUNKS


def test_what_came_while_redis_was_away_is_there_when_it_leaves_the_memory(
    pod: Pod, sequence: int, keyspace: str
) -> None:
    pod.gate.enforce({keyspace: (EnforcedBudget("dram", retention_s=600),)})
    began_s = time.monotonic()
    with away(pod.redis):
        assert pod.server.store(sequence, keyspace, 9)["stored"]
        until(lambda: pod.blocks(keyspace, "dram") == CHUNKS)
        until(lambda: pod.gate.state().tiers[0].breaker == "open")
    pod.until_ready()
    assert pod.count("shared.stored") == 0
    age_s = math.ceil(time.monotonic() - began_s)
    pod.gate.enforce({keyspace: (EnforcedBudget("dram", retention_s=age_s + 10),)})
    until(lambda: pod.blocks(keyspace, "dram") == 0)
    assert pod.count("memory.left_uncopied_blocks") == CHUNKS - pod.count("memory.handed_down_blocks")
    assert pod.count("memory.handed_down_blocks") == CHUNKS
    found = pod.server.read(sequence, keyspace)
    assert (found["hits"], found["values"]) == (CHUNKS, [9.0])


@pytest.mark.claim("a block that leaves memory while its tier is away is counted")
def test_what_leaves_while_redis_is_away_is_counted(pod: Pod, sequence: int, keyspace: str) -> None:
    pod.gate.enforce({keyspace: (EnforcedBudget("dram", retention_s=3),)})
    with away(pod.redis):
        assert pod.server.store(sequence, keyspace, 9)["stored"]
        until(lambda: pod.count("memory.left_uncopied_blocks") == CHUNKS)
        assert pod.blocks(keyspace, "dram") == 0


@pytest.mark.claim("blocks are handed down as far as the limit allows")
def test_a_limit_takes_what_the_files_have(deep_pod: Pod, sequence: int, keyspace: str) -> None:
    """A scope that is denied a tier gets nothing there by being handed down, and one that is not gets it all."""
    pod = deep_pod
    other = fresh_keyspace()
    pod.gate.enforce(
        {keyspace: (EnforcedBudget("disk", limit_bytes=0),), other: (EnforcedBudget("disk", limit_bytes=0),)}
    )
    for number, scope in enumerate((keyspace, other)):
        assert pod.server.store(sequence + number, scope, 3 + number)["stored"]
    until(lambda: pod.count("shared.stored") == 2 * CHUNKS)
    until(lambda: pod.blocks(keyspace, "dram") == CHUNKS == pod.blocks(other, "dram"))
    pod.gate.enforce(
        {
            keyspace: (EnforcedBudget("dram", retention_s=15),),
            other: (EnforcedBudget("dram", retention_s=15), EnforcedBudget("disk", 0)),
        }
    )
    until(lambda: pod.blocks(keyspace, "dram") == 0 == pod.blocks(other, "dram"))
    assert (pod.files(keyspace), pod.files(other)) == (CHUNKS, 0)
    assert pod.count("memory.left_uncopied_blocks") == 0, "Redis has what the files may not have"


def test_each_tier_ends_a_blocks_life_by_its_own_retention_whatever_was_copied(
    deep_pod: Pod, sequence: int, keyspace: str
) -> None:
    """From Redis up into memory, from there down into the files: no copy is younger than what it was made of."""
    pod = deep_pod
    pod.gate.enforce({keyspace: (EnforcedBudget("disk", limit_bytes=0),)})
    began_s = time.monotonic()
    assert pod.server.store(sequence, keyspace, 5)["stored"]
    stored_s = time.monotonic()
    until(lambda: pod.count("shared.stored") == CHUNKS)
    pod.server.forget_memory()
    lives = {"dram": 20, "disk": 32, "shared": 45}
    pod.gate.enforce({keyspace: tuple(EnforcedBudget(name, retention_s=life_s) for name, life_s in lives.items())})
    until(lambda: all(one.settling == 0 for one in pod.gate.state().tiers))
    time.sleep(max(0.0, stored_s + LATE_S - time.monotonic()))
    read_s = time.monotonic()
    assert pod.server.read(sequence, keyspace)["hits"] == CHUNKS
    until(lambda: pod.files(keyspace) == CHUNKS)
    until(lambda: pod.count("memory.handed_down_blocks") == CHUNKS)
    until(lambda: pod.blocks(keyspace, "dram") == 0)
    assert time.monotonic() < read_s + lives["dram"]
    assert pod.files(keyspace) == CHUNKS
    until(lambda: pod.files(keyspace) == 0)
    assert began_s + lives["disk"] - 3 < time.monotonic() < read_s + lives["disk"]
    assert pod.server.lookup(sequence, keyspace)["hits"] == CHUNKS, "Redis has them still"
    until(lambda: pod.server.lookup(sequence, keyspace)["hits"] == 0)
    assert time.monotonic() < read_s + lives["shared"]


def test_a_scope_near_its_limit_hands_down_what_goes_next(deep_pod: Pod, sequence: int, keyspace: str) -> None:
    pod = deep_pod
    pod.gate.enforce({keyspace: (EnforcedBudget("disk", limit_bytes=0),)})
    for number in range(2):
        assert pod.server.store(sequence + number, keyspace, 4 + number)["stored"]
    until(lambda: pod.count("shared.stored") == 2 * CHUNKS and pod.blocks(keyspace, "dram") == 2 * CHUNKS)
    rows = [row for row in pod.gate.state().usage if (row.scope, row.tier) == (keyspace[:12], "dram")]
    used_bytes = sum(row.used_bytes for row in rows)
    pod.gate.enforce({keyspace: (EnforcedBudget("dram", limit_bytes=used_bytes),)})
    until(lambda: pod.files(keyspace) == CHUNKS, lambda: str(pod.gate.state()))
    assert pod.blocks(keyspace, "dram") == 2 * CHUNKS, "nothing had to go yet"
    assert pod.server.store(sequence + 2, keyspace, 6)["stored"]
    until(lambda: pod.count("memory.evicted_limit") == CHUNKS)
    pod.redis.freeze()
    try:
        found = pod.server.read(sequence, keyspace)
    finally:
        pod.redis.thaw()
    assert (found["hits"], found["values"]) == (CHUNKS, [4.0])
