"""Servers that become one cluster, or one again, on looks at clusters that never were."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.model.redis.cluster import Cluster, Peer
from kvstrata.plan.redis.topology import StepReason
from tests.topology import looks
from tests.topology.looks import step
from tests.topology.three_shards import pods, said, silent, taken, told, words

pytestmark = pytest.mark.claim("servers become one cluster, and one again")


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

    def test_nothing_moves_until_every_server_can_name_every_other_to_clients(self, cluster: Cluster) -> None:
        unnamed = said(cluster, looks.node(1), "uid-0-0", hostname="")
        meeting = Peer("f" * 40, "10.0.1.0", 6379, "", False, None, 0, linked=False, handshake=True)
        found = taken(told(unnamed, {"uid-0-0": {"peers": (*unnamed.servers["uid-0-0"].peers, meeting)}}))
        assert (found.reason, found.waits) == (StepReason.WAITING_FOR_GOSSIP, True)
        assert found.message == "kvs-t-redis-0-0 do not know the names of others yet"

    def test_a_server_is_introduced_again_to_one_that_knows_it_without_its_name(self, cluster: Cluster) -> None:
        found = taken(said(cluster, looks.node(1), "uid-0-0", hostname=""))
        assert (found.reason, words(found)) == (
            StepReason.MEETING,
            [("uid-1-0", "CLUSTER", "MEET", "10.0.0.0", "6379")],
        )

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
