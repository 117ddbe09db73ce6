"""Child objects of API objects, by server-side apply, never over foreign objects.

Watches select by label, so foreign objects do not show in the store. An unknown child is created, a known one applied
by UID; after a conflict the object is read and either belongs to the owner or is left alone. There is no race: the API
server compares UID and resourceVersion in the write itself. Orders and finalizers are written here as well.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from kvstrata.api.reasons import InvalidationReason
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import BY_KIND, SERVICE_MONITOR
from kvstrata.model.refs import FIELD_MANAGER_PREFIX, Key
from kvstrata.model.world import Dispute
from kvstrata.objects import mark
from kvstrata.objects.applied import changed_after, difference, missing, part_of, writer_of
from kvstrata.plan.actions import Create, ReadForeign, Remove, SetFinalizers
from kvstrata.plan.kinds.model_deletion import WORKLOADS
from kvstrata.plan.ownership import has_our_label

from . import metrics
from .claims import claimed
from .domain_store import note_refusal
from .events import Events
from .queue import WorkQueue
from .store import Store

log = logging.getLogger(__name__)

PEACE = timedelta(minutes=5)
"""The longest time between repairs of a workload that others change; after so long without one they begin again."""

GUARDS_WAIT = timedelta(seconds=4)
"""The longest time between repairs of other children: NetworkPolicies and Roles guard the pods of the model."""


class Children:
    """Writes children; keys that an answer affects are queued."""

    def __init__(self, kube: Kube, store: Store, queue: WorkQueue) -> None:
        self._kube, self._store, self._queue = kube, store, queue
        self._events = Events(kube)

    async def apply(self, key: Key, children: Sequence[Mapping[str, Any]]) -> None:
        """Apply children that differ. Raises KubeError: ChildRefusedError for an invalid child, NameConflictError."""
        for desired in children:
            await self._apply(key, desired)

    async def find_foreign(self, namespace: str, children: Sequence[Mapping[str, Any]]) -> None:
        """Read unknown children's names, so that all foreign objects are reported at once."""
        domain = self._store.domain(namespace)
        for desired in children:
            slot = _slot(desired)
            if slot not in domain.children and slot not in domain.foreign:
                await self._look(namespace, *slot, _owner(desired), desired)

    async def _apply(self, key: Key, desired: Mapping[str, Any]) -> None:
        (kind, name), domain = _slot(desired), self._store.domain(key.namespace)
        slot = (kind, name)
        live, rewritten = domain.children.get(slot), domain.rewritten.get(slot)
        wanted = missing(domain.memo, live, desired, rewritten)
        if wanted is None:
            return
        path, dispute, now = changed_after(live, wanted, rewritten), domain.disputes.get(slot), domain.versions.now()
        if path and dispute is not None and now < dispute.due:
            self._queue.add(key, (dispute.due - now).total_seconds())
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
        self._queue.add_all(self._store.observe(applied))
        if difference(applied, wanted) == "":
            domain.rewritten.pop(slot, None)
        else:
            await self._note_rewritten(key, wanted, applied)
        if live is not None and path:
            await self._note_dispute(key, live, path)
        else:
            domain.disputes.pop(slot, None)

    async def _note_dispute(self, key: Key, live: Mapping[str, Any], path: str) -> None:
        """Record that a field was put back; a writer that changes a child again is named, and answered ever later."""
        slot, domain, by = _slot(live), self._store.domain(key.namespace), writer_of(live, path)
        before, now = domain.disputes.get(slot), domain.versions.now()
        repairs = before.repairs + 1 if before is not None and now < before.due + PEACE else 1
        most = PEACE if slot[0] in WORKLOADS else GUARDS_WAIT
        due = now + min(most, timedelta(seconds=2 ** min(repairs, 9)))
        domain.disputes[slot] = Dispute(path, by, repairs, due)
        is_known = before is not None and before.repairs > 1 and (before.field, before.by) == (path, by)
        owner = domain.objects(key.kind).get(key.name)
        if repairs > 1 and not is_known and owner is not None:
            message = f"{slot[0]} {slot[1]}: {by} changed {path}; it is put back"
            await self._events.publish(owner, "ChildChanged", message, warning=True)

    async def _pull_secrets(self, namespace: str) -> dict[str, Any]:
        """Return the field of the namespace's default account, which pods with another account do not use."""
        default = await self._kube.get(BY_KIND["ServiceAccount"], namespace, "default") or {}
        return {name: value for name, value in default.items() if name == "imagePullSecrets" and value}

    async def _note_rewritten(self, key: Key, wanted: Mapping[str, Any], applied: Mapping[str, Any]) -> None:
        """Take a child as the API server answers it: a webhook that rewrites it would do so again at every write. Its
        mark becomes one of that content."""
        slot, domain, changed = _slot(wanted), self._store.domain(key.namespace), difference(applied, wanted)
        if domain.mark_key:
            own = mark.marked(domain.mark_key, part_of(applied, wanted))["metadata"]["annotations"][mark.MARK]
            annotations = {**wanted["metadata"]["annotations"], mark.MARK: own}
            again = {**wanted, "metadata": {**wanted["metadata"], "annotations": annotations}}
            applied = await self._written(key, again)
            self._queue.add_all(self._store.observe(applied))
        fields, changed = part_of(applied, wanted), changed.lstrip(".")
        if domain.rewritten.get(slot) == fields:
            return
        domain.rewritten[slot] = fields
        message = f"{slot[0]} {slot[1]}: {changed} is stored otherwise than written, as by an admission webhook"
        log.warning("a child was rewritten", extra={"key": str(key), "child": "/".join(slot), "field": changed})
        if (owner := domain.objects(key.kind).get(key.name)) is not None:
            await self._events.publish(owner, "ChildRewritten", message, warning=True)

    async def _written(self, key: Key, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Apply or create a child. After a conflict, apply over an object of the same owner: a watch is late."""
        (kind, name), domain = _slot(wanted), self._store.domain(key.namespace)
        resource, manager = BY_KIND[kind], f"{FIELD_MANAGER_PREFIX}-{key.kind.lower()}"
        known, owner = domain.children.get((kind, name)), _owner(wanted)
        sent = {**wanted, **await self._pull_secrets(key.namespace)} if kind == "ServiceAccount" else wanted
        if known is not None:
            known = await claimed(self._kube, domain, owner, known, wanted)
        try:
            return await self._kube.apply(
                resource, key.namespace, sent, manager, known["metadata"]["uid"] if known else None
            )
        except KubeError as error:
            if not error.is_conflict:
                raise
            found = await self._kube.get(resource, key.namespace, name)
            if found is None:
                self._queue.add_all(self._store.forget(kind, key.namespace, name))
                raise
            known = await claimed(self._kube, domain, owner, found, wanted)
        return await self._kube.apply(
            resource, key.namespace, sent, manager, known["metadata"]["uid"] if known else None
        )

    async def remove(self, key: Key, order: Remove) -> None:
        """Delete an object. The store has the result at once: the next plan must not count on the child."""
        resource, namespace = BY_KIND[order.kind], key.namespace
        await self._kube.delete(resource, namespace, order.name, order.uid)
        if (order.kind, order.name) not in self._store.domain(namespace).children:
            return
        left = await self._kube.get(resource, namespace, order.name)
        if left is None or not has_our_label(left):
            self._queue.add_all(self._store.forget(order.kind, namespace, order.name))
        else:
            self._queue.add_all(self._store.observe(left))

    async def create(self, key: Key, order: Create) -> None:
        """Create an object unless it exists. Raises KubeError, ChildRefusedError for an invalid object. A refusal
        because the namespace is being deleted is recorded for the policies that wait."""
        kind, name = _slot(order.body)
        try:
            created = await self._kube.create(BY_KIND[kind], key.namespace, order.body)
        except KubeError as error:
            if error.is_conflict:
                return
            if error.is_of_ending_namespace or (error.is_refusal and await self._kube.is_ending(key.namespace)):
                domain = self._store.domain(key.namespace)
                self._queue.add_all(note_refusal(domain.ending, domain.policies.values()))
                return
            if error.is_refusal:
                raise ChildRefusedError(kind, name, error) from error
            raise
        self._queue.add_all(self._store.observe(created))

    async def set_finalizers(self, key: Key, order: SetFinalizers) -> None:
        """Set an object's finalizers. Raises KubeError. A missing object is ignored, a changed one read again. An
        object that goes with its last finalizer is removed by its own event."""
        resource, change = BY_KIND[key.kind], (order.finalizers, order.resource_version)
        try:
            stored = await self._kube.set_finalizers(resource, key.namespace, key.name, *change)
        except KubeError as error:
            if error.is_not_found:
                return
            found = await self._kube.get(resource, key.namespace, key.name) if error.is_conflict else None
            if found is None:
                raise
            stored = found
            self._queue.add(key)
        else:
            metrics.WRITES.labels(key.kind, "finalizers").inc()
            if order.unproven:
                log.warning("an object went without its receipt", extra={"key": str(key), "why": order.unproven})
                if (gone := self._store.domain(key.namespace).objects(key.kind).get(key.name)) is not None:
                    await self._events.publish(gone, InvalidationReason.NOT_PROVEN, order.unproven, warning=True)
            if stored["metadata"].get("deletionTimestamp") and not order.finalizers:
                return
        self._queue.add_all(self._store.observe(stored))

    async def read_foreign(self, key: Key, order: ReadForeign) -> None:
        """Read foreign objects again; one that is gone, or may be taken over, wakes its parent."""
        for slot in order.slots:
            await self._look(key.namespace, *slot, order.owner)

    async def _look(
        self,
        namespace: str,
        kind: str,
        name: str,
        owner: Mapping[str, Any],
        desired: Mapping[str, Any] | None = None,
    ) -> None:
        """Read an object by name and record whether it belongs to `owner`."""
        domain = self._store.domain(namespace)
        found = await self._kube.get(BY_KIND[kind], namespace, name)
        waiting = domain.waiting((kind, name))
        if found is None:
            domain.foreign.pop((kind, name), None)
        else:
            domain.belongs_to(owner, found, desired)
        if (kind, name) not in domain.foreign:
            self._queue.add_all(waiting)


class ChildRefusedError(KubeError):
    def __init__(self, kind: str, name: str, cause: KubeError) -> None:
        super().__init__(cause.status, cause.reason, cause.message, cause.retry_after_s)
        self.child = f"{kind} {name}"


def _slot(child: Mapping[str, Any]) -> tuple[str, str]:
    return child["kind"], child["metadata"]["name"]


def _owner(child: Mapping[str, Any]) -> Mapping[str, Any]:
    owner: Mapping[str, Any] = child["metadata"]["ownerReferences"][0]
    return owner
