"""The order of an erasure: an invalidation, or a deleted policy that can have none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.clients.resources import BY_KIND
from kvstrata.model.erasure.facts import Fact, Rolled
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.model.refs import Key
from kvstrata.objects.labels import ERASES
from kvstrata.plan.actions import CarryOutErasure
from kvstrata.plan.erasure import gather
from kvstrata.plan.erasure import gather_deleted_policy as departed
from kvstrata.plan.erasure.policy_deletion import ABANDON, FINALIZER
from kvstrata.reconcile.erasure.deps import ErasureDeps

REMOVED = "the object that ordered it was removed"
FAILED = "the object that ordered it had failed before it was known what was kept"


class Source:
    def __init__(self, deps: ErasureDeps, namespace: str, order: CarryOutErasure) -> None:
        self._deps, self._namespace, self._order = deps, namespace, order
        self._unattended: datetime | None = None

    @property
    def key(self) -> Key:
        return Key(self._order.kind, self._namespace, self._order.name)

    @property
    def found(self) -> CacheInvalidation | TenantCachePolicy | None:
        """The object; None if it is gone or its name belongs to another."""
        objects = self._deps.store.domain(self._namespace).objects[self._order.kind]
        found: CacheInvalidation | TenantCachePolicy | None = objects.get(self._order.name)
        return found if found is not None and found.uid == self._order.uid else None

    @property
    def abandoned(self) -> str:
        """Why the erasure is abandoned: by an annotation of the order or of the deleted policy, or because the order
        was removed or has finished. Empty if it is not."""
        world, found = self._deps.store.world(self._namespace), self.found
        if found is None:
            return "" if self.key in world.unreadable else REMOVED
        policy = world.policies.get(world.policy_names.get(found.metadata.annotations.get(ERASES, ""), ""))
        told = [one.metadata.annotations.get(ABANDON, "").strip() for one in (found, policy) if one is not None]
        return next(filter(None, told), FAILED if _has_finished(found) else "")

    @property
    def over(self) -> bool:
        found = self.found
        if found is None:
            return self.key not in self._deps.store.world(self._namespace).unreadable
        return _has_finished(found)

    def unattended(self) -> datetime | None:
        """Return since when the namespace is known to be going: its domain is gone and the order is deleted, too.
        None if not."""
        found = self.found
        going = found is not None and found.metadata.deleting
        if not (going and self._deps.store.world(self._namespace).domain is None):
            self._unattended = None
        elif self._unattended is None:
            self._unattended = self._deps.now()
        return self._unattended

    def begin(self) -> ErasureRecord | None:
        """Return the initial record, stored before anything is done; None while it is incomplete. It waits for
        missing data keys, so that they are revoked with their data, unless the erasure is abandoned."""
        world, found = self._deps.store.world(self._namespace), self.found
        record: ErasureRecord | None = None
        match found:
            case CacheInvalidation():
                record = gather.begin(world, found)
            case TenantCachePolicy():
                record = departed.begin(world, found, self._deps.now())
        waits = record is not None and gather.lacks_keys(world, record) and not self.abandoned
        return None if waits else record

    async def hold(self) -> None:
        """Set the finalizer of an invalidation, whose status shows the erasure. Policies get theirs before anything
        is cached."""
        found = self.found
        if not isinstance(found, CacheInvalidation) or found.metadata.deleting:
            return
        if FINALIZER in found.metadata.finalizers:
            return
        self._deps.may_write()
        resource, metadata = BY_KIND[found.INFO.kind], found.metadata
        written = await self._deps.kube.set_finalizers(
            resource, found.namespace, found.name, (*metadata.finalizers, FINALIZER), metadata.resource_version
        )
        self._deps.store.observe(written | {"apiVersion": resource.api_version, "kind": resource.kind})

    def news(self, record: ErasureRecord) -> Iterable[Fact]:
        found = self.found
        if found is None:
            return ()
        if record.erasure.only(Rolled) is None and (rolled := self._rolled(record)) is not None:
            # Acknowledgements are compared with it, so it comes first and alone.
            return (rolled,)
        return tuple(self._words(record, found))

    def _words(self, record: ErasureRecord, found: CacheInvalidation | TenantCachePolicy) -> Iterator[Fact]:
        world, now = self._deps.store.world(self._namespace), self._deps.now()
        awaiting = found.status.awaiting if isinstance(found, CacheInvalidation) else ()
        yield from gather.words(world, record, awaiting, now)
        yield from gather.servers_seen(world, record.erasure.order)
        yield from gather.tiers_lost(world, record.erasure, now)

    def _rolled(self, record: ErasureRecord) -> Rolled | None:
        world, found = self._deps.store.world(self._namespace), self.found
        if isinstance(found, CacheInvalidation):
            return gather.rolled(world, found, record)
        return departed.rolled(world, record, self._deps.now())


def _has_finished(found: CacheInvalidation | TenantCachePolicy) -> bool:
    return isinstance(found, CacheInvalidation) and found.finished
