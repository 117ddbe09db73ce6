"""What is believed of a cluster, and what is said of it, on looks at clusters that never were."""

from __future__ import annotations

import pytest

from kvstrata.model.redis.cluster import SLOTS, Cluster
from kvstrata.plan.redis.topology.view import View, count
from tests.topology import looks
from tests.topology.looks import step, verdict
from tests.topology.three_shards import goal, said, silent

pytestmark = pytest.mark.claim("the verdict on a cluster is what its servers say")


def test_nothing_is_done_to_a_cluster_that_is_well(cluster: Cluster) -> None:
    assert step(cluster, goal()) is None
    judged = verdict(cluster, goal())
    assert (judged.settled, judged.slots_covered, judged.replication_healthy, judged.shards_ready) == (True,) * 3 + (3,)


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
