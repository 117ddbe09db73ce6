"""Servers that are gone, on looks at clusters that never were: who is forgotten, who takes over, who gets the slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.model.redis.cluster import Cluster
from kvstrata.plan.redis.topology import StepReason
from kvstrata.plan.redis.topology.view import count
from tests.topology import looks
from tests.topology.three_shards import newcomer, pods, said, silent, taken, told, without, words

pytestmark = pytest.mark.claim("a lost server is replaced, and its slots find an owner")

OLD = "0ld".ljust(40, "0")


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

    def test_a_slot_open_towards_a_lost_identity_is_closed_before_servers_forget_the_identity(self) -> None:
        """Servers that forget it forget the open move, too, and leave its keys unreachable."""
        shares = [*looks.even(3), ()]
        found = taken(looks.cluster(shares, migrating={0: {5460: looks.node(3)}}, gone=[3]), replicas=0)
        assert (found.reason, found.commands) == (StepReason.REPAIRING_SLOTS, ())
        assert [(one.source, one.target, one.slots) for one in found.moves] == [
            (looks.node(0), looks.node(0), ((5460, 5460),))
        ]
        assert taken(looks.cluster(shares, gone=[3]), replicas=0).reason is StepReason.FORGETTING

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

    @pytest.mark.parametrize(("voters", "waits"), [((), True), (("uid-1-0",), False), (("uid-1-0", "uid-2-0"), False)])
    def test_replicas_that_missed_the_last_epoch_take_over_because_voters_that_know_it_refuse_them(
        self, cluster: Cluster, voters: tuple[str, ...], waits: bool
    ) -> None:
        lost = said(silent(cluster, "uid-0-0", ready=False), looks.node(0), suspected=True)
        if voters:
            lost = said(lost, looks.node(0), *voters, epoch=9)
        assert taken(lost).waits == waits
        assert taken(said(lost, looks.node(0), "uid-0-1", epoch=9)).waits, "one that knows it is elected"

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

    def test_a_replica_takes_over_before_slots_are_given(self, cluster: Cluster) -> None:
        """Until it has, its shard counts as one without slots, and the empty server would get only half of its own."""
        both = without(self.lost(cluster, current_epoch=3), "uid-1-0")
        assert words(taken(both)) == [("uid-1-1", "CLUSTER", "FAILOVER", "TAKEOVER")]

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
