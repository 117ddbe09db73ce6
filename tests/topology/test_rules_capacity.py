"""How much memory servers are told to use, on looks at clusters that never were."""

from __future__ import annotations

import pytest

from kvstrata.model.redis.cluster import Cluster
from kvstrata.plan.redis.topology import StepReason
from tests.topology.looks import step
from tests.topology.three_shards import goal, pods, silent, taken, told, words

pytestmark = pytest.mark.claim("a server is given no more memory than its container has room for")


class TestMemory:
    def test_less_is_set_everywhere_at_once(self, cluster: Cluster) -> None:
        found = taken(cluster, max_bytes_each=1 << 29)
        assert words(found) == [(uid, "CONFIG", "SET", "maxmemory", str(1 << 29)) for uid in cluster.servers]

    def test_more_is_set_where_the_container_has_room_for_it(self, cluster: Cluster) -> None:
        assert len(words(taken(cluster, max_bytes_each=1 << 31))) == 6
        former = {"revisions": dict.fromkeys(range(3), "new")}
        assert taken(cluster, max_bytes_each=1 << 31, **former).reason is StepReason.ROLLING
        slightly = (1 << 30) * 6 // 5
        assert taken(cluster, max_bytes_each=slightly, **former).reason is StepReason.CHANGING_CAPACITY


def test_capacity_is_changed_where_it_differs_also_while_a_replica_is_missing(cluster: Cluster) -> None:
    found = taken(silent(told(cluster, {"uid-1-0": {"max_bytes": 5}}), "uid-2-1"))
    assert words(found) == [("uid-1-0", "CONFIG", "SET", "maxmemory", str(1 << 30))]


class TestMoreMemoryThanAContainerHasRoomFor:
    """It comes with the new pod: before that, the kernel would end the server for it."""

    MADE = dict.fromkeys((f"uid_{shard}_{ordinal}" for shard in range(3) for ordinal in range(2)), 1 << 30)

    def made(self, cluster: Cluster) -> Cluster:
        return pods(cluster, **{uid: {"made_for_bytes": size} for uid, size in self.MADE.items()})

    def test_it_is_not_given_while_kubernetes_has_yet_to_see_the_template_that_goes_with_it(
        self, cluster: Cluster
    ) -> None:
        for revisions in ({}, dict.fromkeys(range(3), "r")):
            assert step(self.made(cluster), goal(max_bytes_each=3 << 30, revisions=revisions)) is None

    def test_many_small_steps_come_no_further_than_one(self, cluster: Cluster) -> None:
        first, second = (1 << 30) * 12 // 10, (1 << 30) * 14 // 10
        found = taken(self.made(cluster), max_bytes_each=first)
        assert {command.words[-1] for command in found.commands} == {str(first)}
        raised = told(self.made(cluster), max_bytes=first)
        assert step(raised, goal(max_bytes_each=second)) is None

    def test_less_is_given_at_once(self, cluster: Cluster) -> None:
        assert len(taken(self.made(cluster), max_bytes_each=1 << 29, revisions={}).commands) == 6
