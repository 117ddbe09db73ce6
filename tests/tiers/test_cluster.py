"""A tier on a real Redis Cluster: slots that move, servers that die and come back; right bytes or a miss, in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.bundle import TierBudget
from kvstrata.contract.keys import bucket_prefix
from kvstrata_sidecar.adapter.slots import slot_of
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_cluster import ClusterNode, RedisCluster, until
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block

pytestmark = pytest.mark.redis
NUMBERS = list(range(0, 256, 5))
BLOCKS = [block(KEYSPACE_A, number) for number in NUMBERS]
DEADLINE_S = 0.6
"""The longest that a load may take, and what the machine may add to it."""

SLACK_S = 1.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path)
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path, replicas=1)
    cluster.start()
    yield cluster
    cluster.kill()


def begin(start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster, **options: Any) -> Driver:
    driver = start(cluster.nodes[0].port, cluster=True, **{"workers": 2} | options)
    all_closed(driver, len(cluster.primaries))
    gate.allow(KEYSPACE_A, KEYSPACE_B)
    return driver


def all_closed(driver: Driver, count: int) -> None:
    def closed() -> bool:
        state = driver.tier.state()
        return (state.breaker, state.nodes, state.nodes_away) == ("closed", count, 0)

    until(closed, driver.tier.state)


def fill_of(number: int) -> int:
    return 1 + number % 250


def store_all(driver: Driver, blocks: list[Any] = BLOCKS) -> int:
    """Store each block filled with what its number says; return how many were stored."""
    views = [memoryview(bytes([fill_of(one.chunk_hash[0])]) * BLOCK_BYTES) for one in blocks]
    task_id = driver.tier.store(blocks, views)
    driver.wait(task_id)
    return driver.tier.pop_stores()[task_id].stored_bytes // BLOCK_BYTES


def load_right(driver: Driver, blocks: list[Any] = BLOCKS) -> list[int]:
    """Load blocks; what hits has to hold the right bytes, and it takes no longer than it may."""
    started_s = time.monotonic()
    hits, buffers = driver.load(blocks)
    assert time.monotonic() - started_s < DEADLINE_S + SLACK_S
    for one, hit, buffer in zip(blocks, hits, buffers, strict=True):
        assert not hit or buffer == bytes([fill_of(one.chunk_hash[0])]) * BLOCK_BYTES
    return hits


def node_of(cluster: RedisCluster, number: int, keyspace: str = KEYSPACE_A) -> ClusterNode:
    return cluster.owner(bucket_prefix(DOMAIN, keyspace, number // 16).encode())


def on(cluster: RedisCluster, node: ClusterNode) -> list[int]:
    """Which of BLOCKS belong to a server, as 0 and 1."""
    return [int(node_of(cluster, number) is node) for number in NUMBERS]


def slot_of_bucket(number: int) -> int:
    return slot_of(bucket_prefix(DOMAIN, KEYSPACE_A, number // 16).encode())


class TestAllIsWell:
    def test_blocks_spread_over_all_servers_and_come_back(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        assert store_all(driver) == len(BLOCKS)
        assert driver.lookup(BLOCKS) == [1] * len(BLOCKS)
        assert driver.lookup([block(KEYSPACE_B, number) for number in NUMBERS]) == [0] * len(BLOCKS)
        assert load_right(driver) == [1] * len(BLOCKS)
        assert all(sum(on(cluster, node)) > 0 for node in cluster.primaries)
        assert driver.tier.state().errors == 0
        assert driver.tier.counters().get("refused", 0) == 0

    def test_limits_hold_over_all_servers(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        limit = 10 * (BLOCK_BYTES + 40)
        gate.allow(KEYSPACE_A, budgets=(TierBudget("shared", limit_bytes=limit),))
        for one in BLOCKS:
            store_all(driver, [one])
        kept = sum(driver.lookup(BLOCKS))
        assert 5 <= kept <= 10
        assert driver.tier.counters()["evicted_bytes"] > 0

    def test_deletion_reaches_each_server(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        store_all(driver)
        assert len(driver.tier.delete(BLOCKS)) == len(BLOCKS)
        assert sum(driver.lookup(BLOCKS)) == 0
