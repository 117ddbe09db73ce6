"""Everything and everybody that carries erasures out, for all of them together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime

from kvstrata.adapters.kube import Kube
from kvstrata.reconcile.events import Events
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.store import Store

from .keep import Keep
from .keys import KeyRevoker
from .pods import Pods
from .ports import DeletionJobs, ReceiptChains
from .tiers import Looks

AT_ONCE = 8
"""Orders to pods, looks at tiers and questions to the API server that are under way at a time, of all erasures."""


@dataclass(slots=True)
class Crew:
    """`operator` is whose word the operator's own looks are, `may_write` raises NotLeadingError when this process may
    write no more, `now` is the wall clock in UTC and `monotonic` in seconds."""

    kube: Kube
    store: Store
    queue: WorkQueue
    events: Events
    keep: Keep
    keys: KeyRevoker
    looks: Looks
    pods: Pods
    jobs: DeletionJobs
    chains: ReceiptChains
    operator: str
    may_write: Callable[[], None]
    now: Callable[[], datetime]
    monotonic: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    issuing: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """By namespace: receipts of one chain are written one after the other."""
