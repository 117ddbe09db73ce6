"""A fresh LMCache server loads what other pods used last into its memory, before anybody asks it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix
from tests.dataplane.conftest import PATIENT, PATIENT_FILES, StartServer, file_tier, tier
from tests.dataplane.fresh import CHUNKS, fresh_keyspace, fresh_sequence, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.faulty_proxy import FaultyProxy
from tests.tiers.gate_stand_in import DOMAIN, GateStandIn
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

CHUNK_BYTES = 16 * 1024
PROMPT_BYTES = CHUNKS * CHUNK_BYTES
PROMPTS = 6
WITHIN_S = 60.0
TIMEOUT_S = 600
"""Far beyond what warming up takes: nothing ends because its time is over."""


@dataclass
class Pod:
    """A cache container with Redis behind its governed memory."""

    server: LMCacheServer
    gate: GateStandIn

    def count(self, name: str) -> int:
        return self.gate.state().counters.get(name, 0)

    def in_memory(self, keyspace: str) -> int:
        """How many blocks a keyspace has in the server's own memory."""
        rows = self.gate.state().usage
        return sum(row.blocks for row in rows if row.scope == keyspace[:12] and row.tier == "dram")

    def until_warm(self) -> None:
        until(lambda: not self.gate.state().warming)

    def served_from_memory(self, redis: RedisProcess, keyspace: str, sequences: list[int]) -> list[int]:
        """Return how many chunks of each prompt are served while Redis stands still."""
        redis.freeze()
        try:
            return [self.server.read(sequence, keyspace)["hits"] for sequence in sequences]
        finally:
            redis.thaw()


def uses(redis: RedisProcess, keyspace: str) -> dict[bytes, float]:
    """When the tier's order saw each block used last, by the block's name."""
    admin = redis.admin()
    keys = (bucket_prefix(DOMAIN, keyspace, bucket) + ":#a" for bucket in range(BUCKETS))
    return {member: score for key in keys for member, score in admin.zrange(key, 0, -1, withscores=True)}


@dataclass
class Elsewhere:
    """A pod that has been serving for a while."""

    pod: Pod
    redis: RedisProcess

    def use(
        self, keyspace: str, prompts: int, budgets: tuple[EnforcedBudget, ...] = (), hot: tuple[int, ...] = ()
    ) -> list[int]:
        """Store prompts, then read those that `hot` numbers; return the prompts' sequences when Redis knows of it."""
        sequences = [fresh_sequence() for _ in range(prompts)]
        until(lambda: self.pod.gate.state().tiers[0].breaker == "closed")
        self.pod.gate.allow(keyspace, budgets=budgets)
        before = self.pod.count("shared.stored")
        for number, sequence in enumerate(sequences):
            assert self.pod.server.store(sequence, keyspace, number + 1)["stored"]
        until(lambda: self.pod.count("shared.stored") == before + prompts * CHUNKS)
        until(lambda: len(uses(self.redis, keyspace)) == prompts * CHUNKS)
        stored = uses(self.redis, keyspace)
        for number in hot:
            assert self.pod.server.read(sequences[number], keyspace)["hits"] == CHUNKS
        until(
            lambda: sum(stored[name] < used for name, used in uses(self.redis, keyspace).items()) == len(hot) * CHUNKS
        )
        return sequences


@pytest.fixture(scope="module")
def elsewhere(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    directory = tmp_path_factory.mktemp("elsewhere")
    gate, redis = GateStandIn(directory), RedisProcess(directory)
    redis.start()
    server = start_server(directory, gate, [tier(redis.port, **PATIENT)], memory={"tier": "dram"})
    yield Elsewhere(Pod(server, gate), redis)
    redis.kill()


@pytest.fixture
def start_fresh(start_server: StartServer, tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    """Start a pod that warms its memory up; it waits for a policy."""
    started: list[LMCacheServer] = []

    def start(port: int, budget_bytes: int, *, files: Path | None = None, **options: Any) -> Pod:
        gate = GateStandIn(tmp_path)
        tiers = [*([file_tier(files, **PATIENT_FILES)] if files else []), tier(port, **options)]
        memory = {"tier": "dram", "warmup": {"bytes": budget_bytes, "timeout_s": TIMEOUT_S}}
        started.append(start_server(tmp_path, gate, tiers, memory=memory))
        return Pod(started[-1], gate)

    yield start
    for server in started:
        server.stop()


@pytest.mark.claim("a new cache server has the blocks that were used last in its memory")
def test_a_fresh_server_loads_what_was_used_last_within_its_budget(
    elsewhere: Elsewhere, start_fresh: Callable[..., Pod], keyspace: str
) -> None:
    sequences = elsewhere.use(keyspace, PROMPTS, hot=(1, 3))
    pod = start_fresh(elsewhere.redis.port, 2 * PROMPT_BYTES + CHUNK_BYTES // 2, **PATIENT)
    until(lambda: pod.gate.state().tiers[0].breaker == "closed")
    assert pod.gate.state().warming
    before = uses(elsewhere.redis, keyspace)
    pod.gate.allow(keyspace)
    pod.until_warm()
    assert pod.count("memory.warmed_blocks") == 2 * CHUNKS
    assert pod.count("memory.warmed_bytes") == 2 * PROMPT_BYTES
    until(lambda: pod.in_memory(keyspace) == 2 * CHUNKS)
    until(lambda: pod.server.get("/status")["storage_manager"]["l1_manager"]["read_locked_count"] == 0)
    time.sleep(2.5)
    assert uses(elsewhere.redis, keyspace) == before, "being warmed with is no use"
    served = pod.served_from_memory(elsewhere.redis, keyspace, sequences)
    assert served == [CHUNKS if number in (1, 3) else 0 for number in range(PROMPTS)]


def test_a_scope_that_may_keep_nothing_in_memory_gets_nothing_and_a_guarantee_comes_first(
    elsewhere: Elsewhere, start_fresh: Callable[..., Pod]
) -> None:
    denied, guaranteed, other = fresh_keyspace(), fresh_keyspace(), fresh_keyspace()
    for keyspace in (guaranteed, other, denied):
        elsewhere.use(keyspace, 2)
    pod = start_fresh(elsewhere.redis.port, 3 * PROMPT_BYTES, **PATIENT)
    until(lambda: pod.gate.state().tiers[0].breaker == "closed")
    pod.gate.enforce(
        {
            denied: (EnforcedBudget("dram", limit_bytes=0),),
            guaranteed: (EnforcedBudget("dram", guaranteed_bytes=2 * PROMPT_BYTES),),
            other: (),
        }
    )
    pod.until_warm()
    until(lambda: (pod.in_memory(guaranteed), pod.in_memory(other)) == (2 * CHUNKS, CHUNKS))
    assert pod.in_memory(denied) == 0
    assert pod.count("memory.warmed_blocks") == 3 * CHUNKS
    assert pod.count("memory.evicted_limit") == 0, "nothing came to be thrown out again"


class Stalled:
    """A way to Redis that stands still when some blocks have passed, until it is released."""

    def __init__(self, redis: RedisProcess, pass_bytes: int) -> None:
        self.proxy = FaultyProxy(redis.port)
        self.reached, self.released = threading.Event(), threading.Event()
        self._left_bytes = pass_bytes
        self.proxy.fault = self._pass

    def _pass(self, data: bytes) -> bytes:
        if self._left_bytes <= 0:
            self.reached.set()
            self.released.wait()
        elif len(data) > 4096:
            self._left_bytes -= len(data)
        return data


def test_a_scope_that_leaves_the_policy_in_the_midst_of_it_is_left_alone(
    elsewhere: Elsewhere, start_fresh: Callable[..., Pod]
) -> None:
    stays, leaves = fresh_keyspace(), fresh_keyspace()
    elsewhere.use(stays, 2)
    elsewhere.use(leaves, 2)
    way = Stalled(elsewhere.redis, 3 * CHUNK_BYTES)
    patient = PATIENT | {"io_timeout_ms": 25_000, "lookup_deadline_ms": 25_000, "load_deadline_ms": 25_000}
    pod = start_fresh(way.proxy.port, 4 * PROMPT_BYTES, **patient)
    try:
        until(lambda: pod.gate.state().tiers[0].breaker == "closed")
        pod.gate.allow(stays, leaves)
        assert way.reached.wait(WITHIN_S)
        assert pod.gate.state().warming
        pod.gate.allow(stays)
        loaded = pod.count("memory.warmed_blocks")
        way.released.set()
        pod.until_warm()
        until(lambda: (pod.in_memory(stays), pod.in_memory(leaves)) == (2 * CHUNKS, 0))
        assert loaded <= pod.count("memory.warmed_blocks") <= loaded + 2 * CHUNKS + 2, "no batch of it after that"
    finally:
        way.released.set()
        way.proxy.close()


def test_a_server_that_stops_to_answer_in_the_midst_of_it_holds_nobody_up(
    elsewhere: Elsewhere, start_fresh: Callable[..., Pod], keyspace: str
) -> None:
    elsewhere.use(keyspace, PROMPTS)
    way = Stalled(elsewhere.redis, 4 * CHUNK_BYTES)
    pod = start_fresh(way.proxy.port, PROMPTS * PROMPT_BYTES, **PATIENT)
    try:
        until(lambda: pod.gate.state().tiers[0].breaker == "closed")
        pod.gate.allow(keyspace)
        assert way.reached.wait(WITHIN_S)
        pod.until_warm()  # long before its time is over, or the server answers
        assert 0 < pod.count("memory.warmed_blocks") < PROMPTS * CHUNKS
        until(lambda: pod.server.get("/status")["storage_manager"]["l1_manager"]["write_locked_count"] == 0)
    finally:
        way.released.set()
        way.proxy.close()


def test_a_server_that_starts_again_loads_from_its_own_files_though_redis_is_away(
    elsewhere: Elsewhere, start_fresh: Callable[..., Pod], keyspace: str, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    pod = start_fresh(1, 2 * PROMPT_BYTES, files=disk)
    until(lambda: pod.gate.state().tiers[0].breaker == "closed" and not pod.gate.state().tiers[0].recovering)
    pod.gate.allow(keyspace)
    sequences = [fresh_sequence() for _ in range(4)]
    for number, sequence in enumerate(sequences):
        assert pod.server.store(sequence, keyspace, number + 1)["stored"]
        until(lambda stored=(number + 1) * CHUNKS: pod.count("disk.stored") == stored)  # type: ignore[misc]
    pod.until_warm()
    pod.server.kill_and_start_again()
    until(lambda: pod.gate.state().tiers[0].breaker == "closed" and not pod.gate.state().tiers[0].recovering)
    pod.gate.allow(keyspace)
    pod.until_warm()
    assert pod.count("memory.warmed_blocks") == 2 * CHUNKS
    assert pod.count("disk.loaded") == 2 * CHUNKS
    until(lambda: pod.in_memory(keyspace) == 2 * CHUNKS)
    answers = [pod.server.read(sequence, keyspace) for sequence in sequences[2:]]
    assert [(answer["hits"], answer["values"]) for answer in answers] == [(CHUNKS, [3.0]), (CHUNKS, [4.0])]
    assert pod.count("disk.loaded") == 2 * CHUNKS, "the memory had them"
