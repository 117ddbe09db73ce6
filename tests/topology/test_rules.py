"""Single rules that form and heal, on looks at clusters that never were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.model.topology import SLOTS, Cluster, Peer
from kvstrata.plan.topology import StepReason, step, verdict
from kvstrata.plan.topology.view import View, count
from tests.topology import looks
from tests.topology.shapes import OLD, goal, newcomer, pods, said, silent, taken, told, well, without, words


@pytest.fixture
def cluster() -> Cluster:
    """Three shards of two, all well."""
    return well()


def test_nothing_is_done_to_a_cluster_that_is_well(cluster: Cluster) -> None:
    assert step(cluster, goal()) is None
    judged = verdict(cluster, goal())
    assert (judged.settled, judged.slots_covered, judged.replication_healthy, judged.shards_ready) == (True,) * 3 + (3,)


class TestForgetting:
    def test_all_but_its_own_replicas_forget_a_primary_that_is_gone(self, cluster: Cluster) -> None:
        gone = without(cluster, "uid-0-0", "uid-0-1")
        # The replica in shard 1 follows the one that is gone, which no one promotes: it has no slots.
        gone = said(gone, looks.node(0), slots=())
        gone = said(gone, looks.node(1, 1), "uid-1-1", primary=looks.node(0))
        found = taken(gone)
        forgetful = {uid for uid, *command in words(found) if command == ["CLUSTER", "FORGET", looks.node(0)]}
        assert forgetful == {"uid-1-0", "uid-2-0", "uid-2-1"}

    def test_a_server_that_only_does_not_answer_is_not_forgotten(self, cluster: Cluster) -> None:
        found = taken(silent(cluster, "uid-1-1"))
        assert (found.reason, found.waits) == (StepReason.WAITING_FOR_SERVERS, True)

    def test_an_identity_at_an_address_that_its_pod_has_no_more_is_forgotten(self, cluster: Cluster) -> None:
        moved = pods(silent(cluster, "uid-1-1"), uid_1_1={"ip": "10.9.9.9"})
        assert taken(moved).reason is StepReason.FORGETTING

    @pytest.mark.parametrize(
        ("ready", "failed", "reason"),
        [
            (False, False, StepReason.WAITING_FOR_SERVERS),
            (True, True, StepReason.WAITING_FOR_SERVERS),
            (False, True, StepReason.FORGETTING),
        ],
    )
    def test_slots_wait_for_a_replica_that_is_away_until_nobody_believes_in_it(
        self, cluster: Cluster, ready: bool, failed: bool, reason: StepReason
    ) -> None:
        lost = silent(without(cluster, "uid-0-0"), "uid-0-1", ready=ready)
        assert taken(said(lost, looks.node(0, 1), failed=failed)).reason is reason


class TestTakingOver:
    def test_the_replica_that_read_furthest_is_promoted_once_the_primary_is_gone(self) -> None:
        three = told(looks.cluster(looks.even(3), replicas=2), {"uid-0-1": {"offset": 7}, "uid-0-2": {"offset": 9}})
        found = taken(without(three, "uid-0-0"), replicas=2)
        assert words(found) == [("uid-0-2", "CLUSTER", "FAILOVER", "TAKEOVER")]
        assert found.lost == ()

    def test_a_replica_whose_pod_goes_is_the_second_choice(self) -> None:
        three = told(looks.cluster(looks.even(3), replicas=2), {"uid-0-2": {"offset": 9}})
        leaving = pods(without(three, "uid-0-0"), uid_0_2={"deleting": True})
        assert [command.pod_uid for command in taken(leaving, replicas=2).commands] == ["uid-0-1"]

    def test_a_replica_that_was_never_in_step_is_promoted_with_the_loss_told(self, cluster: Cluster) -> None:
        found = taken(told(without(cluster, "uid-0-0"), {"uid-0-1": {"ever_synced": False}}))
        assert (found.reason, count(found.lost)) == (StepReason.TAKING_OVER, 5461)

    @pytest.mark.parametrize(
        ("starting", "why", "at_once"),
        [
            (True, "ConnectionRefused", True),
            (True, "Timeout", False),
            (False, "ConnectionRefused", False),
        ],
    )
    def test_a_process_that_ended_in_its_pod_is_followed_at_once(
        self, cluster: Cluster, starting: bool, why: str, at_once: bool
    ) -> None:
        found = taken(silent(cluster, "uid-0-0", why=why, ready=False, starting=starting))
        assert (found.reason is StepReason.TAKING_OVER) == at_once
        assert found.waits != at_once

    def test_slots_of_a_process_that_ended_without_replicas_wait_for_the_next_in_its_pod(self) -> None:
        alone = silent(
            looks.cluster(looks.even(3), replicas=0), "uid-0-0", why="ConnectionRefused", ready=False, starting=True
        )
        assert taken(alone, replicas=0).reason is StepReason.FORGETTING
        forgotten = replace(
            alone,
            servers={
                uid: replace(server, peers=tuple(peer for peer in server.peers if peer.node_id != looks.node(0)))
                for uid, server in alone.servers.items()
            },
        )
        assert taken(forgotten, replicas=0).waits

    def test_while_most_primaries_vote_a_silent_one_is_left_to_them(self, cluster: Cluster) -> None:
        lost = said(silent(cluster, "uid-0-0", ready=False), looks.node(0), suspected=True)
        found = taken(lost)
        assert (found.reason, found.waits) == (StepReason.WAITING_FOR_FAILOVER, True)

    @pytest.mark.parametrize(("ready", "suspected"), [(True, True), (False, False), (True, False)])
    def test_who_is_silent_is_not_replaced_while_the_kubelet_or_a_replica_reaches_it(
        self, cluster: Cluster, ready: bool, suspected: bool
    ) -> None:
        lost = silent(cluster, "uid-0-0", "uid-1-0", ready=ready)
        for shard in (0, 1):
            lost = said(lost, looks.node(shard), suspected=suspected)
        assert taken(lost).waits
        cut_off = silent(cluster, "uid-0-0", "uid-1-0", ready=False)
        for shard in (0, 1):
            cut_off = said(cut_off, looks.node(shard), suspected=True)
        assert len(taken(cut_off).commands) == 2


class TestForming:
    def test_not_while_a_pod_is_well_whose_server_may_have_slots(self) -> None:
        empty = looks.cluster([()] * 3, replicas=1)
        assert taken(empty).reason is StepReason.FORMING
        assert taken(silent(empty, "uid-2-1", ready=False)).reason is StepReason.FORMING
        assert taken(silent(empty, "uid-2-1", ready=True)).waits

    def test_each_shard_has_its_epoch_and_its_part(self) -> None:
        one = looks.cluster([()] * 3)
        alone = told(one, {uid: {"peers": (replace(server.itself, epoch=0),)} for uid, server in one.servers.items()})
        found = taken(alone, replicas=0)
        assert [command for _, *command in words(found)] == [
            ["CLUSTER", "SET-CONFIG-EPOCH", "1"],
            ["CLUSTER", "ADDSLOTSRANGE", "0", "5460"],
            ["CLUSTER", "SET-CONFIG-EPOCH", "2"],
            ["CLUSTER", "ADDSLOTSRANGE", "5461", "10921"],
            ["CLUSTER", "SET-CONFIG-EPOCH", "3"],
            ["CLUSTER", "ADDSLOTSRANGE", "10922", "16383"],
        ]


class TestGivingSlots:
    def lost(self, cluster: Cluster, **of_newcomer: Any) -> Cluster:
        """Shard 0 has an empty server, which all know; who had its slots is forgotten."""
        left = without(cluster, "uid-0-0", "uid-0-1")
        known = {
            uid: {"peers": tuple(peer for peer in server.peers if not peer.node_id.startswith("00"))}
            for uid, server in left.servers.items()
        }
        left = replace(told(left, known), pods={**left.pods, "uid-0-0": cluster.pods["uid-0-0"]})
        return newcomer(left, "uid-0-0", OLD, knows_all=True, **of_newcomer)

    def test_an_empty_server_gets_them_under_the_newest_epoch_and_the_loss_is_told(self, cluster: Cluster) -> None:
        found = taken(self.lost(cluster, current_epoch=3))
        assert words(found) == [
            ("uid-0-0", "CLUSTER", "BUMPEPOCH"),
            ("uid-0-0", "CLUSTER", "ADDSLOTSRANGE", "0", "5460"),
        ]
        assert (found.reason, found.lost) == (StepReason.SLOTS_LOST, ((0, 5460),))

    def test_not_before_it_has_heard_of_the_newest_epoch(self, cluster: Cluster) -> None:
        found = taken(self.lost(cluster, current_epoch=2))
        assert (found.reason, found.waits) == (StepReason.WAITING_FOR_PODS, True)

    def test_a_shard_whose_primary_is_only_away_takes_no_part(self, cluster: Cluster) -> None:
        lost = silent(self.lost(cluster, current_epoch=3), "uid-1-0", "uid-1-1")
        assert taken(lost).lost == ((0, 5460),)
        torn = silent(said(cluster, looks.node(2), slots=((11000, 16383),)), "uid-1-0", "uid-1-1")
        assert {command.pod_uid for command in taken(torn).commands} == {"uid-2-0"}

    def test_what_it_believes_of_another_is_removed_first(self, cluster: Cluster) -> None:
        lost = self.lost(cluster, current_epoch=3)
        mistaken = said(lost, looks.node(1), "uid-0-0", slots=((5000, 10921),))
        assert words(taken(mistaken))[1:] == [
            ("uid-0-0", "CLUSTER", "DELSLOTSRANGE", "5000", "5460"),
            ("uid-0-0", "CLUSTER", "ADDSLOTSRANGE", "0", "5460"),
        ]

    def test_slots_that_no_lost_shard_explains_go_to_the_shard_with_fewest(self, cluster: Cluster) -> None:
        torn = said(cluster, looks.node(2), slots=((11000, 16383),))
        assert words(taken(torn)) == [
            ("uid-2-0", "CLUSTER", "BUMPEPOCH"),
            ("uid-2-0", "CLUSTER", "ADDSLOTSRANGE", "10922", "10999"),
        ]

    def test_slots_that_are_just_changing_hands_are_not_given_away(self, cluster: Cluster) -> None:
        """Shard 0's replica was asked before it took over, and its primary after that: both say that they follow."""
        primary, replica = looks.node(0), looks.node(0, 1)
        both = said(cluster, primary, "uid-0-0", is_primary=False, primary=replica, slots=())
        assert taken(both).waits
        # Others have heard already, or not even that somebody leads.
        heard = said(both, primary, is_primary=False, primary=replica, slots=())
        heard = said(heard, replica, "uid-1-0", is_primary=True, primary=None, epoch=9, slots=((0, 5460),))
        assert taken(heard).waits
        # If all heard that nobody leads, nobody will.
        nobody = said(both, primary, is_primary=False, primary=replica, slots=())
        assert taken(nobody).reason is StepReason.SLOTS_LOST
        # Who is not heard cannot be waited for.
        deaf = said(nobody, primary, "uid-1-0", is_primary=True, primary=None, slots=((0, 5460),), linked=False)
        assert taken(deaf).reason is StepReason.SLOTS_LOST


class TestMeeting:
    def test_who_is_known_to_one_side_only_is_introduced(self, cluster: Cluster) -> None:
        strangers = told(
            cluster,
            {"uid-2-1": {"peers": tuple(p for p in cluster.servers["uid-2-1"].peers if p.node_id != looks.node(0))}},
        )
        assert words(taken(strangers)) == [("uid-0-0", "CLUSTER", "MEET", "10.0.2.1", "6379")]

    def test_an_old_address_is_corrected(self, cluster: Cluster) -> None:
        moved = said(cluster, looks.node(0), "uid-1-0", ip="10.9.9.9")
        assert words(taken(moved)) == [("uid-0-0", "CLUSTER", "MEET", "10.0.1.0", "6379")]

    def test_who_is_meeting_is_left_to_it(self, cluster: Cluster) -> None:
        itself = cluster.servers["uid-2-1"].itself
        meeting = Peer("f" * 40, "10.0.0.0", 6379, "", False, None, 0, linked=False, handshake=True)
        others = tuple(p for p in cluster.servers["uid-2-1"].peers if p.node_id not in (looks.node(0), itself.node_id))
        found = taken(told(cluster, {"uid-2-1": {"peers": (itself, *others, meeting)}}))
        assert (found.reason, found.waits) == (StepReason.WAITING_FOR_GOSSIP, True)

    def test_many_servers_meet_one_and_their_primaries_not_each_other(self) -> None:
        many = looks.cluster(looks.even(20), replicas=1)
        strangers = told(many, {uid: {"peers": (server.itself,)} for uid, server in many.servers.items()})
        found = step(strangers, looks.goal(20, replicas=1))
        assert found is not None
        assert len(found.commands) == 39 + 19


class TestReplicas:
    def test_who_has_keys_but_no_slots_is_replaced_and_not_flushed(self, cluster: Cluster) -> None:
        left = said(cluster, looks.node(0, 1), primary=None, is_primary=True)
        assert words(taken(left)) == [("uid-0-1", "CLUSTER", "REPLICATE", looks.node(0))]
        found = taken(told(left, {"uid-0-1": {"keys": 3}}))
        assert (found.remove_pod, found.commands) == ("uid-0-1", ())
        assert taken(pods(told(left, {"uid-0-1": {"keys": 3}}), uid_0_1={"deleting": True})).waits

    def test_a_former_primary_that_has_not_heard_is_left_alone(self, cluster: Cluster) -> None:
        behind = said(cluster, looks.node(0), primary=None, epoch=9)
        behind = said(behind, looks.node(0, 1), "uid-0-1", is_primary=True, primary=None, epoch=1, slots=((0, 5460),))
        assert (taken(behind).reason, taken(behind).waits) == (StepReason.WAITING_FOR_GOSSIP, True)


class TestRejoining:
    def test_a_primary_that_has_a_majority_waits_a_second_and_then_has_its_time_out_again(
        self, cluster: Cluster
    ) -> None:
        found = taken(told(cluster, {"uid-0-0": {"cluster_ok": False}}))
        assert words(found) == [("uid-0-0", "CONFIG", "SET", "cluster-node-timeout", "1000")]
        shortened = told(cluster, {"uid-0-0": {"cluster_ok": False, "node_timeout_ms": 1000}})
        assert taken(shortened).waits
        found = taken(told(shortened, {"uid-0-0": {"cluster_ok": True}}))
        assert words(found) == [("uid-0-0", "CONFIG", "SET", "cluster-node-timeout", "5000")]

    def test_not_one_that_is_with_the_minority(self, cluster: Cluster) -> None:
        alone = told(cluster, {"uid-0-0": {"cluster_ok": False}})
        for shard in (1, 2):
            alone = said(alone, looks.node(shard), "uid-0-0", suspected=True)
        assert not taken(alone).commands


def test_of_two_claims_the_higher_epoch_counts_and_of_a_server_its_own_word(cluster: Cluster) -> None:
    promoted = said(cluster, looks.node(0, 1), "uid-0-1", is_primary=True, primary=None, epoch=9, slots=((0, 5460),))
    assert View(promoted, goal()).slots[looks.node(0, 1)] == ((0, 5460),)
    assert looks.node(0) not in View(promoted, goal()).slots
    late = said(cluster, looks.node(0), epoch=9)
    late = said(late, looks.node(0, 1), "uid-0-1", is_primary=True, primary=None, epoch=2, slots=((0, 5460),))
    assert looks.node(0, 1) not in View(late, goal()).slots
    # What others still say of a server that answers does not count.
    dropped = said(cluster, looks.node(0), "uid-0-0", slots=((0, 99),))
    assert count(View(dropped, goal()).unowned) == 5461 - 100


def test_the_verdict_counts_slots_that_nobody_serves_and_says_why(cluster: Cluster) -> None:
    judged = verdict(silent(cluster, "uid-0-0"), goal())
    assert (judged.slots_covered, judged.uncovered, judged.shards_ready) == (False, 5461, 2)
    assert "kvs-t-redis-0-0" in judged.slots_message
    assert judged.progress.startswith("2 of 3 shards ready; ")
    judged = verdict(silent(cluster, "uid-0-1"), goal())
    assert (judged.slots_covered, judged.replication_healthy) == (True, False)
    assert verdict(looks.cluster([()] * 3, replicas=1), goal()).uncovered == SLOTS
