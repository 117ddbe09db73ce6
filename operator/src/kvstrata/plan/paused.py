"""Objects with children that a person paused, for the time of a repair by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.reasons import SharedReason
from kvstrata.model.world import World
from kvstrata.objects.applied import changed_after, missing, writer_of
from kvstrata.plan.actions import Create, Decision, EnsureSecret, Plan, Remove, TakeBack, TurnSecret
from kvstrata.plan.conditions import WHILE_PAUSED, is_paused
from kvstrata.plan.kinds.model_deletion import WORKLOADS

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


def unwritten(world: World, owner: Resource, children: Iterable[Mapping[str, Any]]) -> Decision | None:
    """Return why a workload among the desired `children` is not written; None if all are."""
    for child in children:
        slot = child["kind"], child["metadata"]["name"]
        live, rewritten = world.children.get(slot), world.rewritten.get(slot)
        if slot[0] in WORKLOADS and (wanted := missing(world.memo, live, child, rewritten)) is not None:
            why, path = f"the {slot[0]} is being written", changed_after(live, wanted, rewritten)
            if live is not None and path and slot in world.disputes:
                writer = writer_of(live, path)
                why = f"{writer} changes {path} of {slot[0]} {slot[1]}; it is put back: stop that writer"
            writing = Decision(SharedReason.ROLLING_OUT, why)
            return WHILE_PAUSED if is_paused(owner) else writing
    return None
