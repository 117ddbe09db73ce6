"""Objects with children that a person paused, for the time of a repair by hand."""

from __future__ import annotations

from dataclasses import replace

from kvstrata.api.base import Resource
from kvstrata.plan.actions import Create, EnsureSecret, Plan, Remove, TakeBack, TurnSecret
from kvstrata.plan.conditions import is_paused

_WRITES = Create | EnsureSecret | TakeBack | TurnSecret | Remove

WAIT_S = 15.0
"""Least time to the next plan: one that waits for a child of its own would plan again at once."""


def without_children(resource: Resource, plan: Plan) -> Plan:
    """Return the plan of a paused object without writes of its children. Bundles and erasures have plans of their own;
    a Role is written, because gates read new parts of a bundle by it."""
    if not is_paused(resource):
        return plan
    return replace(
        plan,
        actions=tuple(one for one in plan.actions if not isinstance(one, _WRITES)),
        apply=tuple(one for one in plan.apply if one["kind"] == "Role"),
        wake_after_s=None if plan.wake_after_s is None else max(WAIT_S, plan.wake_after_s),
    )
