"""The next step of a managed cluster: stateless rules over one look at it.

The first rule with something to do decides; without one the cluster is settled. After a crash the next look finds the
rest, because rules depend only on the observed state.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstrata.model.redis.cluster import Cluster, Goal
from kvstrata.plan.redis.topology import moves, roll, servers, slots
from kvstrata.plan.redis.topology.health import covered, whole
from kvstrata.plan.redis.topology.steps import MoveOrder, Rule, Step, StepReason
from kvstrata.plan.redis.topology.summary import Verdict, failovers, judge
from kvstrata.plan.redis.topology.view import View

__all__ = ["RULES", "MoveOrder", "Step", "StepReason", "Verdict", "View", "failovers", "look"]


def look(cluster: Cluster, goal: Goal, moved: int = 0) -> tuple[Step | None, Verdict]:
    """Return the step to take or wait for, None if the cluster matches its goal, and the verdict; `moved` slots have
    moved since the look."""
    view = View(cluster, goal)
    step = _first(RULES, view)
    return step, judge(view, step, moved)


def stand_still(view: View) -> Step | None:
    """Wait for an erasure where a rule that has time would act."""
    found = _first(_HAS_TIME, view) if view.goal.erased_by else None
    if found is None or found.waits:
        return found
    first, *more = view.goal.erased_by
    whom = f"CacheInvalidation {first}" + (f" and {len(more)} more" if more else "")
    return Step(StepReason.STANDING_STILL, f"{found.message}: begins when {whom} has erased the blocks here")


def _first(rules: Iterable[Rule], view: View) -> Step | None:
    return next((found for rule in rules if (found := rule(view)) is not None), None)


_HAS_TIME: tuple[Rule, ...] = (moves.spread, moves.removal, whole, roll.hand_over, roll.roll)

RULES: tuple[Rule, ...] = (
    servers.take_over,
    moves.towards_lost,
    servers.forget,
    slots.form,
    servers.meet,
    slots.assign,
    servers.replicate,
    slots.rejoin,
    moves.jobs_under_way,
    moves.open_slots,
    roll.resize,
    servers.replace,
    roll.replace_broken,
    roll.replace_locked_out,
    servers.announce,
    covered,
    roll.replace_useless,
    stand_still,
    *_HAS_TIME,
)
"""In order: repairs, then waits, then disruption. A cluster is scaled or rolled only when no earlier rule objects, and
not during an erasure."""
