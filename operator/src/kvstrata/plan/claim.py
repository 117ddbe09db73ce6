"""Claim of a namespace: the one installation of the operator that serves it, in `status.servedBy` of its CacheDomain.

An installation plans nothing in a namespace until the claim is its own, which it writes only over no claim. A claim
ends by uninstall, or by the annotation `kvstrata.io/served-by` of the CacheDomain; time alone ends none. Until the
installation of the annotation claims it, the last one's only write is that none serves it. The claim of a CacheDomain
that was deleted counts for its successor.
"""

from __future__ import annotations

from datetime import datetime

from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain, Installation
from kvstrata.api.reasons import DomainReason
from kvstrata.model.refs import Key
from kvstrata.model.world import OBJECTS, World
from kvstrata.plan.actions import Decision, Plan, StandBack, StatusWrite, bundle_keys, key_of
from kvstrata.plan.conditions import kstatus, write_status

SERVED_BY = "kvstrata.io/served-by"
"""Annotation of a CacheDomain: the uid of the installation that is to serve the namespace, over any claim."""


def served_by_another(world: World) -> str:
    """Return why this installation must leave the namespace to another; empty if it need not."""
    own, domain = world.installation, world.domain
    if own is None:
        return ""
    chosen = domain.metadata.annotations.get(SERVED_BY, "").strip() if domain is not None else ""
    claim = (domain.status.served_by if domain is not None else None) or world.ending.served_by
    if chosen and chosen != own.uid:
        why, other = f"has the annotation {SERVED_BY}: {chosen}", ""
    elif not chosen and claim is not None and claim.uid != own.uid:
        why, other = f"is claimed by {_operator(claim)}", "uninstall that release, or "
    else:
        return ""
    return (
        f"CacheDomain {world.namespace}/{DOMAIN_NAME} {why}: {_operator(own)} writes nothing in this namespace. "
        f"To have it serve the namespace, {other}annotate the CacheDomain with {SERVED_BY}: {own.uid}"
    )


def plan_claim(world: World, key: Key, now: datetime) -> Plan | None:
    """Return the plan of an object in a namespace that this installation does not serve yet; None if it does."""
    own, domain, is_domain = world.installation, world.domain, key.kind == CacheDomain.INFO.kind
    if why := served_by_another(world):
        statuses = tuple[StatusWrite, ...]()
        if is_domain and domain is not None and domain.status.served_by == own:
            unserved = Decision(DomainReason.SERVED_BY_ANOTHER, f"{why}. No other has claimed it yet")
            statuses = write_status(domain, now, kstatus(pending=unserved), {}, keeps_others=True)
        return Plan(actions=(StandBack(why),) if is_domain else (), statuses=statuses)
    if own is None or domain is None or domain.metadata.deleting or domain.status.served_by == own:
        return None
    if not is_domain:
        return Plan()  # The claim's write enqueues it.
    claimed = StatusWrite(key, domain.metadata.resource_version, {"servedBy": own.to_kubernetes()})
    everything = (key_of(one) for kind in OBJECTS for one in world.objects(kind).values())
    return Plan(statuses=(claimed,), enqueue=(*everything, *world.unreadable, *bundle_keys(world)))


def _operator(one: Installation) -> str:
    return f"the operator in namespace {one.namespace}" + (f" (release {one.release})" if one.release else "")
