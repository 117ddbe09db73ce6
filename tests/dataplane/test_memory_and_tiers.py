"""LMCache's own memory under the policy while blocks travel between it and a shared tier."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.messages.erase import AdapterErased, EraseOutcome
from kvstrata.contract.messages.erase_report import Outcome
from kvstrata.contract.policy.bundle import EnforcedBudget
from tests.dataplane import memory_scan
from tests.dataplane.conftest import PATIENT, StartServer, tier
from tests.dataplane.fresh import CHUNKS, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.certificates import SERVER_NAME, issue
from tests.tiers.eraser import erase, order
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

WITHIN_S = 60.0
SLOW = PATIENT | {"io_timeout_ms": 10_000}
"""A Redis that stands still is waited for until the test has seen that blocks wait for it."""


@dataclass
class Pod:
    """A cache container with one shared tier whose memory is governed."""

    server: LMCacheServer
    gate: GateStandIn
    redis: RedisProcess
    options: dict[str, Any] = field(default_factory=dict)

    def erase(self, keyspace: str) -> AdapterErased:
        """Ask the cache server to erase its own copies."""
        return self.gate.erase(keyspace)

    def erase_from_tier(self, keyspace: str) -> None:
        """Delete as a Job does, but for the wait for late values."""
        report = erase(order(self.redis.port, keyspace, tier=self.options))
        assert report.end.outcome is Outcome.ERASED

    def names(self, keyspace: str) -> list[bytes]:
        """What the tier has under a keyspace, tombstones left out."""
        found = self.redis.admin().scan_iter(f"*{keyspace}*", count=1000)
        return [name for name in found if not name.endswith(b"#s")]

    def store(self, sequence: int, keyspace: str, marker: bytes) -> None:
        """Store, and wait until the tier has it and nobody reads it any more."""
        before = self.gate.state().tiers[0].stored
        assert self.server.store_marked(sequence, keyspace, marker)["stored"]
        give_up_at_s = time.monotonic() + WITHIN_S
        while self.gate.state().tiers[0].stored < before + CHUNKS:
            assert time.monotonic() < give_up_at_s, self.gate.state()
            time.sleep(0.02)

    def until_open(self) -> None:
        give_up_at_s = time.monotonic() + WITHIN_S
        while self.gate.state().tiers[0].breaker != "closed":
            assert time.monotonic() < give_up_at_s, self.gate.state()
            time.sleep(0.02)

    def marked(self, marker: bytes) -> int:
        """How often a marker is in the server's process: the pool, and whatever its threads and connections hold."""
        return memory_scan.in_process(self.server.process.pid, [marker])[0]

    def until_taken_up(self, blocks: int) -> None:
        """Wait until LMCache has locked blocks to store them."""
        give_up_at_s = time.monotonic() + WITHIN_S
        while self.server.get("/status")["storage_manager"]["l1_manager"]["read_locked_count"] < blocks:
            assert time.monotonic() < give_up_at_s, self.gate.state()

    def until_erased(self, keyspace: str) -> None:
        give_up_at_s = time.monotonic() + WITHIN_S
        while (said := self.erase(keyspace)).outcome is not EraseOutcome.COMPLETE:
            assert time.monotonic() < give_up_at_s, said

    def until_gone(self, marker: bytes) -> None:
        give_up_at_s = time.monotonic() + WITHIN_S
        while left := self.marked(marker):
            assert time.monotonic() < give_up_at_s, f"{left} left, {self.gate.state()}"


@pytest.fixture(scope="module", params=["plain", "tls"])
def shared_pod(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Pod]:
    directory = tmp_path_factory.mktemp("pod")
    gate = GateStandIn(directory)
    options: dict[str, Any] = {}
    redis = RedisProcess(directory)
    if request.param == "tls":
        redis = RedisProcess(directory, tls=issue(directory).redis_options)
        options["tls"] = {"ca_file": str(directory / "ca.crt"), "server_name": SERVER_NAME}
    redis.start()
    server = start_server(directory, gate, [tier(redis.port, **SLOW, **options)], memory={"tier": "dram"})
    yield Pod(server, gate, redis, options)
    redis.kill()


@pytest.fixture
def pod(shared_pod: Pod) -> Pod:
    """The pod with its tier in use."""
    shared_pod.until_open()
    return shared_pod


def test_a_copy_from_a_shared_tier_stays_when_it_was_read_and_an_erasure_overwrites_it(
    pod: Pod, sequence: int, keyspace: str
) -> None:
    marker = os.urandom(16)
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace, marker)
    pod.server.forget_memory()
    pod.until_gone(marker)
    assert pod.server.read(sequence, keyspace)["hits"] == CHUNKS, "the tier has it"
    assert pod.marked(marker) > 0
    pod.gate.allow()
    pod.until_erased(keyspace)
    answer = pod.gate.erased(keyspace)
    assert (answer.deleted.blocks, answer.remaining.blocks) == (CHUNKS, 0)
    pod.until_gone(marker)


def test_blocks_that_wait_for_a_slow_tier_go_when_their_keyspace_leaves_the_policy(
    pod: Pod, sequence: int, keyspace: str
) -> None:
    marker = os.urandom(16)
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace, os.urandom(16))
    pod.redis.freeze()
    assert pod.server.store_marked(sequence + 1, keyspace, marker)["stored"]
    pod.until_taken_up(CHUNKS)
    pod.gate.allow()
    answer = pod.gate.erased(keyspace)
    assert answer.deleted.blocks + answer.remaining.blocks == 2 * CHUNKS, "none is left out, in use or not"
    pod.until_gone(marker)
    pod.redis.thaw()
    pod.until_erased(keyspace)
    answer = pod.gate.erased(keyspace)
    assert (answer.deleted.blocks, answer.remaining.blocks) == (2 * CHUNKS, 0)
    assert answer.residue == ""


def test_a_limit_holds_for_what_shared_tiers_bring_in_too(pod: Pod, sequence: int, keyspace: str) -> None:
    pod.gate.allow(keyspace)
    for number in range(4):
        pod.store(sequence + number, keyspace, os.urandom(16))
    # What another test has left goes in the background, and what is stored is counted there.
    until(lambda: [(row.scope, row.blocks) for row in pod.gate.state().usage] == [(keyspace[:12], 4 * CHUNKS)])
    limit_bytes = pod.gate.state().usage[0].used_bytes // 4
    pod.server.forget_memory()
    pod.gate.enforce({keyspace: (EnforcedBudget("dram", limit_bytes=limit_bytes),)})
    for number in range(4):
        assert pod.server.read(sequence + number, keyspace)["hits"] == CHUNKS
    give_up_at_s = time.monotonic() + WITHIN_S
    while sum(row.used_bytes for row in pod.gate.state().usage) > limit_bytes:
        assert time.monotonic() < give_up_at_s, pod.gate.state()
        time.sleep(0.02)


def test_without_encryption_a_search_finds_blocks_in_the_tiers_server(pod: Pod, sequence: int, keyspace: str) -> None:
    """The same search that finds none where a tier encrypts (`test_encryption`)."""
    marker = os.urandom(16)
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace, marker)
    assert memory_scan.in_process(pod.redis.pid, [marker])[0] > 0


@pytest.mark.parametrize("when", ["between", "reserved", "copied"])
def test_an_engine_that_freezes_before_the_roll_and_thaws_after_the_look_leaves_nothing(
    pod: Pod, sequence: int, keyspace: str, when: str
) -> None:
    """Between two stores nobody knows of it; one that is frozen within a store is waited for, and told."""
    marker = os.urandom(16)
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace, marker)
    assert pod.marked(marker) > 0, "the search finds what is there"
    assert pod.names(keyspace)
    within = {} if when == "between" else {"freeze": when}
    pod.server.freeze_engine(op="store", sequence=sequence + 1, salt=keyspace, marker=marker.hex(), **within)

    pod.gate.allow()
    pod.erase_from_tier(keyspace)
    if within:
        said = pod.erase(keyspace)
        assert said.outcome is EraseOutcome.REMAINING
        assert [tier.writing for tier in said.tiers if tier.medium == "CPU"] == [CHUNKS]
    else:
        pod.until_erased(keyspace)
        pod.until_gone(marker)
    assert pod.names(keyspace) == []

    pod.server.thaw_engine()
    pod.until_erased(keyspace)
    pod.until_gone(marker)
    assert pod.names(keyspace) == []
    assert pod.server.lookup(sequence, keyspace)["hits"] == 0
    assert pod.server.lookup(sequence + 1, keyspace)["hits"] == 0


def test_loads_and_stores_for_which_too_little_memory_is_free_make_room_and_lose_nothing(
    start_server: StartServer, tmp_path: Path, sequence: int, keyspace: str
) -> None:
    """LMCache allocates a batch of blocks together; without a mark the memory is full before anything is evicted."""
    gate, redis = GateStandIn(tmp_path), RedisProcess(tmp_path)
    redis.start()
    memory = {"tier": "dram", "high_watermark_percent": 100}
    server = start_server(tmp_path, gate, [tier(redis.port)], memory=memory, memory_gb=0.001)
    pod = Pod(server, gate, redis)
    gate.allow(keyspace)
    pod.until_open()
    pod.store(sequence, keyspace, os.urandom(16))
    total = 2 * (1 << 20) // (gate.state().usage[0].used_bytes // CHUNKS) // CHUNKS
    sequences = range(sequence, sequence + total)
    for number in sequences[1:]:
        pod.store(number, keyspace, os.urandom(16))
    for number in sequences:
        assert server.read(number, keyspace)["hits"] == CHUNKS
    counters = gate.state().counters
    assert counters["memory.evicted_room"] > CHUNKS * total
    assert "memory.allocation_failed" not in counters
    redis.kill()
