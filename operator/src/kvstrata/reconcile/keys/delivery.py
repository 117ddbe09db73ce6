"""Sends data keys that a KMS unwrapped to pods whose bundles name them.

Observes: pods and how many keys they report missing (`PodState.keys_lacking`), keys in the ring. Writes no objects:
keys go over mutual TLS to gates that proved their pod by its token. Runs again when: a pod lacks keys.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from kvstrata.clients.gate import GateError
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.contract.messages.key_delivery import MAX_CARRIED, KeysLacking, overwrite, pack_keys
from kvstrata.contract.messages.pod_state import gate_server_name
from kvstrata.model.pods import Pod
from kvstrata.reconcile import metrics
from kvstrata.reconcile.audit import tell_refused
from kvstrata.reconcile.keys.key_ring import KeyRing
from kvstrata.reconcile.pod_states import PodTokens
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

FOLLOW_S = 0.2
RETRY_S = (0.5, 1.0, 2.0, 5.0, 15.0)

T = TypeVar("T")


class Gates(Protocol):
    """Gates of pods; see `clients.gate.GateClient`."""

    async def keys(self, pod_ip: str, server_name: str) -> tuple[KeysLacking, str]:
        """Return which keys a pod lacks."""

    async def bring_keys(self, pod_ip: str, server_name: str, message: bytearray) -> tuple[KeysLacking, str]:
        """Bring a pod keys."""


class _UnreachableError(Exception):
    """A pod did not answer, or its answer is not trusted. The message holds no secret."""


class KeyDelivery:
    """Visits pods while this process leads. `leading` is checked before keys are sent."""

    def __init__(
        self,
        kube: Kube,
        gates: Gates,
        store: Store,
        ring: KeyRing,
        leading: Callable[[], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gates, self._store, self._ring, self._leading = gates, store, ring, leading
        self._tokens, self._monotonic = PodTokens(kube), monotonic
        self._visits: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    async def run(self) -> None:
        try:
            while True:
                self.follow()
                await asyncio.sleep(FOLLOW_S)
        finally:
            for task in self._visits.values():
                task.cancel()

    def follow(self) -> None:
        known: set[str] = set()
        for namespace in self._ring.namespaces:
            for pod in self._live(namespace):
                known.add(pod.uid)
                if self._is_due(namespace, pod):
                    visit = self._visit(namespace, pod)
                    self._visits[pod.uid] = asyncio.create_task(visit, name=f"keys of {pod.name}")
        for about in (self._visits, self._failures, self._not_before):
            for uid in about.keys() - known:
                gone = about.pop(uid)
                if isinstance(gone, asyncio.Task):
                    gone.cancel()

    def _live(self, namespace: str) -> list[Pod]:
        models = self._store.domain(namespace).pods.values()
        return [pod for pods in models for pod in pods.values() if pod.live]

    def _is_due(self, namespace: str, pod: Pod) -> bool:
        running = self._visits.get(pod.uid)
        if running is not None and not running.done():
            return False
        reported = self._store.domain(namespace).states.get(pod.uid)
        if reported is None or not reported.in_contact or not pod.ip:
            return False
        return reported.state.keys_lacking > 0 and self._monotonic() >= self._not_before.get(pod.uid, 0.0)

    async def _visit(self, namespace: str, pod: Pod) -> None:
        brought = 0
        try:
            brought = await self._bring(namespace, pod)
        except _UnreachableError as error:
            log.info("a pod was not brought data keys", extra={"pod": pod.name, "why": str(error)})
        except Exception:
            log.exception("a pod was not brought data keys; this is a defect", extra={"pod": pod.name})
            metrics.FAILURES.labels("CacheDomain", "Bug").inc()
        failures = self._failures[pod.uid] = 0 if brought else self._failures.get(pod.uid, 0) + 1
        self._not_before[pod.uid] = self._monotonic() + RETRY_S[min(failures, len(RETRY_S) - 1)]

    async def _bring(self, namespace: str, pod: Pod) -> int:
        ip, gate = pod.ip or "", gate_server_name(pod.model, namespace)
        asked = sorted((await self._believed(namespace, pod, self._gates.keys(ip, gate))).ids)
        lacking = {*asked}
        for first in range(0, len(asked), MAX_CARRIED):
            secrets = self._ring.secrets(namespace, asked[first : first + MAX_CARRIED])
            if not secrets or not self._leading():
                continue
            message = pack_keys(secrets)
            try:
                answer = await self._believed(namespace, pod, self._gates.bring_keys(ip, gate, message))
            finally:
                overwrite(message)
            lacking &= {*answer.ids}
        brought = len(asked) - len(lacking)
        if brought:
            metrics.KEYS_BROUGHT.inc(brought)
        return brought

    async def _believed(self, namespace: str, pod: Pod, asked: Awaitable[tuple[T, str]]) -> T:
        try:
            answer, token = await asked
            doubt = await self._tokens.token_problem(namespace, pod, token)
        except GateError as error:
            metrics.GATE_ERRORS.labels(str(error.reason)).inc()
            raise _UnreachableError(f"pod {pod.name} did not answer: {error.reason}") from error
        except KubeError as error:
            raise _UnreachableError(f"the token of pod {pod.name} could not be reviewed: {error.reason}") from error
        if doubt is not None:
            tell_refused(namespace, pod, doubt)
            raise _UnreachableError(f"the answer of pod {pod.name} is not believed: {doubt}")
        return answer
