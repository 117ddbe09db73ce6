"""An object that the API server accepted and this version cannot read: a newer CRD, or one changed by hand."""

from __future__ import annotations

from datetime import datetime

from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.plan.actions import Plan, StatusWrite
from kvstrata.plan.conditions import READY, RECONCILING, STALLED, status_from_nothing

REASON = "InvalidSpec"


def plan_unreadable(world: World, key: Key, now: datetime) -> Plan:
    """Say what cannot be read; what was in force before stays in force."""
    found = world.unreadable[key]
    if found.told:
        return Plan()
    message = f"this version cannot read the object, so what was enforced before stays in force: {found.problem}"
    status = status_from_nothing(
        {READY: "False", RECONCILING: "False", STALLED: "True"}, REASON, message[:4000], found.generation, now
    )
    return Plan(statuses=(StatusWrite(key, found.resource_version, status),))
