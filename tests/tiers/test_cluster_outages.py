"""A tier on a real Redis Cluster whose servers die, freeze and come back: right bytes or a miss, in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_cluster import PATIENT_MS, RedisCluster, until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import ServerKind, on_every_server
from tests.tiers.tier_driver import VALUE_BYTES, Driver, block
from tests.tiers.tier_on_cluster import (
    BLOCKS,
    NUMBERS,
    SLACK_S,
    all_closed,
    begin,
    load_right,
    node_of,
    node_of_alive,
    on,
    store_all,
)

pytestmark = pytest.mark.redis


@pytest.fixture
def replicated(tmp_path: Path, server_kind: ServerKind) -> Iterator[RedisCluster]:
    # A replica takes over from a server that was killed, and not from one that a busy machine starves.
    cluster = RedisCluster(tmp_path, replicas=1, command=server_kind.command(), node_timeout_ms=8_000)
    cluster.start()
    yield cluster
    cluster.kill()


class TestServersDie:
    @pytest.mark.claim("a dead server of a cluster costs its own blocks only")
    def test_a_dead_server_costs_its_own_blocks_only_and_is_named(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        store_all(driver)
        dead = node_of(cluster, NUMBERS[0])
        left = [1 - gone for gone in on(cluster, dead)]
        dead.kill()
        for _ in range(5):
            assert driver.lookup(BLOCKS) == left
            assert load_right(driver) == left
        until(lambda: driver.tier.state().nodes_away == 1, driver.tier.state)
        state = driver.tier.state()
        assert state.breaker == "closed"
        assert f"127.0.0.1:{dead.port}" in state.detail
        assert driver.tier.nodes()[f"127.0.0.1:{dead.port}"] != "closed"
        others = [one for one, there in zip(BLOCKS, left, strict=True) if there]
        driver.tier.delete(others)
        assert store_all(driver, others) == len(others)
        dead.start()
        all_closed(driver, 3)
        until(lambda: store_all(driver) >= 0 and driver.lookup(BLOCKS) == [1] * len(BLOCKS), driver.tier.counters)

    def test_a_limited_scope_stores_on_while_a_server_that_has_not_its_ledger_is_dead(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        limit = 30 * VALUE_BYTES
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=limit),))
        store_all(driver)
        home = cluster.owner(f"{{{KEYSPACE_A}}}".encode())
        dead = next(one for one in cluster.primaries if one is not home and any(on(cluster, one)))
        dead.kill()
        until(lambda: load_right(driver) is not None and driver.tier.state().nodes_away == 1, driver.tier.state)
        there = [block(KEYSPACE_A, n) for n in range(256) if node_of_alive(cluster, n, dead)]
        stored = sum(store_all(driver, [one]) for one in there[:60])
        assert stored > 30, driver.tier.counters()

    @pytest.mark.claim("a frozen server of a cluster delays no request beyond its deadline")
    def test_a_frozen_server_delays_nobody_beyond_the_deadline_and_costs_its_own_blocks_only(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        # The other servers answer within a deadline, on a busy machine too; what waits for the frozen one takes longer.
        deadline_s, hangs_s = 5, 30
        assert deadline_s + SLACK_S < hangs_s
        deadlines = {"lookup_deadline_ms": 1000 * deadline_s, "load_deadline_ms": 1000 * deadline_s}
        driver = begin(start, gate, cluster, io_timeout_ms=1000 * hangs_s, **deadlines)
        store_all(driver)
        frozen = node_of(cluster, NUMBERS[0])
        left = [1 - gone for gone in on(cluster, frozen)]
        frozen.freeze()
        for _ in range(4):
            started_s = time.monotonic()
            assert driver.lookup(BLOCKS) == left
            assert time.monotonic() - started_s < deadline_s + SLACK_S
        load_right(driver)
        until(lambda: driver.tier.state().nodes_away == 1, driver.tier.state)
        assert load_right(driver) == left
        frozen.thaw()
        until(lambda: load_right(driver) == [1] * len(BLOCKS), driver.tier.state)

    @pytest.mark.claim("a promoted replica is used without a restart")
    @on_every_server
    def test_a_promoted_replica_is_found_without_a_restart(
        self, start: Callable[..., Driver], gate: GateStandIn, replicated: RedisCluster
    ) -> None:
        cluster = replicated
        driver = begin(start, gate, cluster)
        store_all(driver)
        primary, replica = cluster.primaries[0], cluster.replicas[0]
        until(lambda: replica.admin().dbsize() == primary.admin().dbsize())
        lost = on(cluster, primary)
        assert sum(lost) > 0
        primary.kill()
        deaf_until_s = time.monotonic() + 90
        while load_right(driver) != [1] * len(BLOCKS):
            assert time.monotonic() < deaf_until_s, driver.tier.state()
            time.sleep(0.1)
        assert driver.lookup(BLOCKS) == [1] * len(BLOCKS)
        gone = [one for one, was in zip(BLOCKS, lost, strict=True) if was]
        driver.tier.delete(gone)
        assert store_all(driver, gone) == len(gone), "and it takes stores"
        primary.start()
        all_closed(driver, 3)
        assert load_right(driver) == [1] * len(BLOCKS)

    def test_a_cluster_that_is_down_at_the_start_is_used_once_it_is_up(
        self, start: Callable[..., Driver], gate: GateStandIn, tmp_path: Path
    ) -> None:
        cluster = RedisCluster(tmp_path, node_timeout_ms=PATIENT_MS)
        driver = start(cluster.nodes[1].port, cluster=True)
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        started_s = time.monotonic()
        assert driver.lookup(BLOCKS) == [0] * len(BLOCKS)
        assert time.monotonic() - started_s < SLACK_S
        until(lambda: "refused" in driver.tier.state().detail.lower(), driver.tier.state)
        cluster.start()
        all_closed(driver, 3)
        until(lambda: store_all(driver) == 0 and driver.lookup(BLOCKS) == [1] * len(BLOCKS), driver.tier.counters)
        cluster.kill()

    def test_a_server_that_is_no_cluster_is_said_so(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port, cluster=True)
        until(lambda: "cluster support disabled" in driver.tier.state().detail, driver.tier.state)
        assert driver.tier.state().breaker == "open"
        assert driver.tier.state().nodes == 0
