"""A tier on a real Redis Cluster: slots that move, servers that die and come back; right bytes or a miss, in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.bundle import TierBudget
from kvstrata.contract.keys import bucket_prefix, revoked_key
from kvstrata_sidecar.adapter.slots import SLOTS, slot_of
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_cluster import ClusterNode, RedisCluster, raw, until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import VALKEY_9, ServerKind, on_every_server
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block

pytestmark = pytest.mark.redis
NUMBERS = list(range(0, 256, 5))
BLOCKS = [block(KEYSPACE_A, number) for number in NUMBERS]
SLACK_S = 1.0
"""What the machine may add to the longest that a lookup or a load may take."""


@pytest.fixture
def cluster(tmp_path: Path, server_kind: ServerKind) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path, command=server_kind.command())
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture
def replicated(tmp_path: Path, server_kind: ServerKind) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path, replicas=1, command=server_kind.command())
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


class TestSlotsMove:
    @on_every_server
    def test_blocks_are_read_and_written_while_all_slots_of_a_server_move_to_another(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        store_all(driver)
        source, target = (
            node_of(cluster, NUMBERS[0]),
            next(one for one in cluster.primaries if one is not node_of(cluster, NUMBERS[0])),
        )
        slots = sorted({slot_of_bucket(n) for n in NUMBERS if node_of(cluster, n) is source})
        problems: list[BaseException] = []

        def migrate() -> None:
            try:
                for slot in slots:
                    cluster.move(slot, source, target)
            except BaseException as problem:
                problems.append(problem)

        moving = threading.Thread(target=migrate)
        moving.start()
        while moving.is_alive():
            load_right(driver)
            store_all(driver, BLOCKS[::7])
        moving.join()
        assert not problems, problems
        until(lambda: load_right(driver) == [1] * len(BLOCKS), driver.tier.counters)
        assert driver.lookup(BLOCKS) == [1] * len(BLOCKS)
        assert driver.tier.state().errors == 0
        assert driver.tier.state().nodes_away == 0
        driver.tier.delete(BLOCKS[:4])
        assert store_all(driver, BLOCKS[:4]) == 4, "stores go on where the slots are now"

    def test_one_lookup_may_be_sent_to_a_server_by_a_slot_that_moved_and_by_one_that_moves(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        store_all(driver)
        source = node_of(cluster, 0)
        target = next(one for one in cluster.primaries if one is not source)
        moved, moving, *_ = dict.fromkeys(slot_of_bucket(n) for n in NUMBERS if node_of(cluster, n) is source)
        cluster.begin_move(moving, source, target)
        cluster.move_keys(moving, source, target)
        cluster.move(moved, source, target)
        assert driver.lookup(BLOCKS) == [1] * len(BLOCKS)
        assert driver.tier.state().errors == 0

    def test_a_slot_on_its_way_does_not_keep_the_others_of_a_batch_from_being_stored(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster, workers=1)
        source = node_of(cluster, 0)
        target = next(one for one in cluster.primaries if one is not source)
        mine = [block(KEYSPACE_A, number) for number in range(0, 256, 16) if node_of(cluster, number) is source]
        cluster.begin_move(slot_of_bucket(0), source, target)
        assert store_all(driver, mine) == len(mine) - 1
        assert driver.tier.counters()["refused_slot_moving"] == 1

    def test_a_slot_that_has_moved_half_is_read_at_both_ends_and_takes_no_stores(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        mine = [block(KEYSPACE_A, number) for number in range(16)]
        store_all(driver, mine)
        slot, source = slot_of_bucket(0), node_of(cluster, 0)
        target = next(one for one in cluster.primaries if one is not source)
        cluster.begin_move(slot, source, target)
        went = 0
        while went < 24:
            went += cluster.move_keys(slot, source, target, 1)
            assert driver.lookup(mine) == [1] * 16, went
            assert load_right(driver, mine) == [1] * 16, went
            new = [block(KEYSPACE_A, 0)]
            assert driver.tier.delete([block(KEYSPACE_A, 255)]) == []
            store_all(driver, new)
            if not cluster.move_keys(slot, source, target, 0):
                break
        before = driver.tier.state().errors
        assert before == 0, driver.tier.counters()
        while cluster.move_keys(slot, source, target):
            pass
        cluster.end_move(slot, target)
        assert driver.lookup(mine) == [1] * 16
        assert load_right(driver, mine) == [1] * 16
        assert store_all(driver, mine) == 0, "they are there"

    @pytest.mark.parametrize("server_kind", [VALKEY_9], ids=str)
    def test_slots_that_move_at_one_instant_cost_nothing_but_a_redirection(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        store_all(driver)
        source = node_of(cluster, NUMBERS[0])
        target = next(one for one in cluster.primaries if one is not source)
        slots = sorted({slot_of_bucket(n) for n in NUMBERS if node_of(cluster, n) is source})
        for slot in slots:
            source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.node_id)
            until(lambda: bool(load_right(driver)) and node_of_slot(cluster, slot) is target)  # noqa: B023
        assert load_right(driver) == [1] * len(BLOCKS)
        assert driver.lookup(BLOCKS) == [1] * len(BLOCKS)
        assert driver.tier.state().errors == 0

    def test_a_server_that_joined_and_got_slots_is_used_without_a_restart(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster, tmp_path: Path
    ) -> None:
        driver = begin(start, gate, cluster)
        store_all(driver)
        (tmp_path / "new").mkdir()
        added = cluster.add(tmp_path / "new")
        slot, source = slot_of_bucket(0), node_of(cluster, 0)
        cluster.move(slot, source, added)
        until(lambda: driver.lookup(BLOCKS) == [1] * len(BLOCKS), driver.tier.counters)
        assert load_right(driver) == [1] * len(BLOCKS)
        until(lambda: driver.tier.state().nodes == 4, driver.tier.state)
        cluster.move(slot, added, source)
        added.kill()
        until(lambda: load_right(driver) == [1] * len(BLOCKS), driver.tier.counters)
        until(lambda: driver.tier.state().nodes == 3, driver.tier.state)


class TestServersDie:
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
        limit = 30 * (BLOCK_BYTES + 40)
        gate.allow(KEYSPACE_A, budgets=(TierBudget("shared", limit_bytes=limit),))
        store_all(driver)
        home = cluster.owner(f"{{{KEYSPACE_A}}}".encode())
        dead = next(one for one in cluster.primaries if one is not home and any(on(cluster, one)))
        dead.kill()
        until(lambda: load_right(driver) is not None and driver.tier.state().nodes_away == 1, driver.tier.state)
        there = [block(KEYSPACE_A, n) for n in range(256) if node_of_alive(cluster, n, dead)]
        stored = sum(store_all(driver, [one]) for one in there[:60])
        assert stored > 30, driver.tier.counters()

    @pytest.mark.short_deadlines
    def test_a_frozen_server_delays_nobody_beyond_the_deadline_and_costs_its_own_blocks_only(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        store_all(driver)
        frozen = node_of(cluster, NUMBERS[0])
        left = [1 - gone for gone in on(cluster, frozen)]
        frozen.freeze()
        for _ in range(4):
            started_s = time.monotonic()
            assert driver.lookup(BLOCKS) == left
            assert time.monotonic() - started_s < 0.2 + SLACK_S
        load_right(driver)
        until(lambda: driver.tier.state().nodes_away == 1, driver.tier.state)
        assert load_right(driver) == left
        frozen.thaw()
        until(lambda: load_right(driver) == [1] * len(BLOCKS), driver.tier.state)

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
        deaf_until_s = time.monotonic() + 40
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
        cluster = RedisCluster(tmp_path)
        driver = start(cluster.nodes[1].port, cluster=True)
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        started_s = time.monotonic()
        assert driver.lookup(BLOCKS) == [0] * len(BLOCKS)
        assert time.monotonic() - started_s < 5
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


class TestRevocation:
    def test_a_keyspace_that_was_never_cleared_is_refused_while_the_set_of_revoked_ones_cannot_be_asked(
        self, start: Callable[..., Driver], gate: GateStandIn, cluster: RedisCluster
    ) -> None:
        driver = begin(start, gate, cluster)
        gate.allow(KEYSPACE_A)
        until(lambda: KEYSPACE_B not in driver.tier._revoked._cleared)
        home = cluster.owner(revoked_key(DOMAIN).encode())
        elsewhere = [n for n in range(256) if node_of(cluster, n) is not home]
        known = [block(KEYSPACE_A, n) for n in elsewhere[:20]]
        assert store_all(driver, known) == len(known)
        home.kill()
        until(lambda: load_right(driver) is not None and driver.tier.state().nodes_away == 1, driver.tier.state)
        assert driver.lookup(known) == [1] * len(known), "it was cleared before"
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        new = [block(KEYSPACE_B, n) for n in range(256) if node_of_alive(cluster, n, home, KEYSPACE_B)]
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


def node_of_slot(cluster: RedisCluster, slot: int) -> ClusterNode | None:
    """Which server says that a slot is its own."""
    for node in cluster.nodes:
        for first, last, (_, port, *_), *_ in raw(node, "CLUSTER", "SLOTS"):
            if first <= slot <= last and port == node.port:
                return node
    return None


def node_of_alive(cluster: RedisCluster, number: int, dead: ClusterNode, keyspace: str = KEYSPACE_A) -> bool:
    """Whether a block's server is another than the dead one."""
    slot = slot_of(bucket_prefix(DOMAIN, keyspace, number // 16).encode())
    index = cluster.primaries.index(dead)
    return not SLOTS * index // 3 <= slot < SLOTS * (index + 1) // 3
