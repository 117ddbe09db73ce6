"""A tier on a real Redis Cluster of one primary, as a managed tier with one shard has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_cluster import PATIENT_MS, RedisCluster, until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import ServerKind, on_every_server
from tests.tiers.tier_driver import VALUE_BYTES, Driver, block
from tests.tiers.tier_on_cluster import BLOCKS, NUMBERS, all_closed, begin, load_right, store_all

pytestmark = pytest.mark.redis


@pytest.fixture
def alone(tmp_path: Path, server_kind: ServerKind) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path, primaries=1, command=server_kind.command(), node_timeout_ms=PATIENT_MS)
    cluster.start()
    yield cluster
    cluster.kill()


def is_used(driver: Driver) -> bool:
    """Whether blocks that are stored come back, all of them."""
    return store_all(driver) >= 0 and load_right(driver) == [1] * len(BLOCKS)


@on_every_server
@pytest.mark.parametrize("told", [True, False], ids=["to pods of today", "to pods of before"])
def test_blocks_come_back_and_limits_hold(
    start: Callable[..., Driver], gate: GateStandIn, alone: RedisCluster, told: bool
) -> None:
    driver = start(alone.nodes[0].port, cluster=told, workers=2)
    all_closed(driver, 1)
    gate.allow(KEYSPACE_A, KEYSPACE_B)
    assert store_all(driver) == len(BLOCKS)
    assert driver.lookup(BLOCKS) == [1] * len(BLOCKS)
    assert driver.lookup([block(KEYSPACE_B, number) for number in NUMBERS]) == [0] * len(BLOCKS)
    assert load_right(driver) == [1] * len(BLOCKS)
    assert len(driver.tier.delete(BLOCKS)) == len(BLOCKS)
    limit = 10 * VALUE_BYTES
    gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=limit),))
    for one in BLOCKS:
        store_all(driver, [one])
    assert 5 <= sum(driver.lookup(BLOCKS)) <= 10
    assert driver.tier.state().errors == 0


def test_an_empty_server_in_its_place_is_used_once_it_has_the_slots(
    start: Callable[..., Driver], gate: GateStandIn, alone: RedisCluster, tmp_path: Path
) -> None:
    driver = begin(start, gate, alone)
    store_all(driver)
    (node,) = alone.nodes
    node.kill()
    until(lambda: load_right(driver) == [0] * len(BLOCKS) and driver.tier.state().breaker == "open", driver.tier.state)
    (tmp_path / f"nodes-{node.bus}.conf").unlink()
    alone.start()
    all_closed(driver, 1)
    until(lambda: is_used(driver), driver.tier.state)


@pytest.mark.parametrize("former", [True, False], ids=["which goes", "which stays away"])
def test_a_server_that_is_no_cluster_is_misses_until_the_cluster_is_there(
    start: Callable[..., Driver], gate: GateStandIn, tmp_path: Path, server_kind: ServerKind, former: bool
) -> None:
    """As at an upgrade, where the single server of an earlier version ends and a cluster of one takes its place."""
    cluster = RedisCluster(tmp_path, primaries=1, command=server_kind.command(), node_timeout_ms=PATIENT_MS)
    (node,) = cluster.nodes
    single = RedisProcess(tmp_path, port=node.port, command=server_kind.command())
    driver = start(node.port, cluster=True, workers=2)
    gate.allow(KEYSPACE_A)
    if former:
        single.start()
    for _ in range(3):
        assert load_right(driver) == [0] * len(BLOCKS)
        assert store_all(driver) == 0
    single.kill()
    cluster.start()
    try:
        all_closed(driver, 1)
        until(lambda: is_used(driver), driver.tier.state)
    finally:
        cluster.kill()
