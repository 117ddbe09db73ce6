"""Where objects begin and end: those created once, and finalizers of those whose deletion waits for something."""

from __future__ import annotations

import logging

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import BY_KIND
from kvstrata.model.refs import Key
from kvstrata.plan.actions import Create, SetFinalizers

from . import metrics
from .domain_store import note_refusal
from .store import Store

log = logging.getLogger(__name__)


async def create(kube: Kube, store: Store, key: Key, order: Create) -> frozenset[Key]:
    """Create an object unless it is there; return the keys that this concerns. Raises KubeError.

    In a namespace that is being deleted nothing can be created: that is taken note of, for those who wait for it.
    """
    resource = BY_KIND[order.body["kind"]]
    try:
        created = await kube.create(resource, key.namespace, order.body)
    except KubeError as error:
        if error.is_conflict:
            return frozenset()
        if error.is_of_ending_namespace or (error.is_refusal and await kube.is_ending(key.namespace)):
            domain = store.domain(key.namespace)
            return note_refusal(domain.ending, domain.objects["TenantCachePolicy"].values())
        raise
    return store.observe(created | {"apiVersion": resource.api_version, "kind": resource.kind})


async def set_finalizers(kube: Kube, store: Store, key: Key, order: SetFinalizers) -> frozenset[Key]:
    """Set an object's finalizers; return the keys that this concerns. Raises KubeError.

    One that is gone is left alone, one that somebody changed is read anew. What goes with its last finalizer is told
    by its own event, not by the answer.
    """
    resource = BY_KIND[key.kind]
    concerned = frozenset[Key]()
    try:
        stored = await kube.set_finalizers(resource, key.namespace, key.name, order.finalizers, order.resource_version)
    except KubeError as error:
        if error.is_not_found:
            return frozenset()
        found = await kube.get(resource, key.namespace, key.name) if error.is_conflict else None
        if found is None:
            raise
        stored, concerned = found, frozenset({key})
    else:
        metrics.WRITES.labels(key.kind, "finalizers").inc()
        if order.unproven:
            log.warning("an object went without its receipt", extra={"key": str(key), "why": order.unproven})
        if stored["metadata"].get("deletionTimestamp") and not order.finalizers:
            return frozenset()
    return concerned | store.observe(stored | {"apiVersion": resource.api_version, "kind": resource.kind})
