"""Children that the API server rejects, objects in the operator's own namespace, and unreadable objects.

The last come from a newer CRD, or were changed by hand.
"""

from __future__ import annotations

from datetime import datetime

from kvstrata.api.base import Resource
from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.reasons import SharedReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, Plan, StatusWrite
from kvstrata.plan.conditions import kstatus, status_from_nothing, write_status
from kvstrata.plan.erasure.policy_deletion import plan_creation_refused
from kvstrata.plan.kinds.model_deletion import FINALIZER, released

MOST_CHARACTERS = 4000


def plan_refused(world: World, key: Key, sentence: str, now: datetime) -> Plan:
    """Return the plan that reports a refused write in Ready and Stalled of the object that it is for; other conditions
    stay. `sentence` is the API server's. The next complete plan replaces the conditions. A deleted policy also reports
    that it gives no access."""
    policy = world.policies.get(key.name) if key.kind == TenantCachePolicy.INFO.kind else None
    if policy is not None and policy.metadata.deleting:
        return plan_creation_refused(policy, sentence[:MOST_CHARACTERS], now)
    owner: Resource | None = world.objects(key.kind).get(key.name)
    if owner is None or (owner.metadata.deleting and FINALIZER not in owner.metadata.finalizers):
        return Plan()
    refused = Decision(SharedReason.CHILD_REFUSED, sentence[:MOST_CHARACTERS])
    return Plan(statuses=write_status(owner, now, kstatus(refused), {}, keeps_others=True))


def plan_in_own_namespace(world: World, operator_namespace: str, key: Key, now: datetime) -> Plan | None:
    """Return the plan that refuses an object of the operator's own namespace; None in other namespaces. Objects that an
    earlier version served there can be deleted: bundles, invalidations and deletions are planned as elsewhere."""
    found: Resource | None = world.objects(key.kind).get(key.name)
    if world.namespace != operator_namespace:
        return None
    if found is None and key.kind == CacheDomain.INFO.kind:
        return Plan()
    invalidates = key.kind == CacheInvalidation.INFO.kind and world.domain_id is not None
    if found is None or found.metadata.deleting or key.kind == BUNDLE or invalidates:
        return None
    message = (
        f"namespace {operator_namespace} is the operator's own and is never served, because its Secrets are about all "
        "others: delete the object, and create it in a namespace of watchNamespaces"
    )
    refused = kstatus(Decision(SharedReason.OPERATOR_NAMESPACE, message))
    return Plan(statuses=write_status(found, now, refused, {}, keeps_others=True))


def plan_unreadable(world: World, key: Key, now: datetime) -> Plan:
    """Report the problem; the last enforced state stays in force. A deleted model or tier is released, because
    nothing of it can be looked for: its children go by their owner references."""
    found = world.unreadable[key]
    if FINALIZER in found.finalizers:
        return Plan((released(found.finalizers, found.resource_version),))
    if found.reported:
        return Plan()
    message = f"this version cannot read the object, so its last readable policy stays in force: {found.problem}"
    problem = Decision(SharedReason.INVALID_SPEC, message[:MOST_CHARACTERS])
    status = status_from_nothing(kstatus(problem), found.generation, now)
    return Plan(statuses=(StatusWrite(key, found.resource_version, status),))
