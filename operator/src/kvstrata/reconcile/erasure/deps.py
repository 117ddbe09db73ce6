"""Dependencies shared by all erasures, and the objects that order them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import BY_KIND
from kvstrata.model.refs import Key
from kvstrata.plan.actions import ErasureOrder
from kvstrata.plan.erasure.ordering import Ordering
from kvstrata.plan.erasure.policy_deletion import FINALIZER
from kvstrata.reconcile.erasure.jobs import Jobs
from kvstrata.reconcile.erasure.keys import KeyRevoker
from kvstrata.reconcile.erasure.pods import Pods
from kvstrata.reconcile.erasure.receipt_chain import Chains
from kvstrata.reconcile.erasure.record_store import RecordStore
from kvstrata.reconcile.erasure.tiers import Looks
from kvstrata.reconcile.events import Events
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.store import Store

AT_ONCE = 8
"""Concurrent orders to pods and looks at tiers, over all erasures."""


@dataclass(slots=True)
class ErasureDeps:
    """`may_write` raises NotLeadingError after leadership was lost; `now` is the wall clock in UTC."""

    kube: Kube
    store: Store
    queue: WorkQueue
    events: Events
    record_store: RecordStore
    keys: KeyRevoker
    looks: Looks
    pods: Pods
    jobs: Jobs
    chains: Chains
    may_write: Callable[[], None]
    now: Callable[[], datetime]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    named: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """By keyspace, chunk names for pods to look up: kept from failed erasures for a new attempt."""

    def ordering_of(self, namespace: str, order: ErasureOrder) -> Ordering | None:
        """Return the object that ordered an erasure; None if it is gone or its name belongs to another."""
        found: Ordering | None = self.store.domain(namespace).objects(order.kind).get(order.name)
        return found if found is not None and found.uid == order.uid else None

    async def hold(self, found: Ordering | None, *, held: bool = True) -> None:
        """Give an invalidation its finalizer, because its status shows the erasure; or remove it. Policies get theirs
        before anything is cached."""
        if not isinstance(found, CacheInvalidation) or (FINALIZER in found.metadata.finalizers) == held:
            return
        if held and found.metadata.deleting:
            return
        finalizers = (*(one for one in found.metadata.finalizers if one != FINALIZER), *((FINALIZER,) if held else ()))
        self.may_write()
        resource, version = BY_KIND[found.INFO.kind], found.metadata.resource_version
        try:
            written = await self.kube.set_finalizers(resource, found.namespace, found.name, finalizers, version)
        except KubeError as error:
            if held or not error.is_not_found:
                raise
            return
        if not found.metadata.deleting:
            self.store.observe(written)
            self.queue.add(Key(resource.kind, found.namespace, found.name))
