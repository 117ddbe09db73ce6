"""A pool's blocks in the memory of a real LMCache server: one copy, lent to whoever may read it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion
from kvstrata.contract.policy.pools import PoolState, PoolVersion, pack_hashes
from kvstrata.contract.store.redis_keys import parse_block_key
from tests.dataplane import memory_scan
from tests.dataplane.conftest import PATIENT, StartServer, tier
from tests.dataplane.fresh import CHUNKS, fresh_keyspace, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.pool_gate import PoolGate, reader, reader_space
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

READERS = range(1, 33)
PROBE, STRANGER = 99, 98
READ_TTL_S = 30
"""Long enough for a busy machine to let go in time what is not to be lost."""


@dataclass
class Pod:
    """A cache container whose memory is a tier, with a shared tier behind it."""

    server: LMCacheServer
    gate: GateStandIn
    redis: RedisProcess

    def __post_init__(self) -> None:
        self.pools = PoolGate(self.gate)

    def publish(
        self,
        pool: str,
        hashes: bytes,
        readers: list[int],
        *,
        warming: bool = False,
        tiers: tuple[str, ...] = ("dram", "shared"),
    ) -> None:
        """Put a pool of these chunks in force, which `readers` may read and the others may not."""
        state = PoolState.WARMING if warming else PoolState.PUBLISHED
        entries = [reader(number, "docs") for number in readers]
        entries += [reader(number) for number in (PROBE, STRANGER)]
        self.pools.publish(entries, docs=(PoolVersion(pool, "r", state, hashes, tiers),))
        allowed = {one.keyspace[:12] for one in entries} | {pool[:12]}
        # What another test has left goes in the background.
        until(lambda: all(row.scope in allowed for row in self.gate.state().usage), self.gate.state)

    def withdraw(self) -> None:
        """Put a policy without the pool in force."""
        self.pools.publish([reader(number) for number in READERS])

    def warm(self, pool: str, sequence: int, marker: bytes) -> bytes:
        """Have a pool's chunks stored, and return their hashes."""
        self.publish(pool, pack_hashes([bytes(32)]), [], warming=True)
        before = self.chunks(reader_space(PROBE))
        assert self.server.store(sequence, reader_space(PROBE), 3)["stored"]
        until(lambda: len(self.chunks(reader_space(PROBE)) - before) == CHUNKS, self.gate.state)
        hashes = pack_hashes(self.chunks(reader_space(PROBE)) - before)
        self.publish(pool, hashes, [], warming=True)
        assert self.server.store_marked(sequence, pool, marker)["stored"]
        until(lambda: len(self.chunks(pool)) == CHUNKS, self.gate.state)
        return hashes

    def chunks(self, keyspace: str) -> set[bytes]:
        """What a keyspace has in the shared tier."""
        names = (parse_block_key(name.decode()) for name in self.redis.admin().scan_iter(count=1000))
        return {key.chunk_hash for key in names if key is not None and key.keyspace == keyspace}

    def count(self, name: str) -> int:
        return self.gate.state().counters.get(name, 0)

    def in_memory(self, keyspace: str) -> int:
        return sum(row.blocks for row in self.gate.state().usage if row.scope == keyspace[:12])

    def used_bytes(self) -> int:
        """What LMCache says that its memory holds."""
        managers = self.server.get("/status")["storage_manager"]["l1_manager"]
        return int(managers["memory_used_bytes"])

    def marked(self, marker: bytes) -> int:
        """How often a marker is in the server's process."""
        return memory_scan.in_process(self.server.process.pid, [marker])[0]


@pytest.fixture(scope="module")
def shared_pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    directory: Path = tmp_path_factory.mktemp("pod")
    gate, redis = GateStandIn(directory), RedisProcess(directory)
    redis.start()
    server = start_server(
        directory, gate, [tier(redis.port, **PATIENT)], memory={"tier": "dram"}, read_ttl_s=READ_TTL_S
    )
    yield Pod(server, gate, redis)
    redis.kill()


@pytest.fixture
def pod(shared_pod: Pod) -> Pod:
    """The pod with its tier in use."""
    until(lambda: shared_pod.gate.state().tiers[0].breaker == "closed", shared_pod.gate.state)
    return shared_pod


@pytest.fixture
def pool() -> str:
    return fresh_keyspace()


def finite_marker() -> bytes:
    """Return a marker that reads as numbers: a float16 whose exponent lacks its highest bit is never a NaN, which
    equals nothing.
    """
    return bytes(byte & 0xBF if index % 2 else byte for index, byte in enumerate(os.urandom(16)))


def test_all_readers_are_served_from_the_pools_one_copy_in_memory(pod: Pod, sequence: int, pool: str) -> None:
    marker = finite_marker()
    pod.publish(pool, pod.warm(pool, sequence, marker), [*READERS])
    until(lambda: pod.in_memory(pool) == CHUNKS, pod.gate.state)
    used, copies, loaded, lent = pod.used_bytes(), pod.marked(marker), pod.count("shared.loaded"), lent_blocks(pod)
    for number in READERS:
        assert pod.server.hold(sequence, reader_space(number)) == CHUNKS
    assert pod.count("memory.loans") == CHUNKS * len(READERS)
    assert pod.used_bytes() == used, "not a byte more, all of them reading at once"
    assert pod.marked(marker) <= copies
    assert pod.server.lookup(sequence, reader_space(STRANGER))["hits"] == 0
    values = pod.server.read(sequence, reader_space(1))["values"]
    assert values == pod.server.read(sequence, pool)["values"], "the pool's bytes, not the probe's"
    for number in READERS:
        pod.server.let_go(sequence, reader_space(number))
    until(lambda: pod.count("memory.loans") == 0, pod.gate.state)
    assert lent_blocks(pod) - lent == CHUNKS * len(READERS), "one that is lent already is not lent again"
    assert pod.count("shared.loaded") == loaded
    assert [pod.in_memory(reader_space(number)) for number in READERS] == [0] * len(READERS)
    assert pod.in_memory(pool) == CHUNKS


def lent_blocks(pod: Pod) -> int:
    return pod.count("memory.lent_blocks")


def test_a_pool_that_is_withdrawn_is_read_to_the_end_and_then_gone_from_the_process(
    pod: Pod, sequence: int, pool: str
) -> None:
    marker = os.urandom(16)
    pod.publish(pool, pod.warm(pool, sequence, marker), [1, 2])
    for number in (1, 2):
        assert pod.server.hold(sequence, reader_space(number)) == CHUNKS
    pod.withdraw()
    assert pod.gate.erased(pool).remaining.blocks == CHUNKS
    assert pod.server.lookup(sequence, reader_space(1))["hits"] == 0, "a request that begins now gets nothing"
    pod.server.let_go(sequence, reader_space(1))
    assert pod.gate.erased(pool).remaining.blocks == CHUNKS
    assert pod.marked(marker) > 0
    pod.server.let_go(sequence, reader_space(2))
    until(lambda: pod.gate.erased(pool).remaining.blocks == 0, pod.gate.state)
    assert pod.gate.erased(pool).deleted.blocks == CHUNKS
    until(lambda: pod.marked(marker) == 0, pod.gate.state)


def test_what_comes_from_a_shared_tiers_pool_is_the_pools_own_in_memory_too(pod: Pod, sequence: int, pool: str) -> None:
    marker = os.urandom(16)
    hashes = pod.warm(pool, sequence, marker)
    pod.publish(pool, hashes, [1, 2, 3])
    pod.server.forget_memory()
    until(lambda: pod.marked(marker) == 0, pod.gate.state)
    before, hits = pod.used_bytes(), pod.count("shared.pool_hits")
    assert pod.server.hold(sequence, reader_space(1)) == CHUNKS
    used, copies = pod.used_bytes() - before, pod.marked(marker)
    assert copies > 0
    for number in (2, 3):
        assert pod.server.hold(sequence, reader_space(number)) == CHUNKS
    assert pod.used_bytes() - before == used
    assert pod.marked(marker) <= copies
    assert pod.count("shared.pool_hits") == hits + CHUNKS, "only the first asked for it there"
    for number in (1, 2, 3):
        pod.server.let_go(sequence, reader_space(number))
    spaces = [pool, *(reader_space(number) for number in (1, 2, 3))]
    until(lambda: [pod.in_memory(space) for space in spaces] == [CHUNKS, 0, 0, 0], pod.gate.state)
    assert pod.used_bytes() - before == used
    pod.withdraw()
    until(lambda: pod.marked(marker) == 0, pod.gate.state)


def test_of_a_pool_that_is_kept_in_a_shared_tier_alone_nothing_stays_in_memory(
    pod: Pod, sequence: int, pool: str
) -> None:
    marker = os.urandom(16)
    hashes = pod.warm(pool, sequence, marker)
    pod.publish(pool, hashes, [1, 2], tiers=("shared",))
    pod.server.forget_memory()
    until(lambda: pod.marked(marker) == 0, pod.gate.state)
    for number in (1, 2):
        # A lookup that is late on a busy machine is a miss.
        until(lambda number=number: pod.server.hold(sequence, reader_space(number)) == CHUNKS, pod.gate.state)
        assert pod.marked(marker) > 0
        pod.server.let_go(sequence, reader_space(number))
        until(lambda: pod.marked(marker) == 0, pod.gate.state)


def test_an_engine_that_dies_with_loans_leaves_nothing_behind(pod: Pod, sequence: int, pool: str) -> None:
    pod.publish(pool, pod.warm(pool, sequence, os.urandom(16)), [1, 2])
    used = pod.used_bytes()
    for number in (1, 2):
        assert pod.server.hold(sequence, reader_space(number)) == CHUNKS
    pod.server.kill_engine()
    died_s = time.monotonic()
    until(lambda: pod.count("memory.loans") == 0, pod.gate.state)
    assert time.monotonic() > died_s + READ_TTL_S / 2, "its locks had to run out"
    assert pod.used_bytes() == used
    pod.server.attach_engine_stand_in()
    pod.gate.write_freshness()
    assert pod.server.read(sequence, reader_space(1))["hits"] == CHUNKS
    pod.withdraw()
    until(lambda: pod.in_memory(pool) == 0, pod.gate.state)


def test_a_memory_that_is_emptied_by_force_gives_back_what_was_lent(pod: Pod, sequence: int, pool: str) -> None:
    marker = os.urandom(16)
    pod.publish(pool, pod.warm(pool, sequence, marker), [1, 2])
    for number in (1, 2):
        assert pod.server.hold(sequence, reader_space(number)) == CHUNKS
    pod.server.forget_memory()
    until(lambda: pod.used_bytes() == 0, lambda: pod.server.get("/status"))
    until(lambda: pod.marked(marker) == 0, pod.gate.state)
    until(lambda: pod.count("memory.loans") == 0, pod.gate.state)
    assert pod.server.get("/status")["is_healthy"]
    for number in (1, 2):
        pod.server.let_go(sequence, reader_space(number))


@pytest.mark.parametrize("withdrawn", [False, True])
@pytest.mark.parametrize("pause_s", [0.0, 1.5])
def test_a_memory_that_is_emptied_by_force_after_a_pool_was_read_is_free(
    pod: Pod, sequence: int, pool: str, pause_s: float, withdrawn: bool
) -> None:
    pod.publish(pool, pod.warm(pool, sequence, os.urandom(16)), [1, 2])
    for number in (1, 2):
        assert pod.server.read(sequence, reader_space(number))["hits"] == CHUNKS
    time.sleep(pause_s)
    if withdrawn:
        pod.withdraw()
    pod.server.forget_memory()
    until(lambda: pod.used_bytes() == 0, lambda: pod.server.get("/status"))


def test_what_a_shared_tier_lost_of_a_pool_comes_back_from_memory_when_somebody_asks(
    pod: Pod, sequence: int, pool: str
) -> None:
    pod.publish(pool, pod.warm(pool, sequence, os.urandom(16)), [1])
    until(lambda: pod.in_memory(pool) == CHUNKS, pod.gate.state)
    pod.redis.admin().flushall()

    def told() -> PoolHolding:
        pod.gate.write_freshness()
        time.sleep(0.5)
        return pod.gate.put(PoolQuestion(pool), PoolHolding)

    assert [(one.name, one.stored) for one in told().tiers] == [("dram", CHUNKS), ("shared", 0)]
    assert pod.server.store(sequence, pool, 7)["stored"], "as an engine does that computes it anew"
    assert pod.chunks(pool) == set(), "LMCache has it in memory, and writes nothing"
    until(lambda: told().complete, pod.gate.state)
    assert len(pod.chunks(pool)) == CHUNKS
    assert pod.count("memory.offered_again") == CHUNKS
