"""What to do next with a managed cluster: rules over one look at it, without memory.

The first rule with something to do decides; when none has, the cluster is settled. Whoever is ended after any command
finds what remains by looking anew, because each rule speaks of what is, never of what was begun.
"""

from __future__ import annotations

from kvstrata.model.topology import Cluster, Goal

from . import moves
from .steps import MoveOrder, Rule, Step, StepReason
from .view import View

__all__ = ["MoveOrder", "Rule", "Step", "StepReason", "View", "step"]

RULES: tuple[Rule, ...] = (
    *moves.REPAIR,
    *moves.SCALE,
)


def step(cluster: Cluster, goal: Goal) -> Step | None:
    """Return what is to be done, or waited for, now; None if the cluster is as it is meant to be."""
    view = View(cluster, goal)
    return next((found for rule in RULES if (found := rule(view)) is not None), None)
