"""Objects that belong to objects of the API: applied on the server's side, and only over what is known to be ours.

Watches go by a label, so an object of others does not show in the store. A child that the store does not know is
therefore created and never applied over, one that it knows is applied over by its UID; whatever the API server has
instead is read, and belongs to the child's owner or is left alone. Nothing can come in between, because the API server
compares UID and resourceVersion in the write itself.

Orders and finalizers of objects of the API are written here as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import BY_KIND, SERVICE_MONITOR
from kvstrata.model.refs import BUNDLE, FIELD_MANAGER_PREFIX, Key
from kvstrata.objects.applied import missing
from kvstrata.plan.actions import Create, ReadForeign, Remove, SetFinalizers
from kvstrata.plan.ownership import has_our_label

from . import metrics
from .domain_store import NameConflictError, note_refusal
from .store import Store


class Children:
    """Writes children. `enqueue` gets the keys that an answer concerns, `may_write` raises where writing has ended."""

    def __init__(
        self, kube: Kube, store: Store, enqueue: Callable[[frozenset[Key]], None], may_write: Callable[[], None]
    ) -> None:
        self._kube, self._store, self._enqueue, self._may_write = kube, store, enqueue, may_write

    async def apply(self, key: Key, children: Sequence[Mapping[str, Any]]) -> None:
        """Apply those of the children of `key` that are not as they should be.

        Raises KubeError on the first refusal: a ChildRefusedError for what the API server will not have, a
        NameConflictError for an object of others.
        """
        for desired in children:
            await self._apply(key, desired)

    async def find_foreign(self, namespace: str, children: Sequence[Mapping[str, Any]]) -> None:
        """Look under the names of children that are not known, so that all objects of others are reported at once."""
        domain = self._store.domain(namespace)
        for desired in children:
            slot = _slot(desired)
            if slot not in domain.children and slot not in domain.foreign:
                await self._look(namespace, *slot, _owner(desired))

    async def _apply(self, key: Key, desired: Mapping[str, Any]) -> None:
        (kind, name), domain = _slot(desired), self._store.domain(key.namespace)
        wanted = missing(domain.memo, domain.children.get((kind, name)), desired)
        if wanted is None:
            return
        try:
            applied = await self._written(key, wanted)
        except KubeError as error:
            if error.is_not_found and kind == SERVICE_MONITOR.kind:
                return
            if error.is_refusal:
                raise ChildRefusedError(kind, name, error) from error
            raise
        metrics.WRITES.labels(kind, "apply").inc()
        self._enqueue(self._store.observe(_typed(applied, desired)))

    async def _written(self, key: Key, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Apply over the child that is known, or create it; over one that is not known if it belongs to its owner: that
        has lost our label, or a watch is late."""
        (kind, name), domain = _slot(wanted), self._store.domain(key.namespace)
        resource, manager = BY_KIND[kind], f"{FIELD_MANAGER_PREFIX}-{key.kind.lower()}"
        known = domain.children.get((kind, name))
        self._may_write()
        try:
            uid = known["metadata"]["uid"] if known else None
            return await self._kube.apply(resource, key.namespace, wanted, manager, uid)
        except KubeError as error:
            if not error.is_conflict:
                raise
            found = await self._look(key.namespace, kind, name, _owner(wanted))
            if found is None:
                self._enqueue(self._store.forget(kind, key.namespace, name))
                raise
            if (kind, name) in domain.foreign:
                raise NameConflictError(kind, name) from error
        self._may_write()
        return await self._kube.apply(resource, key.namespace, wanted, manager, found["metadata"]["uid"])

    async def remove(self, namespace: str, order: Remove) -> None:
        """Delete an object. Of a child it is known at once what became of it: the next plan must not count on it until
        a watch tells."""
        resource = BY_KIND[order.kind]
        await self._kube.delete(resource, namespace, order.name, order.uid)
        if (order.kind, order.name) not in self._store.domain(namespace).children:
            return
        left = await self._kube.get(resource, namespace, order.name)
        if left is None or not has_our_label(left):
            self._enqueue(self._store.forget(order.kind, namespace, order.name))
        else:
            self._enqueue(
                self._store.observe(_typed(left, {"apiVersion": resource.api_version, "kind": resource.kind}))
            )

    async def read_foreign(self, key: Key, order: ReadForeign) -> None:
        """Look at objects of others again; `key`, which needs their names, goes on when the last one is gone."""
        foreign = self._store.domain(key.namespace).foreign
        for kind, name in order.slots:
            if (kind, name) in foreign:
                await self._look(key.namespace, kind, name, foreign[kind, name])
        if not any(slot in foreign for slot in order.slots):
            self._enqueue(
                frozenset({key, Key(BUNDLE, key.namespace, key.name)} if key.kind == "CachedModel" else {key})
            )

    async def _look(self, namespace: str, kind: str, name: str, owner: str) -> dict[str, Any] | None:
        """Read an object under a name that the one of UID `owner` needs; take note of whether it belongs to others."""
        domain = self._store.domain(namespace)
        found = await self._kube.get(BY_KIND[kind], namespace, name)
        if found is None:
            domain.foreign.pop((kind, name), None)
        else:
            domain.belongs_to(owner, found)
        return found


class ChildRefusedError(KubeError):
    """The API server will not have an object that belongs to the reconciled one, as it was built from its spec."""

    def __init__(self, kind: str, name: str, cause: KubeError) -> None:
        super().__init__(cause.status, cause.reason, cause.message, cause.retry_after_s)
        self.child = f"{kind} {name}"


def _slot(child: Mapping[str, Any]) -> tuple[str, str]:
    return child["kind"], child["metadata"]["name"]


def _owner(child: Mapping[str, Any]) -> str:
    """Return the UID of the object that a child belongs to."""
    return str(child["metadata"]["ownerReferences"][0]["uid"])


def _typed(answer: dict[str, Any], desired: Mapping[str, Any]) -> dict[str, Any]:
    return answer | {"apiVersion": desired["apiVersion"], "kind": desired["kind"]}


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
