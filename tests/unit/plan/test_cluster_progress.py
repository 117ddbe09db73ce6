"""How far a managed cluster is: told at a pace while it goes on, and at once when it begins, ends or fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvstrata.api.cachetier import SlotLoss
from kvstrata.model.pods import ClusterReport
from kvstrata.model.redis.cluster import Cluster
from kvstrata.model.refs import Key
from kvstrata.plan.actions import ReconcileCluster
from tests.support.objects import NAMESPACE, redis_tier
from tests.support.worlds import Simulation
from tests.topology import looks

TIER = Key("CacheTier", NAMESPACE, "shared")
CROWDED = [*looks.even(2), ()]
"""Two shards have what three are to have."""


def look(simulation: Simulation, found: Cluster, **report: Any) -> None:
    """Have the operator look at the cluster, and find this."""
    (order,) = (one for one in simulation.step(TIER).actions if isinstance(one, ReconcileCluster))
    fits = {uid: replace(one, max_bytes=order.goal.max_bytes_each) for uid, one in found.servers.items()}
    simulation.looks["shared"] = ClusterReport(replace(found, servers=fits), simulation.now, **report)
    simulation.step(TIER)


def looked(simulation: Simulation, found: Cluster, **report: Any) -> None:
    """Have the operator plan with what a look found."""
    look(simulation, found, **report)
    simulation.queue.add(TIER)
    simulation.settle()


def waits(simulation: Simulation, found: Cluster, **report: Any) -> bool:
    """Whether the status that a look leads to can wait, that is, be written with what comes next."""
    look(simulation, found, **report)
    (told,) = simulation.step(TIER).statuses
    return told.can_wait


def formed() -> Simulation:
    """A tier whose cluster serves, and whose third shard is empty."""
    simulation = Simulation(redis_tier(capacity="3Gi", redis={"managed": {"shards": 3}}))
    simulation.advance(2)
    looked(simulation, looks.cluster(looks.even(3)))
    assert simulation.condition("CacheTier", "shared", "Ready")[0] == "True"
    looked(simulation, looks.cluster(CROWDED))
    assert progress(simulation) == "2 of 3 shards ready; moving slots: 0 of 5,461"
    return simulation


def progress(simulation: Simulation) -> Any:
    return simulation.status("CacheTier", "shared").get("progress")


def test_texts_of_progress_are_written_seldom_however_often_they_change() -> None:
    simulation = formed()
    assert waits(simulation, looks.cluster(CROWDED), moved=50)
    assert waits(simulation, looks.cluster(CROWDED), moved=161)
    assert waits(simulation, looks.cluster(CROWDED), moved=161, reason="CommandFailed", message="no")
    simulation.advance(5)
    assert str(progress(simulation)).endswith("moving slots: 161 of 5,461; no")


def test_where_progress_begins_and_ends_is_written_at_once() -> None:
    simulation = formed()
    assert not waits(simulation, looks.cluster(looks.even(3)))
    assert progress(simulation) is None
    assert not waits(simulation, looks.cluster(CROWDED))
    assert progress(simulation) is not None


def test_a_loss_is_written_at_once_although_nothing_but_progress_changes_with_it() -> None:
    simulation = formed()
    assert not waits(simulation, looks.cluster(CROWDED), lost=SlotLoss(at=simulation.now, slots=12), moved=9)
    assert simulation.status("CacheTier", "shared")["lastLoss"]["slots"] == 12


def test_a_condition_that_changes_is_written_at_once() -> None:
    simulation = formed()
    assert not waits(simulation, looks.cluster(CROWDED, away=[0]))
    assert simulation.condition("CacheTier", "shared", "SlotsCovered") == ("False", "SlotsUncovered")
