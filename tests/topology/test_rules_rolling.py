"""Pods that are replaced by a new template, one at a time, and not while somebody erases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kvstrata.model.redis.cluster import Cluster
from kvstrata.plan.redis.topology import StepReason
from kvstrata.plan.redis.topology.view import count
from tests.topology import looks
from tests.topology.looks import step, verdict
from tests.topology.three_shards import goal, pods, said, silent, taken, told, without, words

pytestmark = pytest.mark.claim("pods are replaced one at a time, replicas first, and not while somebody erases")


class TestStandingStill:
    """While somebody erases from it."""

    ERASED: ClassVar[dict[str, Any]] = {"erased_by": ("leave", "other")}

    def test_nothing_is_rolled_scaled_or_removed_and_it_is_said_why(self, cluster: Cluster) -> None:
        four = told(looks.cluster([*looks.even(3), ()], replicas=1))
        emptied = told(looks.cluster([*looks.even(3), ()], replicas=1))
        wanted = {"revisions": dict.fromkeys(range(3), "new")}
        for found, others, what in (
            (cluster, wanted, "redis-0-1 is replaced; 6 to go"),
            (four, {"shards": 4}, "moving slots: 0 of 4,096"),
            (emptied, {}, "shard 3 without slots: to be removed"),
        ):
            step_of = {**others, **self.ERASED}
            still = step(found, replace(goal(), **step_of))
            assert step(found, replace(goal(), **others)) != still
            assert still is not None
            assert (still.reason, still.waits) == (StepReason.STANDING_STILL, True)
            assert f"{what}: begins when CacheInvalidation leave and 1 more has erased" in still.message

    def test_a_cluster_that_is_as_it_is_meant_to_be_waits_for_nothing(self, cluster: Cluster) -> None:
        assert step(cluster, goal(**self.ERASED)) is None

    def test_what_is_lost_is_repaired_and_a_move_that_was_begun_goes_on(self, cluster: Cluster) -> None:
        lost = without(cluster, "uid-1-0")
        assert taken(lost, **self.ERASED).reason is StepReason.TAKING_OVER
        opened = told(
            looks.cluster(looks.even(3), migrating={0: {7: looks.node(1)}}, importing={1: {7: looks.node(0)}})
        )
        assert taken(opened, replicas=0, **self.ERASED).reason is StepReason.REPAIRING_SLOTS

    def test_what_would_be_waited_for_anyway_is_told_as_ever(self, cluster: Cluster) -> None:
        unready = pods(cluster, uid_2_1={"ready": False})
        wanted = {"revisions": dict.fromkeys(range(3), "new")}
        assert taken(unready, **wanted, **self.ERASED) == taken(unready, **wanted)


class TestRolling:
    NEW = dict.fromkeys(range(3), "new")

    def test_a_replica_goes_first(self, cluster: Cluster) -> None:
        found = taken(cluster, revisions=self.NEW)
        assert (found.reason, found.remove_pod, found.lost) == (StepReason.ROLLING, "uid-0-1", ())

    def test_a_primary_hands_over_before_its_pod_goes(self, cluster: Cluster) -> None:
        replaced = pods(cluster, **{f"uid_{shard}_1": {"revision": "new"} for shard in range(3)})
        found = taken(replaced, revisions=self.NEW)
        assert words(found) == [("uid-0-1", "CLUSTER", "FAILOVER")]
        assert found.pause_s > 0.5

    def test_a_primary_without_replicas_goes_with_its_loss_told(self) -> None:
        alone = looks.cluster(looks.even(3))
        found = taken(alone, replicas=0, revisions=self.NEW)
        assert (found.remove_pod, found.lost) == ("uid-0-0", ((0, 5460),))

    @pytest.mark.parametrize(
        "flaw",
        [
            {"uid_2_0": {"ready": False}},
            {"uid_2_1": {"deleting": True}},
        ],
    )
    def test_nothing_goes_while_a_pod_is_not_ready(self, cluster: Cluster, flaw: dict[str, Any]) -> None:
        found = taken(pods(cluster, **flaw), revisions=self.NEW)
        assert (found.waits, found.reason) == (True, StepReason.WAITING_FOR_PODS)

    def test_nothing_goes_while_a_replica_is_behind_missing_or_silent(self, cluster: Cluster) -> None:
        behind = told(cluster, {"uid-2-1": {"link_up": False}})
        assert taken(behind, revisions=self.NEW).reason is StepReason.WAITING_FOR_REPLICAS
        assert taken(silent(cluster, "uid-2-1"), revisions=self.NEW).reason is StepReason.WAITING_FOR_SERVERS
        missing = without(cluster, "uid-2-1")
        known = {
            u: {"peers": tuple(p for p in s.peers if p.node_id != looks.node(2, 1))} for u, s in missing.servers.items()
        }
        assert taken(told(missing, known), revisions=self.NEW).reason is StepReason.WAITING_FOR_PODS

    def test_a_pod_of_a_broken_template_does_not_hold_up_its_repair(self, cluster: Cluster) -> None:
        broken = silent(cluster, "uid-2-1", ready=False)
        found = taken(broken, revisions=self.NEW)
        assert (found.reason, found.remove_pod, found.lost) == (StepReason.REPLACING, "uid-2-1", ())

    def test_a_replica_whose_image_cannot_load_what_primaries_send_is_replaced_by_the_next_template(
        self, cluster: Cluster
    ) -> None:
        useless = told(cluster, {"uid-2-1": {"link_up": False, "ever_synced": False}})
        assert taken(useless).waits
        found = taken(useless, revisions={2: "new"})
        assert (found.reason, found.remove_pod, found.lost) == (StepReason.REPLACING, "uid-2-1", ())
        assert taken(pods(useless, uid_1_1={"ready": False}), revisions={2: "new"}).waits

    def test_one_that_may_have_slots_goes_when_all_agree_that_it_failed_and_nobody_can_take_over(self) -> None:
        alone = silent(looks.cluster(looks.even(3)), "uid-2-0", ready=False)
        assert taken(alone, replicas=0, revisions=self.NEW).waits
        found = taken(said(alone, looks.node(2), failed=True), replicas=0, revisions=self.NEW)
        assert (found.remove_pod, count(found.lost)) == ("uid-2-0", 5462)

    def test_a_primary_in_a_pod_that_is_one_too_many_hands_over(self, cluster: Cluster) -> None:
        three = looks.cluster(looks.even(3), replicas=2)
        names = {0: looks.node(0, 2), 1: looks.node(0, 0), 2: looks.node(0, 1)}
        # The server of ordinal 2 has shard 0's slots, the two others replicate it.
        swapped = three
        for ordinal in (0, 1, 2):
            leads = ordinal == 2
            slots = ((0, 5460),) if leads else ()
            primary = None if leads else names[0]
            swapped = said(swapped, looks.node(0, ordinal), is_primary=leads, primary=primary, slots=slots)
        found = taken(swapped)
        assert found.reason is StepReason.FAILING_OVER
        assert found.commands[0].pod_uid in ("uid-0-0", "uid-0-1")

    def test_a_pod_that_is_one_too_many_keeps_the_slots_of_one_that_is_replaced(self, cluster: Cluster) -> None:
        """And is not replaced itself: nothing is lost, and nobody hands over in circles."""
        fewer: dict[str, Any] = {"replicas": 0, "revisions": self.NEW}
        found = taken(cluster, **fewer)
        assert words(found) == [("uid-0-1", "CLUSTER", "FAILOVER")]
        swapped = said(cluster, looks.node(0), is_primary=False, primary=looks.node(0, 1), slots=())
        swapped = said(swapped, looks.node(0, 1), is_primary=True, primary=None, epoch=9, slots=((0, 5460),))
        found = taken(swapped, **fewer)
        assert (found.reason, found.remove_pod, found.lost) == (StepReason.ROLLING, "uid-0-0", ())
        found = taken(pods(swapped, uid_0_0={"revision": "new"}), **fewer)
        assert words(found) == [("uid-0-0", "CLUSTER", "FAILOVER")]
        replaced = pods(cluster, **{f"uid_{shard}_0": {"revision": "new"} for shard in range(3)})
        assert step(replaced, goal(**fewer)) is None

    @pytest.mark.parametrize(("ip", "ready"), [(None, False), ("10.0.0.1", False), ("10.0.0.1", True)])
    def test_replicas_that_never_came_up_go_when_they_are_no_longer_wanted(
        self, cluster: Cluster, ip: str | None, ready: bool
    ) -> None:
        """As those that no node has room for, or whose node is dead."""
        waiting = pods(silent(cluster, "uid-0-1", ready=ready), uid_0_1={"ip": ip, "ready": ready})
        if ip is None:  # It was never met.
            stranger = looks.node(0, 1)
            met = {u: tuple(p for p in s.peers if p.node_id != stranger) for u, s in waiting.servers.items()}
            waiting = told(waiting, {uid: {"peers": peers} for uid, peers in met.items()})
        assert taken(waiting).waits
        assert step(waiting, goal(replicas=0)) is None
        assert verdict(waiting, goal(replicas=0)).replication_healthy

    def test_while_the_pod_that_stays_is_missing_the_one_too_many_is_not_let_go(self, cluster: Cluster) -> None:
        promoted = said(cluster, looks.node(0, 1), is_primary=True, primary=None, epoch=9, slots=((0, 5460),))
        alone = without(promoted, "uid-0-0")
        known = {
            u: {"peers": tuple(p for p in s.peers if p.node_id != looks.node(0))} for u, s in alone.servers.items()
        }
        found = taken(told(alone, known), replicas=0)
        assert (found.waits, found.reason) == (True, StepReason.WAITING_FOR_PODS)
