"""The object that ordered an erasure, and its finalizer if it is an invalidation, whose status shows the erasure.

Policies get theirs before anything is cached.
"""

from __future__ import annotations

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.clients.kube import KubeError
from kvstrata.clients.resources import BY_KIND
from kvstrata.model.refs import Key
from kvstrata.plan.actions import CarryOutErasure, EndErasure
from kvstrata.plan.erasure.ordering import Ordering
from kvstrata.plan.erasure.policy_deletion import FINALIZER
from kvstrata.reconcile.erasure.deps import ErasureDeps


def ordering_of(deps: ErasureDeps, namespace: str, order: CarryOutErasure | EndErasure) -> Ordering | None:
    """Return the ordering object; None if it is gone or its name belongs to another."""
    found: Ordering | None = deps.store.domain(namespace).objects[order.kind].get(order.name)
    return found if found is not None and found.uid == order.uid else None


async def hold(deps: ErasureDeps, found: Ordering | None) -> None:
    if found is not None and FINALIZER not in found.metadata.finalizers and not found.metadata.deleting:
        await _set(deps, found, (*found.metadata.finalizers, FINALIZER))


async def release(deps: ErasureDeps, found: Ordering | None) -> None:
    if found is not None and FINALIZER in found.metadata.finalizers:
        try:
            await _set(deps, found, tuple(one for one in found.metadata.finalizers if one != FINALIZER))
        except KubeError as error:
            if not error.is_not_found:
                raise


async def _set(deps: ErasureDeps, found: Ordering, finalizers: tuple[str, ...]) -> None:
    if not isinstance(found, CacheInvalidation):
        return
    deps.may_write()
    resource, metadata = BY_KIND[found.INFO.kind], found.metadata
    written = await deps.kube.set_finalizers(
        resource, found.namespace, found.name, finalizers, metadata.resource_version
    )
    if not metadata.deleting:
        deps.store.observe(written | {"apiVersion": resource.api_version, "kind": resource.kind})
        deps.queue.add(Key(resource.kind, found.namespace, found.name))
