"""The next step of a managed cluster: stateless rules over one look at it.

The first rule with something to do decides; without one the cluster is settled. After a crash the next look finds the
rest, because rules depend only on the observed state.
"""

from __future__ import annotations

from kvstrata.model.redis.cluster import Cluster, Goal
from kvstrata.plan.redis.topology import moves
from kvstrata.plan.redis.topology.health import covered, whole
from kvstrata.plan.redis.topology.moves import stand_still
from kvstrata.plan.redis.topology.roll import (
    hand_over,
    replace_broken,
    replace_locked_out,
    replace_useless,
    resize,
    roll,
)
from kvstrata.plan.redis.topology.servers import announce, forget, meet, replace, replicate, take_over
from kvstrata.plan.redis.topology.slots import assign, form, rejoin
from kvstrata.plan.redis.topology.steps import MoveOrder, Rule, Step, StepReason
from kvstrata.plan.redis.topology.summary import Failover, Verdict, failovers, judge
from kvstrata.plan.redis.topology.view import View

__all__ = [
    "RULES",
    "Failover",
    "MoveOrder",
    "Rule",
    "Step",
    "StepReason",
    "Verdict",
    "View",
    "failovers",
    "look",
    "step",
    "verdict",
]

_HAS_TIME: tuple[Rule, ...] = (*moves.SCALE, whole, hand_over, roll)

RULES: tuple[Rule, ...] = (
    take_over,
    *moves.RESCUE,
    forget,
    form,
    meet,
    assign,
    replicate,
    rejoin,
    *moves.REPAIR,
    resize,
    replace,
    replace_broken,
    replace_locked_out,
    announce,
    covered,
    replace_useless,
    stand_still(_HAS_TIME),
    *_HAS_TIME,
)
"""In order: repairs, then waits, then disruption. A cluster is scaled or rolled only when no earlier rule objects, and
not during an erasure."""


def step(cluster: Cluster, goal: Goal) -> Step | None:
    """Return the step to take or wait for; None if the cluster matches its goal."""
    return _first(View(cluster, goal))


def verdict(cluster: Cluster, goal: Goal) -> Verdict:
    view = View(cluster, goal)
    return judge(view, _first(view))


def look(cluster: Cluster, goal: Goal, moved: int = 0) -> tuple[Step | None, Verdict]:
    """Return step and verdict of one look; `moved` slots have moved since."""
    view = View(cluster, goal)
    found = _first(view)
    return found, judge(view, found, moved)


def _first(view: View) -> Step | None:
    return next((found for rule in RULES if (found := rule(view)) is not None), None)
