"""A tier on a real Redis Cluster: blocks on all its servers, limits and revocations over them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.redis_keys import revoked_key
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, KEYSPACE_UNKNOWN, GateStandIn
from tests.tiers.redis_cluster import RedisCluster, until
from tests.tiers.server_kinds import on_every_server
from tests.tiers.tier_driver import VALUE_BYTES, Driver, block
from tests.tiers.tier_on_cluster import (
    BLOCKS,
    NUMBERS,
    all_closed,
    begin,
    load_right,
    node_of,
    node_of_alive,
    on,
    store_all,
)

pytestmark = [
    pytest.mark.redis,
    pytest.mark.claim("a tier on a Redis Cluster has its blocks, limits and revocations on all servers"),
]


@on_every_server
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
        limit = 10 * VALUE_BYTES
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=limit),))
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


class TestRevocation:
    def test_a_keyspace_that_was_never_cleared_is_refused_while_the_set_of_revoked_ones_cannot_be_asked(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        home = cluster.owner(revoked_key(DOMAIN).encode())
        elsewhere = [n for n in range(256) if node_of(cluster, n) is not home]
        known = [block(KEYSPACE_A, n) for n in elsewhere[:20]]
        assert store_all(driver, known) == len(known)
        home.kill()
        until(lambda: load_right(driver) is not None and driver.tier.state().nodes_away == 1, driver.tier.state)
        assert driver.lookup(known) == [1] * len(known), "it was cleared before"
        later = KEYSPACE_UNKNOWN
        gate.allow(KEYSPACE_A, later)
        new = [block(later, n) for n in range(256) if node_of_alive(cluster, n, home, later)]
        assert store_all(driver, new[:20]) == 0
        assert driver.lookup(new[:20]) == [0] * 20
        home.start()
        all_closed(driver, 3)
        until(lambda: store_all(driver, new[:20]) == 20, driver.tier.counters)

    def test_a_revoked_keyspace_is_refused_from_the_first_use_on(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        home = cluster.owner(revoked_key(DOMAIN).encode())
        home.ask("ZADD", revoked_key(DOMAIN), 1, KEYSPACE_A)
        driver = begin(start, gate, cluster)
        assert store_all(driver) == 0
        assert driver.lookup(BLOCKS) == [0] * len(BLOCKS)
        assert driver.refused("revoked") >= len(BLOCKS)
