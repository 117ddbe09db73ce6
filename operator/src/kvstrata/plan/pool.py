"""PrefixPool: accepted, and honest about it."""

from __future__ import annotations

from datetime import datetime

from kvstrata.api.reasons import PoolReason
from kvstrata.model.world import World

from .conditions import false, kstatus, write_status
from .types import Decision, Plan


def plan_pool(world: World, name: str, now: datetime) -> Plan:
    """Return a status that says what this version does with a pool: nothing."""
    pool = world.pools.get(name)
    if pool is None or pool.metadata.deleting:
        return Plan()
    stalled = Decision(
        PoolReason.NOT_RECONCILED,
        "this version stores the PrefixPool but neither warms nor serves it; tenants compute its prefixes themselves",
    )
    findings = (
        *kstatus(stalled, None, stalled),
        false("Warm", stalled.reason, "nothing was computed"),
        false("Published", stalled.reason, "no tenant reads this pool"),
    )
    return Plan(statuses=write_status(pool, now, findings, {}))
