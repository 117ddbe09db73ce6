"""Tiers that a scope is kept off, on a real LMCache server: its data is looked for in every tier, by its bytes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.wire import from_wire, to_wire
from tests.dataplane import memory_scan
from tests.dataplane.conftest import PATIENT, PATIENT_FILES, StartServer, file_tier, tier
from tests.dataplane.fresh import CHUNKS, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.files.file_driver import files_in
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.redis_process import RedisProcess

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.redis,
    pytest.mark.claim("blocks of a classification that a tier does not admit are neither stored nor read there"),
]

TIERS = ("dram", "disk", "shared")
CLOSED = [frozenset(some) for count in (1, 2, 3) for some in itertools.combinations(TIERS, count)]
NOBODY: frozenset[str] = frozenset()


def named(closed: frozenset[str]) -> str:
    return " and ".join(sorted(closed))


@dataclass
class Pod:
    """A cache container with memory, files and Redis, in this order."""

    server: LMCacheServer
    gate: GateStandIn
    redis: RedisProcess
    disk: Path

    def close(self, keyspace: str, closed: frozenset[str]) -> None:
        """Keep a scope off tiers; another scope is kept off none."""
        others = "0" * 32
        self.gate.enforce({keyspace: tuple(EnforcedBudget.denying(name) for name in sorted(closed)), others: ()})

    def counts(self, marker: bytes) -> dict[str, int]:
        """How often a marker is in each tier: in the segment of memory, the disk's files, every value of Redis."""
        admin = self.redis.admin()
        values = (admin.get(name) for name in admin.scan_iter(count=1000) if admin.type(name) == b"string")
        return {
            "dram": memory_scan.in_file(self.server.segment, [marker])[0],
            "disk": sum(self._count(path, marker) for path in files_in(self.disk)),
            "shared": sum(value.count(marker) for value in values if value is not None),
        }

    @staticmethod
    def _count(path: Path, marker: bytes) -> int:
        try:
            return memory_scan.in_file(path, [marker])[0]
        except FileNotFoundError:
            return 0  # it went meanwhile

    def holders(self, marker: bytes) -> frozenset[str]:
        """Return the tiers that have a marker."""
        return frozenset(name for name, count in self.counts(marker).items() if count)

    def until_in(self, marker: bytes, tiers: frozenset[str]) -> None:
        until(lambda: self.holders(marker) == tiers, lambda: f"in {set(self.holders(marker))}, {self.gate.state()}")

    def store_until_in(self, sequence: int, keyspace: str, marker: bytes, tiers: frozenset[str]) -> None:
        """Store until it is in these tiers and in no other.

        LMCache takes a block that the memory must not keep along to the other tiers if it is not late.
        """

        def came() -> bool:
            assert self.server.store_marked(sequence, keyspace, marker)["stored"]
            ends_s = time.monotonic() + 10
            while self.holders(marker) != tiers and time.monotonic() < ends_s:
                time.sleep(0.02)
            return self.holders(marker) == tiers

        until(came, lambda: f"in {set(self.holders(marker))}, {self.gate.state()}")

    def until_everywhere(self, marker: bytes) -> None:
        """Wait until each tier has all that the memory has."""
        until(lambda: len({*(counts := self.counts(marker)).values()}) == 1 and all(counts.values()), self.gate.state)

    def until_read(self, sequence: int, keyspace: str) -> None:
        """Wait until all of a prompt is found: the last of its blocks may be on their way to a tier."""
        until(lambda: self.server.read(sequence, keyspace)["hits"] == CHUNKS, self.gate.state)

    def refused(self, name: str) -> int:
        where = "memory" if name == "dram" else name
        return self.gate.state().counters.get(f"{where}.refused_not_allowed", 0)


@pytest.fixture(scope="module")
def shared_pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    directory = tmp_path_factory.mktemp("pod")
    gate, redis, disk = GateStandIn(directory), RedisProcess(directory), directory / "disk"
    redis.start()
    disk.mkdir()
    tiers = [file_tier(disk, **PATIENT_FILES), tier(redis.port, **PATIENT)]
    server = start_server(directory, gate, tiers, memory={"tier": "dram"})
    yield Pod(server, gate, redis, disk)
    redis.kill()


@pytest.fixture
def pod(shared_pod: Pod) -> Pod:
    """The pod with its tiers in use."""
    until(lambda: all(one.breaker == "closed" and not one.recovering for one in shared_pod.gate.state().tiers))
    return shared_pod


@pytest.mark.parametrize("closed", [NOBODY, *CLOSED], ids=named)
def test_what_is_stored_is_in_the_tiers_that_admit_it_and_in_no_other(
    pod: Pod, sequence: int, keyspace: str, closed: frozenset[str]
) -> None:
    marker, open_tiers = os.urandom(16), frozenset(TIERS) - closed
    pod.close(keyspace, closed)
    before = {name: pod.refused(name) for name in TIERS}
    pod.store_until_in(sequence, keyspace, marker, open_tiers)
    if open_tiers:
        pod.until_read(sequence, keyspace)
    else:
        assert pod.server.read(sequence, keyspace)["hits"] == 0
    pod.until_in(marker, open_tiers)
    until(lambda: all(pod.refused(name) > before[name] for name in closed), pod.gate.state)
    assert all(pod.refused(name) == before[name] for name in open_tiers)


@pytest.mark.parametrize("closed", CLOSED, ids=named)
def test_what_was_there_before_goes_and_is_not_read_any_more(
    pod: Pod, sequence: int, keyspace: str, closed: frozenset[str]
) -> None:
    marker, open_tiers = os.urandom(16), frozenset(TIERS) - closed
    pod.close(keyspace, NOBODY)
    assert pod.server.store_marked(sequence, keyspace, marker)["stored"]
    pod.until_everywhere(marker)
    pod.close(keyspace, closed)
    if not open_tiers:
        assert pod.server.lookup(sequence, keyspace)["hits"] == 0, "from the acknowledgement on"
    pod.until_in(marker, open_tiers)
    if open_tiers:
        pod.until_read(sequence, keyspace)
    else:
        assert pod.server.read(sequence, keyspace)["hits"] == 0
    pod.until_in(marker, open_tiers)


def test_what_is_being_read_when_its_tier_is_closed_is_found_by_nobody_else_and_goes_then(
    pod: Pod, sequence: int, keyspace: str
) -> None:
    marker = os.urandom(16)
    pod.close(keyspace, frozenset({"disk", "shared"}))
    assert pod.server.store_marked(sequence, keyspace, marker)["stored"]
    pod.until_in(marker, frozenset({"dram"}))
    assert pod.server.hold(sequence, keyspace) == CHUNKS
    pod.close(keyspace, frozenset(TIERS))
    assert pod.server.lookup(sequence, keyspace)["hits"] == 0
    assert pod.holders(marker) == {"dram"}, "somebody reads it"
    pod.server.let_go(sequence, keyspace)
    pod.until_in(marker, NOBODY)


def test_a_tier_that_is_opened_takes_what_is_stored_from_then_on(pod: Pod, sequence: int, keyspace: str) -> None:
    marker, refused = os.urandom(16), os.urandom(16)
    pod.close(keyspace, frozenset(TIERS))
    assert pod.server.store_marked(sequence, keyspace, refused)["stored"]
    # While the memory has the block, another of its name is not taken.
    pod.until_in(refused, NOBODY)
    pod.close(keyspace, NOBODY)
    until(lambda: pod.server.store_marked(sequence, keyspace, marker)["stored"] and bool(pod.holders(marker)))
    pod.until_in(marker, frozenset(TIERS))


def test_a_pod_of_the_version_before_obeys_by_the_limit(pod: Pod, sequence: int, keyspace: str) -> None:
    """It reads no `denied`, and of the row no more than that the scope may keep nothing."""
    row = to_wire(EnforcedBudget.denying("shared"))
    row.pop("denied")
    marker = os.urandom(16)
    pod.gate.enforce({keyspace: ()})
    assert pod.server.store_marked(sequence, keyspace, marker)["stored"]
    pod.until_in(marker, frozenset(TIERS))
    pod.gate.enforce({keyspace: (from_wire(EnforcedBudget, row),)})
    pod.until_in(marker, frozenset({"dram", "disk"}))
    assert pod.server.store_marked(sequence + 1, keyspace, marker)["stored"]
    pod.until_in(marker, frozenset({"dram", "disk"}))
