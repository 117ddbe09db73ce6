"""Dependencies shared by all erasures."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from kvstrata.api.cachedomain import ReceiptChain
from kvstrata.clients.gate import GateClient
from kvstrata.clients.kube import Kube
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.objects.context import BuildContext
from kvstrata.plan.erasure.deletions import DeletionRun, TierDeletion
from kvstrata.plan.erasure.receipt_chain import ChainConflict, Receipted
from kvstrata.reconcile.background import utc_now
from kvstrata.reconcile.erasure.jobs import Jobs
from kvstrata.reconcile.erasure.keys import KeyRevoker
from kvstrata.reconcile.erasure.pods import Pods
from kvstrata.reconcile.erasure.record_store import RecordStore
from kvstrata.reconcile.erasure.tiers import Looks
from kvstrata.reconcile.events import Events
from kvstrata.reconcile.keys.kms_worker import KmsKeys
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secrets import SecretStore
from kvstrata.reconcile.store import Store
from kvstrata.reconcile.writer import NotLeadingError

AT_ONCE = 8
"""Concurrent orders to pods and looks at tiers, over all erasures."""


class DeletionJobs(Protocol):
    """Calls may be repeated; callers check leadership first. Each may raise KubeError."""

    async def start(self, order: TierDeletion) -> DeletionRun:
        """Start the Job of an order, or return the existing one of the same erasure, tier and round. Raises
        LookupError, which names the object, if a Secret of the tier or a key in it is missing."""

    async def look(self, erasure: str, tier: str, round: int) -> DeletionRun | None:
        """Return a Job's state; None if there is none. While the log may still arrive, an unreadable report leaves
        the Job running."""

    async def remove(self, erasure: str) -> None:
        """Delete every Job of an erasure with its objects, running ones too."""


class ReceiptChains(Protocol):
    """Calls may be repeated; callers check leadership first."""

    async def issue(
        self, namespace: str, domain: str, told: ReceiptChain | None, facts: Erasure
    ) -> Receipted | ChainConflict:
        """Append an erasure's receipt to the chain of a domain (its id), or find the existing one. `told` is the
        chain in the CacheDomain's status; the caller writes the result there. Returns after the receipt is stored.
        Raises KubeError; a retry finds what was written."""


@dataclass(slots=True)
class ErasureDeps:
    """`operator` is named in the operator's own findings; `may_write` raises NotLeadingError after leadership was lost;
    `now` is the wall clock in UTC."""

    kube: Kube
    store: Store
    queue: WorkQueue
    events: Events
    record_store: RecordStore
    keys: KeyRevoker
    looks: Looks
    pods: Pods
    jobs: DeletionJobs
    chains: ReceiptChains
    operator: str
    may_write: Callable[[], None]
    now: Callable[[], datetime]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    named: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """By keyspace, chunk names for pods to look up: kept from failed erasures for a new attempt."""
    issuing: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """By namespace: receipts of one chain are written sequentially."""


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
    chains: ReceiptChains,
) -> ErasureDeps:
    """`operator` is the name of the operator's pod."""

    def may_write() -> None:
        if not leading():
            raise NotLeadingError("this process no longer leads and must not write")

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
        operator=operator,
        may_write=may_write,
        now=utc_now,
    )
