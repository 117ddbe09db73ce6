"""Sends data keys that a KMS unwrapped to pods whose bundles name them.

Observes: pods and how many keys they report missing (`PodState.keys_lacking`), keys in the ring. Writes no objects:
keys go over mutual TLS to gates that proved their pod by its token. Runs again when: a pod lacks keys.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

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


class Gates(Protocol):
    """Gates of pods; see `clients.gate.GateClient`."""

    async def keys(self, pod_ip: str, server_name: str) -> tuple[KeysLacking, str]: ...

    async def bring_keys(self, pod_ip: str, server_name: str, message: bytearray) -> tuple[KeysLacking, str]: ...


class _UnreachableError(Exception):
    """A pod did not answer, or its answer is not trusted. The message holds no secret."""


@dataclass(slots=True)
class _Visits:
    """The visits of one pod: the last one, failures since the last success, and when the next is due (monotonic)."""

    task: asyncio.Task[None] | None = None
    failures: int = 0
    not_before: float = 0.0


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
        self._visits: dict[str, _Visits] = {}

    async def run(self) -> None:
        try:
            while True:
                self.follow()
                await asyncio.sleep(FOLLOW_S)
        finally:
            self._forget(self._visits.keys())

    def follow(self) -> None:
        known: set[str] = set()
        for namespace in self._ring.namespaces:
            domain = self._store.domain(namespace)
            for pod in (pod for pods in domain.pods.values() for pod in pods.values() if pod.live):
                known.add(pod.uid)
                visits, reported = self._visits.setdefault(pod.uid, _Visits()), domain.states.get(pod.uid)
                lacks = reported is not None and reported.in_contact and reported.state.keys_lacking > 0
                idle = visits.task is None or visits.task.done()
                if lacks and idle and pod.ip and self._monotonic() >= visits.not_before:
                    visits.task = asyncio.create_task(self._visit(namespace, pod, visits), name=f"keys of {pod.name}")
        self._forget(self._visits.keys() - known)

    def _forget(self, uids: Iterable[str]) -> None:
        for visits in [self._visits.pop(uid) for uid in tuple(uids)]:
            if visits.task is not None:
                visits.task.cancel()

    async def _visit(self, namespace: str, pod: Pod, visits: _Visits) -> None:
        brought = 0
        try:
            brought = await self._bring(namespace, pod)
        except _UnreachableError as error:
            log.info("a pod was not brought data keys", extra={"pod": pod.name, "why": str(error)})
        except Exception:
            log.exception("a pod was not brought data keys; this is a defect", extra={"pod": pod.name})
            metrics.FAILURES.labels("CacheDomain", "Bug").inc()
        metrics.KEYS_BROUGHT.inc(brought)
        visits.failures = 0 if brought else visits.failures + 1
        visits.not_before = self._monotonic() + RETRY_S[min(visits.failures, len(RETRY_S) - 1)]

    async def _bring(self, namespace: str, pod: Pod) -> int:
        """Return the number of keys that the pod lacked and has now."""
        ip, gate = pod.ip or "", gate_server_name(pod.model, namespace)
        asked = sorted((await self._believed(namespace, pod, self._gates.keys(ip, gate))).ids)
        lacking = {*asked}
        for first in range(0, len(asked), MAX_CARRIED):
            secrets = self._ring.secrets(namespace, asked[first : first + MAX_CARRIED])
            if secrets and self._leading():
                message = pack_keys(secrets)
                try:
                    answer = await self._believed(namespace, pod, self._gates.bring_keys(ip, gate, message))
                finally:
                    overwrite(message)
                lacking &= {*answer.ids}
        return len(asked) - len(lacking)

    async def _believed(self, namespace: str, pod: Pod, asked: Awaitable[tuple[KeysLacking, str]]) -> KeysLacking:
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
