"""What to do next with a managed cluster: rules over one look at it, without memory.

The first rule with something to do decides; when none has, the cluster is settled. Whoever is ended after any command
finds what remains by looking anew, because each rule speaks of what is, never of what was begun.
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
from kvstrata.plan.redis.topology.servers import forget, meet, replace, replicate, take_over
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
    covered,
    replace_useless,
    stand_still(_HAS_TIME),
    *_HAS_TIME,
)
"""In their order. What repairs comes before what is waited for, and what disrupts comes last: only a cluster to which
no rule before objects is scaled or rolled, and not while somebody erases from it."""


def step(cluster: Cluster, goal: Goal) -> Step | None:
    """Return what is to be done, or waited for, now; None if the cluster is as it is meant to be."""
    return _first(View(cluster, goal))


def verdict(cluster: Cluster, goal: Goal) -> Verdict:
    """Return how the cluster is."""
    view = View(cluster, goal)
    return judge(view, _first(view))


def look(cluster: Cluster, goal: Goal, moved: int = 0) -> tuple[Step | None, Verdict]:
    """Return both of one look, since which so many slots have moved as the step says."""
    view = View(cluster, goal)
    found = _first(view)
    return found, judge(view, found, moved)


def _first(view: View) -> Step | None:
    return next((found for rule in RULES if (found := rule(view)) is not None), None)
