"""Single rules, on looks at clusters that never were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kvstrata.model.topology import SLOTS, Cluster, Goal, Peer
from kvstrata.plan.topology import Step, StepReason, step, verdict
from kvstrata.plan.topology.view import View, count
from tests.topology import looks

OLD = "0ld".ljust(40, "0")


@pytest.fixture
def cluster() -> Cluster:
    """Three shards of two, all well."""
    return told(looks.cluster(looks.even(3), replicas=1))


def goal(replicas: int = 1, **others: Any) -> Goal:
    return looks.goal(3, replicas=replicas, **{"revisions": dict.fromkeys(range(3), "r")} | others)


def told(cluster: Cluster, servers: Mapping[str, Mapping[str, Any]] | None = None, **everywhere: Any) -> Cluster:
    """The same with other words of some servers, by their pods' uids, or of all of them."""
    words = {uid: {**everywhere, **(servers or {}).get(uid, {})} for uid in cluster.servers}
    return replace(cluster, servers={uid: replace(one, **words[uid]) for uid, one in cluster.servers.items()})


def pods(cluster: Cluster, **changed: Mapping[str, Any]) -> Cluster:
    """The same with other pods: `uid_0_1={"ready": False}`."""
    found = {uid: replace(pod, **changed.get(uid.replace("-", "_"), {})) for uid, pod in cluster.pods.items()}
    return replace(cluster, pods=found)


def silent(cluster: Cluster, *uids: str, why: str = "Timeout", **of_pod: Any) -> Cluster:
    """The same where some do not answer."""
    changed = {uid.replace("-", "_"): of_pod for uid in uids}
    servers = {uid: server for uid, server in cluster.servers.items() if uid not in uids}
    return replace(pods(cluster, **changed), servers=servers, silent=dict.fromkeys(uids, (why, "")))


def without(cluster: Cluster, *uids: str) -> Cluster:
    """The same where some pods are gone."""
    return replace(
        cluster,
        pods={uid: pod for uid, pod in cluster.pods.items() if uid not in uids},
        servers={uid: server for uid, server in cluster.servers.items() if uid not in uids},
    )


def said(cluster: Cluster, about: str, *by: str, **words: Any) -> Cluster:
    """The same where the servers in some pods, or all, say something else of a node."""
    changed = {
        uid: {"peers": tuple(replace(peer, **words) if peer.node_id == about else peer for peer in server.peers)}
        for uid, server in cluster.servers.items()
        if not by or uid in by
    }
    return told(cluster, changed)


def newcomer(cluster: Cluster, uid: str, node_id: str, *, knows_all: bool = False, **words: Any) -> Cluster:
    """The same with an empty server under a new identity in a pod."""
    former = next(iter(cluster.servers.values()))
    pod = cluster.pods[uid]
    itself = Peer(node_id, str(pod.ip), 6379, "", True, None, 0, linked=True)
    others = tuple(peer for peer in former.peers if peer.node_id in View(cluster, goal()).servers) if knows_all else ()
    empty = replace(former, pod_uid=uid, node_id=node_id, peers=(itself, *others), is_primary=True, current_epoch=0)
    servers = {name: server for name, server in cluster.servers.items() if name != uid}
    if knows_all:
        servers = {name: replace(server, peers=(*server.peers, itself)) for name, server in servers.items()}
    return replace(cluster, servers=servers | {uid: replace(empty, **words)})


def taken(cluster: Cluster, **others: Any) -> Step:
    found = step(cluster, goal(**others))
    assert found is not None
    return found


def words(found: Step) -> list[tuple[str, ...]]:
    return [(command.pod_uid, *command.words) for command in found.commands]


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
