"""Memory and a shared tier as one hierarchy, on a real LMCache server: what is read, kept and counted where."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix
from kvstrata_sidecar.adapter.memory.write_back import GRACE_S
from tests.dataplane import memory_scan
from tests.dataplane.conftest import PATIENT, StartServer, tier
from tests.dataplane.fresh import CHUNKS, fresh_keyspace, fresh_sequence, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import DOMAIN, GateStandIn
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]


@dataclass
class Pod:
    """A cache container with one shared tier behind its governed memory."""

    server: LMCacheServer
    gate: GateStandIn
    redis: RedisProcess

    def store(self, sequence: int, keyspace: str, fill: int = 7) -> None:
        """Store, and wait until the tier has it."""
        before = self.count("stored")
        assert self.server.store(sequence, keyspace, fill)["stored"]
        until(lambda: self.count("stored") >= before + CHUNKS)

    def count(self, name: str) -> int:
        return self.gate.state().counters.get(f"shared.{name}", 0)

    def in_memory(self, keyspace: str) -> int:
        """How many blocks a keyspace has in the server's own memory."""
        return sum(row.blocks for row in self.gate.state().usage if row.scope == keyspace[:12])

    def uses(self, keyspace: str) -> dict[bytes, float]:
        """When the tier's order saw each block used last, by the block's name."""
        admin = self.redis.admin()
        keys = (bucket_prefix(DOMAIN, keyspace, bucket) + ":#a" for bucket in range(BUCKETS))
        return {member: score for key in keys for member, score in admin.zrange(key, 0, -1, withscores=True)}


def started(directory: Path, start_server: StartServer, memory_tier: str | None) -> Pod:
    gate = GateStandIn(directory)
    redis = RedisProcess(directory)
    redis.start()
    server = start_server(directory, gate, [tier(redis.port, **PATIENT)], memory={"tier": memory_tier})
    return Pod(server, gate, redis)


@pytest.fixture(scope="module")
def shared_pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    pod = started(tmp_path_factory.mktemp("pod"), start_server, "dram")
    yield pod
    pod.redis.kill()


@pytest.fixture
def pod(shared_pod: Pod) -> Pod:
    """The pod with its tier in use."""
    until(lambda: shared_pod.gate.state().tiers[0].breaker == "closed")
    return shared_pod


@pytest.mark.claim("a block that a slower tier served is served by memory from then on")
def test_what_the_shared_tier_served_is_served_by_the_memory_from_then_on(
    pod: Pod, sequence: int, keyspace: str
) -> None:
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace)
    pod.server.forget_memory()
    first = pod.server.read(sequence, keyspace)
    assert (first["hits"], first["values"]) == (CHUNKS, [7.0])
    until(lambda: pod.in_memory(keyspace) == CHUNKS)
    loaded = pod.count("loaded")
    pod.redis.freeze()
    try:
        again = pod.server.read(sequence, keyspace)
    finally:
        pod.redis.thaw()
    assert (again["hits"], again.get("values")) == (CHUNKS, [7.0])
    assert pod.count("loaded") == loaded, "the tier was not read again"


@pytest.mark.claim("for a block in memory no other tier is asked")
def test_a_hit_in_memory_waits_for_no_other_tier(pod: Pod, sequence: int, keyspace: str) -> None:
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace)
    asked, shadowed = pod.count("lookup_hits") + pod.count("lookup_misses"), pod.count("shadowed")
    pod.redis.freeze()
    try:
        late = pod.count("late_lookup")
        assert pod.server.lookup(sequence, keyspace)["hits"] == CHUNKS
        assert pod.count("late_lookup") == late, "nobody waited for the tier"
    finally:
        pod.redis.thaw()
    until(lambda: pod.count("shadowed") == shadowed + CHUNKS)
    assert pod.count("lookup_hits") + pod.count("lookup_misses") == asked


@pytest.mark.claim("the use of a block in memory counts in slower tiers, too")
def test_a_block_that_only_memory_serves_is_used_in_the_shared_tiers_order_too(
    pod: Pod, sequence: int, keyspace: str
) -> None:
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace)
    pod.store(sequence + 1, keyspace)
    until(lambda: len(pod.uses(keyspace)) == 2 * CHUNKS)
    before, loaded = pod.uses(keyspace), pod.count("loaded")
    for _ in range(3):
        assert pod.server.read(sequence, keyspace)["hits"] == CHUNKS
    until(lambda: sum(before[name] < score for name, score in pod.uses(keyspace).items()) == CHUNKS)
    assert pod.count("loaded") == loaded
    until(lambda: pod.count("hints") >= CHUNKS)


def test_what_memory_may_not_keep_reaches_the_tier_behind_it(pod: Pod, sequence: int, keyspace: str) -> None:
    pod.gate.enforce({keyspace: (EnforcedBudget("dram", limit_bytes=0),)})
    sequences, prompts = itertools.count(sequence), 12

    def came() -> bool:
        """Whether all of some prompts came there: LMCache takes a block along only if it is not late."""
        before = pod.count("stored")
        for number in itertools.islice(sequences, prompts):
            assert pod.server.store(number, keyspace, 7)["stored"]
        until(lambda: pod.in_memory(keyspace) == 0)
        ends_s = time.monotonic() + 10
        while pod.count("stored") < before + prompts * CHUNKS and time.monotonic() < ends_s:
            time.sleep(0.02)
        return pod.count("stored") == before + prompts * CHUNKS

    until(came, pod.gate.state)


def test_blocks_that_a_slow_tier_has_yet_to_take_stay_within_the_limit(pod: Pod, sequence: int, keyspace: str) -> None:
    pod.gate.allow(keyspace)
    pod.store(sequence, keyspace)
    (limit_bytes,) = (row.used_bytes for row in pod.gate.state().usage if row.scope == keyspace[:12])
    pod.gate.enforce({keyspace: (EnforcedBudget("dram", limit_bytes=limit_bytes),)})
    pod.redis.freeze()
    try:
        for number in range(1, 4):
            pod.server.store(sequence + number, keyspace, 7)
            time.sleep(2 * GRACE_S)
            assert pod.in_memory(keyspace) <= CHUNKS, "LMCache's store loop has blocks locked that Redis does not take"
    finally:
        pod.redis.thaw()


def test_a_copy_in_memory_is_as_old_as_the_block_that_it_was_made_of(pod: Pod, sequence: int, keyspace: str) -> None:
    budgets = (EnforcedBudget("dram", retention_s=20), EnforcedBudget("shared", retention_s=3600))
    pod.gate.allow(keyspace, budgets=budgets)
    pod.store(sequence, keyspace)
    stored_s = time.monotonic()
    pod.server.forget_memory()
    time.sleep(max(0.0, stored_s + 10 - time.monotonic()))
    read_s = time.monotonic()
    assert pod.server.read(sequence, keyspace)["hits"] == CHUNKS
    until(lambda: pod.in_memory(keyspace) == CHUNKS)
    until(lambda: pod.in_memory(keyspace) == 0)
    assert time.monotonic() < read_s + 20, "its retention did not begin anew"


def test_without_a_memory_tier_nothing_that_was_loaded_stays(start_server: StartServer, tmp_path: Path) -> None:
    """Its memory is a passage: a copy is freed by the last read, and overwritten."""
    pod = started(tmp_path, start_server, None)
    try:
        until(lambda: pod.gate.state().tiers[0].breaker == "closed")
        keyspace, sequence, marker = fresh_keyspace(), fresh_sequence(), os.urandom(16)
        pod.gate.allow(keyspace)
        assert pod.server.store_marked(sequence, keyspace, marker)["stored"]
        until(lambda: pod.count("stored") == CHUNKS)
        pod.server.forget_memory()

        def marked() -> int:
            return memory_scan.in_process(pod.server.process.pid, [marker])[0]

        until(lambda: marked() == 0)
        assert pod.server.hold(sequence, keyspace) == CHUNKS, "the tier has it"
        assert marked() > 0
        pod.server.let_go(sequence, keyspace)
        until(lambda: marked() == 0)
    finally:
        pod.redis.kill()
