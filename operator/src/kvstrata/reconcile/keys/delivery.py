"""Sends data keys that a KMS unwrapped to pods whose bundles name them.

Observes: pods and how many keys they report missing (`PodState.keys_lacking`), keys in the ring. Writes no objects:
keys go over mutual TLS to gates that proved their pod by its token. Runs again when: a pod lacks keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvstrata.clients.gate import GateClient
from kvstrata.clients.kube import Kube
from kvstrata.contract.messages.key_delivery import MAX_CARRIED, overwrite, pack_keys
from kvstrata.model.pods import Pod
from kvstrata.reconcile import metrics
from kvstrata.reconcile.background import Leads
from kvstrata.reconcile.keys.key_ring import KeyRing
from kvstrata.reconcile.pod_states import PodAnswerError, PodTokens
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

FOLLOW_S = 0.2
RETRY_S = (0.5, 1.0, 2.0, 5.0, 15.0)


class KeyDelivery:
    """Serves pods. `leading` is checked before keys are sent; `sleep` takes seconds."""

    def __init__(
        self,
        kube: Kube,
        gates: GateClient,
        store: Store,
        ring: KeyRing,
        leading: Leads,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._gates, self._store, self._ring, self._leading = gates, store, ring, leading
        self._tokens, self._sleep = PodTokens(kube), sleep
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                self.follow()
                await asyncio.sleep(FOLLOW_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def follow(self) -> None:
        """Serve every live pod that lacks keys."""
        live: set[str] = set()
        for namespace in self._ring.namespaces:
            models = self._store.domain(namespace).pods.values()
            for pod in (pod for pods in models for pod in pods.values() if pod.live):
                live.add(pod.uid)
                task = self._tasks.get(pod.uid)
                if (task is None or task.done()) and self._lacks(namespace, pod):
                    self._tasks[pod.uid] = asyncio.create_task(self._serve(namespace, pod), name=f"keys of {pod.name}")
        for uid in self._tasks.keys() - live:
            self._tasks.pop(uid).cancel()

    def _lacks(self, namespace: str, pod: Pod) -> bool:
        reported = self._store.domain(namespace).states.get(pod.uid)
        return reported is not None and reported.in_contact and bool(pod.ip) and reported.state.keys_lacking > 0

    async def _serve(self, namespace: str, pod: Pod) -> None:
        failures = 0
        while self._lacks(namespace, pod):
            brought = 0
            try:
                with suppress(PodAnswerError):
                    brought = await self._bring(namespace, pod)
            except Exception:
                log.exception("a pod was not brought data keys; this is a defect", extra={"pod": pod.name})
                metrics.FAILURES.labels("CacheDomain", "Bug").inc()
            failures = 0 if brought else failures + 1
            await self._sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])

    async def _bring(self, namespace: str, pod: Pod) -> int:
        """Return the number of keys that the pod lacked and has now."""
        asked = sorted((await self._tokens.answer_of(namespace, pod, self._gates.keys)).ids)
        lacking = {*asked}
        for first in range(0, len(asked), MAX_CARRIED):
            secrets = self._ring.secrets(namespace, asked[first : first + MAX_CARRIED])
            if secrets and self._leading():
                message = pack_keys(secrets)
                try:
                    answer = await self._tokens.answer_of(namespace, pod, self._gates.bring_keys, message)
                finally:
                    overwrite(message)
                lacking &= {*answer.ids}
        return len(asked) - len(lacking)
