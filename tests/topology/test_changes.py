"""What two looks at a cluster tell that no command did, and what a verdict counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.model.redis.cluster import Cluster
from kvstrata.plan.redis.topology import failovers
from tests.topology import looks
from tests.topology.looks import verdict
from tests.topology.three_shards import goal, pods, silent, told, without

pytestmark = pytest.mark.claim("a failover that servers decide themselves is noticed and told")


def whole() -> Cluster:
    return looks.cluster(looks.even(3), replicas=1)


def promoted(cluster: Cluster) -> Cluster:
    """The same after the replica of shard 0 took over from a primary that is silent, as all others say, too."""
    slots = looks.even(3)[0]
    servers = {}
    for uid, server in cluster.servers.items():
        peers = tuple(
            replace(peer, slots=slots, epoch=9, is_primary=True, primary=None)
            if peer.node_id == looks.node(0, 1)
            else replace(peer, slots=())
            if peer.node_id == looks.node(0)
            else peer
            for peer in server.peers
        )
        servers[uid] = replace(server, peers=peers)
    return replace(cluster, servers=servers)


def test_a_replica_that_the_servers_promoted_is_named_with_whom_it_took_over_from() -> None:
    before = silent(whole(), "uid-0-0")
    message = "kvs-t-redis-0-1 has 5461 slots of kvs-t-redis-0-0, which does not answer"
    assert failovers(before, promoted(before), goal()) == {looks.node(0, 1): message}


def test_a_failover_is_seen_although_the_heir_was_silent_before() -> None:
    before = silent(whole(), "uid-0-0", "uid-0-1")
    after = promoted(silent(whole(), "uid-0-0"))
    assert [*failovers(before, after, goal())] == [looks.node(0, 1)]


def test_nobody_fails_over_in_looks_that_differ_in_who_answers_only() -> None:
    assert failovers(whole(), silent(whole(), "uid-0-0"), goal()) == {}
    assert failovers(silent(whole(), "uid-0-0"), whole(), goal()) == {}
    assert failovers(promoted(whole()), promoted(whole()), goal()) == {}


def test_an_empty_server_that_gets_lost_slots_is_no_heir() -> None:
    before = without(whole(), "uid-0-0", "uid-0-1")
    assert failovers(before, looks.cluster(looks.even(3)), goal()) == {}


def test_what_is_left_to_do_is_counted() -> None:
    well = verdict(whole(), goal())
    assert (well.slots_to_move, well.pods_to_replace, well.replicas_missing, well.uncovered) == (0, 0, 0, 0)
    crowded = looks.cluster([*looks.even(2), ()], replicas=1)
    assert verdict(crowded, goal()).slots_to_move == 5461
    old = pods(whole(), uid_0_0={"revision": "old"}, uid_2_1={"revision": "old"})
    assert verdict(old, goal()).pods_to_replace == 2
    behind = told(whole(), {"uid-1-1": {"link_up": False}})
    assert verdict(behind, goal()).replicas_missing == 1
    assert verdict(without(whole(), "uid-0-0", "uid-0-1"), goal()).replicas_missing == 1
