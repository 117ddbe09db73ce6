"""Dependencies shared by all erasures, and the objects that order them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.clients.gate import GateClient
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.redis.allowed import AllowedServers
from kvstrata.clients.resources import BY_KIND
from kvstrata.model.refs import Key
from kvstrata.objects.context import BuildContext
from kvstrata.plan.actions import ErasureOrder
from kvstrata.plan.erasure.ordering import Ordering
from kvstrata.plan.erasure.policy_deletion import FINALIZER
from kvstrata.reconcile.background import utc_now
from kvstrata.reconcile.erasure.jobs import Jobs
from kvstrata.reconcile.erasure.keys import KeyRevoker
from kvstrata.reconcile.erasure.pods import Pods
from kvstrata.reconcile.erasure.receipt_chain import Chains
from kvstrata.reconcile.erasure.record_store import RecordStore
from kvstrata.reconcile.erasure.tiers import Looks
from kvstrata.reconcile.events import Events
from kvstrata.reconcile.keys.kms_worker import KmsKeys
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secrets import SecretStore
from kvstrata.reconcile.store import Store
from kvstrata.reconcile.writer import require_lead

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

    async def hold(self, found: Ordering | None) -> None:
        """Give an invalidation its finalizer, because its status shows the erasure. Policies get theirs before anything
        is cached."""
        if found is not None and FINALIZER not in found.metadata.finalizers and not found.metadata.deleting:
            await self._set_finalizers(found, (*found.metadata.finalizers, FINALIZER))

    async def release(self, found: Ordering | None) -> None:
        """Remove an invalidation's finalizer."""
        if found is not None and FINALIZER in found.metadata.finalizers:
            try:
                await self._set_finalizers(found, tuple(one for one in found.metadata.finalizers if one != FINALIZER))
            except KubeError as error:
                if not error.is_not_found:
                    raise

    async def _set_finalizers(self, found: Ordering, finalizers: tuple[str, ...]) -> None:
        if not isinstance(found, CacheInvalidation):
            return
        self.may_write()
        resource, version = BY_KIND[found.INFO.kind], found.metadata.resource_version
        written = await self.kube.set_finalizers(resource, found.namespace, found.name, finalizers, version)
        if not found.metadata.deleting:
            self.store.observe(written)
            self.queue.add(Key(resource.kind, found.namespace, found.name))


def assemble(
    kube: Kube,
    store: Store,
    queue: WorkQueue,
    secret_store: SecretStore,
    gates: GateClient,
    ctx: BuildContext,
    leading: Callable[[], bool],
    kms: KmsKeys,
    operator: str,
    chains: Chains,
    allowed: AllowedServers,
) -> ErasureDeps:
    """`operator` is the name of the operator's pod."""
    may_write = partial(require_lead, leading)
    return ErasureDeps(
        kube=kube,
        store=store,
        queue=queue,
        events=Events(kube),
        record_store=RecordStore(kube, ctx.operator_namespace),
        keys=KeyRevoker(kube, store, queue, secret_store, operator, utc_now, may_write, kms),
        looks=Looks(kube, operator, utc_now, allowed=allowed),
        pods=Pods(kube, gates, utc_now),
        jobs=Jobs(kube, ctx, utc_now, leading),
        chains=chains,
        may_write=may_write,
        now=utc_now,
    )
