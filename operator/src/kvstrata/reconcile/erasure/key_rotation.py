"""Rotates the key that signs receipts: on schedule, and on request.

Observes: the age of the key, the annotation of the ConfigMap with public keys, all chains of receipts.
Writes: the key's Secret, hand-overs into the chains, `status.receipts` of CacheDomains, Events about them.
Runs again when: LOOK_S has passed. Each look completes the unfinished work of an earlier process.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from kvstrata.clients.kube import Kube, KubeError, NotLeadingError
from kvstrata.clients.signing import SigningError
from kvstrata.plan.erasure.receipt_chain import ChainState
from kvstrata.reconcile import metrics
from kvstrata.reconcile.erasure.receipt_chain import Chains, record_chain, recorded_chain
from kvstrata.reconcile.events import Events
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

LOOK_S = 15.0
RETRY_S = 10.0


class KeyRotation:
    """`max_age_s` is how long a key signs, 0 for no limit."""

    def __init__(self, kube: Kube, store: Store, chains: Chains, max_age_s: float) -> None:
        self._kube, self._store, self._chains, self._max_age_s = kube, store, chains, max_age_s
        self._events = Events(kube)

    async def run(self) -> None:
        while True:
            wait_s = LOOK_S
            try:
                await self.look()
            except (KubeError, SigningError, NotLeadingError) as error:
                log.warning("the key of receipts was not rotated", extra={"error": str(error)})
                wait_s = RETRY_S
            except Exception:
                log.exception("the key of receipts was not rotated; this is a defect")
                metrics.FAILURES.labels("CacheDomain", "Bug").inc()
            await asyncio.sleep(wait_s)

    async def look(self) -> None:
        """Start a rotation if one is due, and complete a started one. Raises KubeError, SigningError and
        NotLeadingError; the next look continues."""
        if await self._chains.rotate(self._max_age_s):
            log.warning("another key signs receipts from now on")
            metrics.RECEIPT_KEY_ROTATIONS.inc()
        is_over, problems = await self._chains.hand_over(partial(recorded_chain, self._store), self._publish)
        for problem in problems:
            log.warning("a chain of receipts was not handed over to the current key", extra={"problem": problem})
        metrics.RECEIPT_CHAINS_STUCK.set(len(problems))
        if is_over:
            log.info("every chain of receipts was handed over to the current key")

    async def _publish(self, chain: ChainState) -> None:
        found = await record_chain(self._kube, self._store, chain)
        if found is not None and chain.newest is not None:
            message = f"receipt {chain.newest.head.sequence} hands the chain over to the new signing key"
            await self._events.publish(found, "ReceiptsKeyRotated", message)
