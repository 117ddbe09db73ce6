"""A tier on a real Redis Cluster whose slots move: right bytes or a miss, in time, and stores that go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn
from tests.tiers.redis_cluster import ClusterNode, RedisCluster, raw, until
from tests.tiers.server_kinds import VALKEY_9, on_every_server
from tests.tiers.tier_driver import Driver, block
from tests.tiers.tier_on_cluster import BLOCKS, NUMBERS, begin, load_right, node_of, slot_of_bucket, store_all

pytestmark = pytest.mark.redis


class TestSlotsMove:
    @pytest.mark.claim("blocks are read and written while slots move")
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

    @pytest.mark.claim("blocks of a slot that moves are found at both ends")
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

    @pytest.mark.claim("a new server is used without a restart")
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


def node_of_slot(cluster: RedisCluster, slot: int) -> ClusterNode | None:
    """Which server says that a slot is its own."""
    for node in cluster.nodes:
        for first, last, (_, port, *_), *_ in raw(node, "CLUSTER", "SLOTS"):
            if first <= slot <= last and port == node.port:
                return node
    return None
