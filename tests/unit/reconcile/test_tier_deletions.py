"""Deletion of a managed CacheTier ends its servers, whatever became of their owner references."""

from __future__ import annotations

import pytest

from kvstrata.plan.kinds.model_deletion import FINALIZER
from kvstrata.plan.uninstall import held_objects, refusal, released
from tests.support.objects import NAMESPACE
from tests.support.worlds import Simulation
from tests.unit.reconcile.test_foreign_objects import OBJECTS, TIER, foreign, live
from tests.unit.reconcile.test_model_deletions import orphan, refuse_with
from tests.unit.reconcile.test_taking_back import settled

SERVERS = ("StatefulSet", "kvs-shared-redis-0")


def test_the_finalizer_precedes_the_servers_and_tiers_without_servers_have_none() -> None:
    simulation = Simulation(*OBJECTS)
    simulation.come_to_rest()
    written = simulation.kube.log
    assert written.index(("finalizers", *TIER)) < written.index(("apply", *SERVERS))
    assert live(simulation, *TIER)["metadata"]["finalizers"] == [FINALIZER]
    assert "finalizers" not in live(simulation, "CacheTier", "cpu")["metadata"]


@pytest.mark.parametrize("orphaned", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_deleted_tier_ends_its_servers(*, orphaned: bool, restarted: bool) -> None:
    simulation = settled()
    if orphaned:
        orphan(simulation)
    simulation.delete(*TIER)
    assert live(simulation, *TIER) is not None, "the object waits for the operator"
    if restarted:
        simulation.restart()
    simulation.advance(2)
    assert [live(simulation, *slot) for slot in (TIER, SERVERS)] == [None, None]


def test_servers_of_a_shard_that_is_leaving_end_too() -> None:
    simulation = settled()
    other = live(simulation, *SERVERS)
    simulation.put({**other, "metadata": {**other["metadata"], "name": "kvs-shared-redis-1", "uid": "leaving"}})
    simulation.delete(*TIER)
    simulation.advance(2)
    assert live(simulation, "StatefulSet", "kvs-shared-redis-1") is None


def test_servers_of_others_are_left_alone() -> None:
    simulation = settled()
    simulation.kube.remove("StatefulSet", NAMESPACE, SERVERS[1])
    simulation.kube.put(foreign(*SERVERS))
    before = live(simulation, *SERVERS)
    simulation.delete(*TIER)
    simulation.advance(5)
    assert live(simulation, *TIER) is None
    assert live(simulation, *SERVERS) == before


def test_a_refused_deletion_keeps_the_tier_which_reports_it() -> None:
    simulation = settled()
    simulation.kube.before_write = refuse_with("delete", "StatefulSet")
    simulation.delete(*TIER)
    simulation.advance(30)
    assert simulation.condition(*TIER, "Ready") == ("False", "ChildRefused")
    simulation.kube.before_write = lambda verb, kind, name: None
    simulation.advance(120)
    assert live(simulation, *TIER) is None


def test_a_tier_with_servers_holds_the_release() -> None:
    simulation = settled()
    held = held_objects([live(simulation, *TIER), live(simulation, "CacheTier", "cpu")], ())
    assert [one.name for one in held] == ["shared"]
    assert f"CacheTier {NAMESPACE}/shared: deleting it ends its pods" in refusal(held, "kvs", "kvs-system", "1")
    assert "its servers run on" in released(held)
