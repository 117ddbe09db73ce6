"""Readers of a pool on a real LMCache server, one salt each: one copy in the shared tier, whoever asks and stores."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion
from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.policy.pools import PoolState, PoolVersion, pack_hashes
from kvstrata.contract.store.redis_keys import parse_block_key
from tests.dataplane.conftest import PATIENT, StartServer, tier
from tests.dataplane.fresh import CHUNKS, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.pool_gate import POOL, PoolGate, reader, reader_space
from tests.tiers.redis_cluster import PATIENT_MS, RedisCluster
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

SALTS = range(1, 65)
PROBE = 99
_sequences = itertools.count(7_001)


@dataclass
class Pod:
    """A cache container, what its gate says, and the servers of its shared tier."""

    server: LMCacheServer
    gate: GateStandIn
    servers: list[RedisProcess]
    encrypted: bool = False

    def __post_init__(self) -> None:
        self.pools = PoolGate(self.gate)
        self._keys = {number: (DataKey(1, os.urandom(32)),) for number in (0, *SALTS, PROBE)}
        until(lambda: self.gate.state().tiers[0].breaker == "closed", self.gate.state)

    def publish(self, readers: list[int], others: list[int], hashes: bytes, *, warming: bool = False) -> None:
        """Put a pool of these chunks in force, which `readers` may read and `others` may not."""
        state = PoolState.WARMING if warming else PoolState.PUBLISHED
        entries = [reader(number, "docs", keys=self.keys(number)) for number in readers]
        entries += [reader(number, keys=self.keys(number)) for number in others]
        self.pools.publish(entries, docs=(PoolVersion(POOL, "r", state, hashes, ("shared",), keys=self.keys(0)),))

    def keys(self, number: int) -> tuple[DataKey, ...]:
        return self._keys[number] if self.encrypted else ()

    def places(self) -> dict[str, set[bytes]]:
        """The chunks of each keyspace in the shared tier."""
        found: dict[str, set[bytes]] = {}
        for one in self.servers:
            for name in one.admin().scan_iter(count=1000):
                key = parse_block_key(name.decode())
                if key is not None:
                    found.setdefault(key.keyspace, set()).add(key.chunk_hash)
        return found

    def value_bytes(self) -> Counter[str]:
        """How many bytes of values each keyspace has there."""
        found: Counter[str] = Counter()
        for one in self.servers:
            admin = one.admin()
            for name in admin.scan_iter(count=1000):
                key = parse_block_key(name.decode())
                if key is not None:
                    found[key.keyspace] += admin.strlen(name)
        return found

    def count(self, name: str) -> int:
        return self.gate.state().counters.get(f"shared.{name}", 0)

    def hashes_of(self, sequence: int) -> bytes:
        """The hashes of a sequence's chunks: what a tenant that stores it names its blocks by."""
        self.publish([], [PROBE], pack_hashes([bytes(32)]))
        before = self.places().get(reader_space(PROBE), set())
        assert self.server.store(sequence, reader_space(PROBE), 3)["stored"]
        until(lambda: len(self.places().get(reader_space(PROBE), set()) - before) == CHUNKS, self.places)
        return pack_hashes(self.places()[reader_space(PROBE)] - before)

    def warm(self, sequence: int, hashes: bytes) -> None:
        """Have the pool's chunks stored, by whom nobody reads yet."""
        self.publish([], [], hashes, warming=True)
        assert self.server.store(sequence, POOL, 7)["stored"]
        until(lambda: len(self.places().get(POOL, set())) == CHUNKS, self.places)
        self.server.forget_memory()


@pytest.mark.parametrize(
    "encrypted",
    [False, pytest.param(True, marks=pytest.mark.claim("64 readers on one LMCache server share one copy"))],
    ids=["plain", "encrypted"],
)
def test_64_readers_share_one_copy_in_the_tier_and_keep_what_is_their_own(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory, encrypted: bool
) -> None:
    directory: Path = tmp_path_factory.mktemp("pools")
    gate, redis = GateStandIn(directory), RedisProcess(directory)
    redis.start()
    try:
        options = {"encryption": "Required"} if encrypted else {}
        server = start_server(directory, gate, [tier(redis.port, **PATIENT, **options)])
        pod = Pod(server, gate, [redis], encrypted)
        sequence, own = next(_sequences), next(_sequences) + 1000
        hashes = pod.hashes_of(sequence)
        pod.warm(sequence, hashes)
        pod.publish([*SALTS], [PROBE], hashes)
        for number in SALTS:
            read = pod.server.read(sequence, reader_space(number))
            assert (read["hits"], read["values"]) == (CHUNKS, [7.0])
        assert pod.server.store(own, reader_space(1), 5)["stored"]
        until(lambda: len(pod.places().get(reader_space(1), ())) == CHUNKS, pod.places)
        pod.server.forget_memory()
        assert pod.server.read(own, reader_space(1))["values"] == [5.0]
        assert pod.server.read(own, reader_space(2))["hits"] == 0
        assert pod.server.read(sequence, reader_space(PROBE))["values"] == [3.0], "its own, as it reads no pool"
        assert (pod.count("pool_hits"), pod.count("errors")) == (CHUNKS * len(SALTS), 0)
        assert {keyspace: len(chunks) for keyspace, chunks in pod.places().items()} == {
            POOL: CHUNKS, reader_space(PROBE): CHUNKS, reader_space(1): CHUNKS
        }  # fmt: skip
        assert len(set(pod.value_bytes().values())) == 1, "64 readers cost what one does"

        # An engine that computed the pool's tokens all the same stores nothing, and what it stored nobody else gets.
        assert pod.server.store(sequence, reader_space(2), 9)["stored"]
        until(lambda: pod.count("stores_in_pool") == CHUNKS, gate.state)
        pod.server.forget_memory()
        for number in (2, 3):
            assert pod.server.read(sequence, reader_space(number))["values"] == [7.0]
        assert reader_space(2) not in pod.places()

        pod.publish([3], [2], hashes)
        assert pod.server.read(sequence, reader_space(2))["hits"] == 0
        assert pod.server.read(sequence, reader_space(3))["hits"] == CHUNKS
    finally:
        redis.kill()


def test_what_comes_under_a_pools_salt_and_is_none_of_its_chunks_stays_nowhere(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory: Path = tmp_path_factory.mktemp("foreign")
    gate, redis = GateStandIn(directory), RedisProcess(directory)
    redis.start()
    try:
        server = start_server(directory, gate, [tier(redis.port, **PATIENT)], memory={"tier": "dram"})
        pod = Pod(server, gate, [redis])
        sequence, other = next(_sequences), next(_sequences) + 1000
        pod.warm(sequence, pod.hashes_of(sequence))
        kept = pod.places()
        assert pod.server.store(other, POOL, 9)["stored"]
        until(lambda: pod.gate.state().counters.get("memory.evicted_foreign") == CHUNKS, pod.gate.state)
        until(lambda: not any(row.scope == POOL[:12] for row in pod.gate.state().usage), pod.gate.state)
        assert pod.server.lookup(other, POOL)["hits"] == 0
        assert pod.places() == kept
    finally:
        redis.kill()


def test_readers_share_one_copy_in_a_cluster(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory: Path = tmp_path_factory.mktemp("cluster")
    gate, cluster = GateStandIn(directory), RedisCluster(directory, node_timeout_ms=PATIENT_MS)
    cluster.start()
    try:
        server = start_server(directory, gate, [tier(cluster.nodes[0].port, cluster=True, **PATIENT)])
        pod = Pod(server, gate, list(cluster.primaries))
        until(lambda: gate.state().tiers[0].nodes == len(cluster.primaries), gate.state)
        sequence = next(_sequences)
        hashes = pod.hashes_of(sequence)
        pod.warm(sequence, hashes)
        pod.publish([1, 2, 3, 4, PROBE], [], hashes)
        for number in (1, 2, 3, 4, PROBE):
            read = pod.server.read(sequence, reader_space(number))
            assert (read["hits"], read["values"]) == (CHUNKS, [7.0])
        # The probe's own copies of before go as soon as they are seen beside the pool's.
        until(lambda: {name: len(some) for name, some in pod.places().items()} == {POOL: CHUNKS}, pod.places)
    finally:
        cluster.kill()


def test_the_gate_is_told_what_memory_and_a_shared_tier_hold_of_a_pool(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory: Path = tmp_path_factory.mktemp("holdings")
    gate, redis = GateStandIn(directory), RedisProcess(directory)
    redis.start()
    try:
        server = start_server(directory, gate, [tier(redis.port, **PATIENT)], memory={"tier": "dram"})
        pod = Pod(server, gate, [redis])
        sequence = next(_sequences)
        hashes = pod.hashes_of(sequence)
        version = PoolVersion(POOL, "r", PoolState.WARMING, hashes, ("dram", "shared"))
        pod.pools.publish([], docs=(version,))

        def told(chunks: bytes | None = None) -> PoolHolding:
            return gate.put(PoolQuestion(POOL, chunks), PoolHolding)

        assert [(one.name, one.stored, one.expected) for one in told().tiers] == [
            ("dram", 0, CHUNKS),
            ("shared", 0, CHUNKS),
        ]
        assert len(told().missing) == CHUNKS
        assert server.store(sequence, POOL, 7)["stored"]
        until(lambda: told().complete, told)
        memory, shared = told().tiers
        assert memory.bytes > 0
        assert shared.bytes == pod.value_bytes()[POOL]
        assert told(hashes[:32]).tiers[1].expected == 1
        server.forget_memory()
        until(lambda: told().tiers[0].stored == 0, told)
        assert told().tiers[1].stored == CHUNKS
        redis.admin().flushall()
        until(lambda: told().tiers[1].stored == 0, told)
    finally:
        redis.kill()
