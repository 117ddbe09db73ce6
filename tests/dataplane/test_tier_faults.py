"""The real LMCache server on a real cluster whose slots move and servers die, and on replies that break off or lie."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.store.redis_keys import bucket_prefix
from kvstrata_sidecar.adapter.redis.client.slots import slot_of
from tests.dataplane.conftest import PATIENT, StartServer, tier
from tests.dataplane.fresh import BOUND_MS
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.faulty_proxy import Fault, FaultyProxy
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, GateStandIn
from tests.tiers.redis_cluster import PATIENT_MS, RedisCluster
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

CHUNKS = 4
_sequences = itertools.count(1)


@dataclass
class Pod:
    """A cache container and its gate."""

    server: LMCacheServer
    gate: GateStandIn

    def state(self) -> Any:
        return self.gate.state().tiers[0]

    def until(self, condition: Callable[[Any], bool]) -> None:
        give_up_at_s = time.monotonic() + 60
        while not condition(state := self.state()):
            assert time.monotonic() < give_up_at_s, state
            time.sleep(0.02)

    def store(self, sequence: int, fill: int) -> int:
        """Store, and wait until the tier has taken or refused each chunk; return how many it took."""
        before = self.state()
        assert self.server.store(sequence, KEYSPACE_A, fill)["stored"]
        self.until(lambda now: now.stored + now.refused + now.errors >= before.stored + before.refused + CHUNKS)
        return int(self.state().stored - before.stored)

    def read(self, sequence: int, fill: int) -> int:
        """Read from the tier alone: in time, and what hits is right; return how many chunks hit."""
        self.server.forget_memory()
        answer = self.server.read(sequence, KEYSPACE_A)
        assert answer["ms"] < BOUND_MS
        assert answer.get("values", [fill]) in ([], [float(fill)])
        return int(answer["hits"])

    def keep(self, sequence: int, fill: int) -> None:
        """Store until the tier has all of it; what an earlier fault left under way may take a moment to end."""
        give_up_at_s = time.monotonic() + 60
        while self.read(sequence, fill) != CHUNKS:
            assert time.monotonic() < give_up_at_s, self.state()
            self.server.store(sequence, KEYSPACE_A, fill)
            time.sleep(0.1)


def start_pod(start_server: StartServer, directory: Path, tiers: dict[str, Any]) -> Pod:
    gate = GateStandIn(directory)
    pod = Pod(start_server(directory, gate, [tiers]), gate)
    pod.gate.allow(KEYSPACE_A)
    return pod


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"), node_timeout_ms=PATIENT_MS)
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture(scope="module")
def pod(cluster: RedisCluster, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Pod:
    shared = tier(cluster.nodes[0].port, cluster=True, **PATIENT)
    pod = start_pod(start_server, tmp_path_factory.mktemp("pod"), shared)
    pod.until(lambda state: state.breaker == "closed" and (state.nodes, state.nodes_away) == (3, 0))
    return pod


@pytest.fixture(scope="module")
def shared(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pod, FaultyProxy]]:
    redis = RedisProcess(tmp_path_factory.mktemp("redis"))
    redis.start()
    proxy = FaultyProxy(redis.port)
    yield start_pod(start_server, tmp_path_factory.mktemp("pod"), tier(proxy.port)), proxy
    proxy.close()
    redis.kill()


@pytest.fixture
def proxied(shared: tuple[Pod, FaultyProxy]) -> Iterator[tuple[Pod, FaultyProxy]]:
    """A pod and the proxy before its tier, whole again after a test that fails."""
    yield shared
    shared[1].fault = None


class TestACluster:
    def test_blocks_that_have_moved_to_another_server_are_found_there(self, pod: Pod, cluster: RedisCluster) -> None:
        sequence = next(_sequences)
        assert pod.store(sequence, 7) == CHUNKS
        for bucket in range(16):
            key = bucket_prefix(DOMAIN, KEYSPACE_A, bucket).encode()
            source = cluster.owner(key)
            target = cluster.primaries[(cluster.primaries.index(source) + 1) % 3]
            cluster.begin_move(slot_of(key), source, target)
            cluster.move_keys(slot_of(key), source, target, 1)
            assert pod.read(sequence, 7) == CHUNKS, "half of it is there"
            while cluster.move_keys(slot_of(key), source, target):
                pass
            cluster.end_move(slot_of(key), target)
        assert pod.read(sequence, 7) == CHUNKS
        assert pod.state().errors == 0
        assert pod.store(next(_sequences), 8) == CHUNKS

    def test_a_server_that_was_killed_costs_its_own_blocks_until_it_is_back(
        self, pod: Pod, cluster: RedisCluster
    ) -> None:
        sequence = next(_sequences)
        pod.keep(sequence, 9)
        dead = cluster.nodes[0]
        dead.kill()
        for _ in range(5):
            pod.read(sequence, 9)
            pod.store(next(_sequences), 1)
        pod.until(lambda state: state.nodes_away == 1)
        assert pod.state().breaker == "closed"
        assert str(dead.port) in str(pod.server.get("/status"))
        assert pod.server.get("/status")["is_healthy"]
        dead.start()
        pod.until(lambda state: state.nodes_away == 0)
        pod.keep(next(_sequences), 3)


class TestRepliesThatBreak:
    @pytest.mark.parametrize(
        "fault",
        [
            lambda data: data[: len(data) // 2],
            lambda data: data[: len(data) // 2] if len(data) > 1000 else data,
            lambda data: None,
            lambda data: data + data,
            lambda data: b"\xff\x00garbage\r\n" + data,
            lambda data: bytes(len(data)),
            lambda data: data.replace(b"$", b"*", 1),
            lambda data: b"-MOVED 1 127.0.0.1:1\r\n" + data,
        ],
        ids=["half", "half a block", "closed", "twice", "garbage before", "zeros", "another kind", "a redirection"],
    )
    def test_a_broken_reply_is_a_miss_in_time_and_the_next_right_one_is_used(
        self, proxied: tuple[Pod, FaultyProxy], fault: Fault
    ) -> None:
        pod, proxy = proxied
        pod.until(lambda state: state.breaker == "closed")
        sequence = next(_sequences)
        pod.keep(sequence, 5)
        proxy.fault = fault
        for _ in range(4):
            pod.read(sequence, 5)
            assert pod.server.store(next(_sequences), KEYSPACE_A, 6)["stored"]
        proxy.fault = None
        pod.until(lambda state: state.breaker == "closed")
        pod.keep(sequence, 5)
        assert pod.server.get("/status")["is_healthy"]
