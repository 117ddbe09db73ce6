"""A tier's driver on a Redis Cluster: blocks on every server, and where each of them is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvstrata.contract.store.redis_keys import bucket_prefix
from kvstrata_sidecar.adapter.redis.client.slots import SLOTS, slot_of
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_cluster import ClusterNode, RedisCluster, until
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block

NUMBERS = list(range(0, 256, 5))
BLOCKS = [block(KEYSPACE_A, number) for number in NUMBERS]
SLACK_S = 10.0
"""What the machine may add to the longest that a lookup or a load may take."""


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
    assert time.monotonic() - started_s < driver.params.load_deadline_ms / 1000 + SLACK_S
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


def node_of_alive(cluster: RedisCluster, number: int, dead: ClusterNode, keyspace: str = KEYSPACE_A) -> bool:
    """Whether a block's server is another than the dead one."""
    slot = slot_of(bucket_prefix(DOMAIN, keyspace, number // 16).encode())
    index = cluster.primaries.index(dead)
    return not SLOTS * index // 3 <= slot < SLOTS * (index + 1) // 3
