"""Dependencies shared by all erasures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from kvstrata.clients.gate import GateClient
from kvstrata.clients.kube import Kube
from kvstrata.objects.context import BuildContext
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
        looks=Looks(kube, operator, utc_now),
        pods=Pods(kube, gates, utc_now),
        jobs=Jobs(kube, ctx, utc_now, leading),
        chains=chains,
        may_write=may_write,
        now=utc_now,
    )
