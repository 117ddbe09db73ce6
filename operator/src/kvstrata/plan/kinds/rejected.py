"""An object of ours that the API server will not have: who needs it says so in its status, in that server's words."""

from __future__ import annotations

from datetime import datetime

from kvstrata.api.base import Resource
from kvstrata.api.reasons import CHILD_REFUSED
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, Plan
from kvstrata.plan.conditions import kstatus, write_status
from kvstrata.plan.erasure.departure import plan_creation_refused

MOST_CHARACTERS = 4000


def plan_refused(world: World, key: Key, child: str, sentence: str, now: datetime) -> Plan:
    """Return the plan that tells of a refusal: of the conditions only Ready, Reconciling and Stalled change.

    `child` is kind and name of what was refused, `sentence` what the API server said. The next plan that is carried
    out in full replaces them. A policy that is deleted, and is not erased because of it, says that it gives no access.
    """
    policy = world.policies.get(key.name) if key.kind == TenantCachePolicy.INFO.kind else None
    if policy is not None and policy.metadata.deleting:
        return plan_creation_refused(policy, child, sentence[:MOST_CHARACTERS], now)
    owner = _owner(world, key)
    if owner is None or owner.metadata.deleting:
        return Plan()
    refused = Decision(CHILD_REFUSED, f"{child}: {sentence}"[:MOST_CHARACTERS])
    status = getattr(owner, "status")  # noqa: B009  (declared by each kind)
    return Plan(statuses=write_status(owner, now, kstatus(refused, None, refused), {}, kept=status.conditions))


def _owner(world: World, key: Key) -> Resource | None:
    if key.kind == "CacheTier":
        return world.tiers.get(key.name)
    return world.models.get(key.name) if key.kind == "CachedModel" else None
