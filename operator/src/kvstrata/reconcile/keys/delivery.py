"""Data keys on their way: brought to pods whose bundles name them, and asked back by an operator that was started anew.

Observes: pods and what they say of themselves (`PodState.keys_lacking`), keys in memory. Writes nothing itself: keys go
over mutual TLS to gates whose word was checked by their token, and `reconcile.keyholders` notes to whom. Runs again
when: a pod lacks keys, or was not asked yet.

To whom a key is brought is noted before it is sent, and so is who turns out to have one: the end of a key is the end of
every copy of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from kvstrata.clients.gate import GateError, GateFailure
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.contract import ContractError
from kvstrata.contract.messages.key_delivery import MAX_CARRIED, KeysHeld, KeysWanted, overwrite
from kvstrata.contract.messages.pod_state import gate_server_name
from kvstrata.model.pods import Pod
from kvstrata.reconcile import metrics
from kvstrata.reconcile.audit import tell_refused
from kvstrata.reconcile.keyholders import KeyHolders
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.memorykeys import MemoryKeys
from kvstrata.reconcile.pod_tokens import PodTokens
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

FOLLOW_S = 0.2
RETRY_S = (0.5, 1.0, 2.0, 5.0, 15.0)
"""From a visit that brought nothing to the next one to the same pod."""

T = TypeVar("T")


class Gates(Protocol):
    """The gates of pods, as `adapters.gate_client.GateClient` is."""

    async def keys(self, pod_ip: str, server_name: str) -> tuple[KeysHeld, str]:
        """Return which keys a pod has."""

    async def bring_keys(self, pod_ip: str, server_name: str, message: bytearray) -> tuple[KeysHeld, str]:
        """Bring a pod keys."""

    async def keys_back(self, pod_ip: str, server_name: str, wanted: KeysWanted) -> tuple[bytearray, str]:
        """Ask a pod for keys."""


class PodSilentError(Exception):
    """A pod did not answer, or its answer is not believed. The message holds no secret."""

    def __init__(self, message: str, *, unheard_of: bool = False) -> None:
        super().__init__(message)
        self.unheard_of = unheard_of
        """Whether its gate is of a version that has no keys but those of its bundle."""


class KeyCourier:
    """Visits pods while this process leads. `leading` is whether it may still give keys away."""

    def __init__(
        self,
        kube: Kube,
        gates: Gates,
        store: Store,
        memory: MemoryKeys,
        holders: KeyHolders,
        leading: Callable[[], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gates, self._store, self._memory, self._leading = gates, store, memory, leading
        self._tokens, self._monotonic, self._holders = PodTokens(kube), monotonic, holders
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._visits: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._asked: dict[str, set[str]] = {}
        """By namespace, the pods that were asked for what is wanted there."""
        self._ended: set[str] = set()

    async def run(self) -> None:
        """Follow the pods in the store until cancelled."""
        try:
            while True:
                self.follow()
                await asyncio.sleep(FOLLOW_S)
        finally:
            for task in (*self._visits.values(), *self._looks.values()):
                task.cancel()

    def follow(self) -> None:
        """Begin with the visits that are due, and give up what no pod has."""
        known: set[str] = set()
        for namespace in self._memory.namespaces:
            self._note_ends(namespace)
            self._look(namespace)
            live = self._live(namespace)
            known |= {pod.uid for pod in live}
            for pod in live:
                if self._is_due(namespace, pod):
                    visit = self._visit(namespace, pod)
                    self._visits[pod.uid] = asyncio.create_task(visit, name=f"keys of {pod.name}")
            asked = self._asked.setdefault(namespace, set())
            if self._memory.wanted(namespace) and all(pod.uid in asked for pod in live):
                self._memory.give_up(namespace)
            self._memory.forget_replaced(namespace)
        for about in (self._visits, self._failures, self._not_before):
            for uid in about.keys() - known:
                gone = about.pop(uid)
                if isinstance(gone, asyncio.Task):
                    gone.cancel()

    async def ask_holders(self, namespace: str, keys: Mapping[str, str], revisions: Mapping[str, int]) -> None:
        """Ask every pod that may have these revoked keys whether it let go of them, and look for operators' ends.

        `keys` gives ids by epoch, `revisions` by model the first revision of its bundle that names none of them, where
        one ever did. A pod that is not in contact is not asked. Raises PodSilentError if another does not answer, and
        CustodyError if it cannot be known who had them.
        """
        await self._holders.tend(namespace)
        custody, domain = self._memory.custody(namespace), self._store.domain(namespace)
        for epoch, name in keys.items():
            custody.remember(epoch, name, self._memory.former(namespace))
        self._note_ends(namespace)
        holders = custody.holders(keys)
        for pod in self._live(namespace):
            said, committed = domain.states.get(pod.uid), domain.bundles.get(pod.model)
            if pod.uid in holders and said is not None and said.in_contact and committed is not None:
                held = await self._believed(namespace, pod, self._gates.keys(pod.ip or "", _name(namespace, pod)))
                custody.hear(pod.uid, held, revisions.get(pod.model, committed.bundle.root.revision))

    def _look(self, namespace: str) -> None:
        """Begin to look who ended, if there is a reason to."""
        running = self._looks.get(namespace)
        if (running is None or running.done()) and self._holders.is_due(namespace):
            self._looks[namespace] = asyncio.create_task(self._tend(namespace), name=f"holders in {namespace}")

    async def _tend(self, namespace: str) -> None:
        try:
            await self._holders.tend(namespace)
        except CustodyError as error:
            log.info("who holds data keys was not noted", extra={"namespace": namespace, "why": str(error)})
        except Exception:
            log.exception("who holds data keys was not noted; this is a defect", extra={"namespace": namespace})
            metrics.FAILURES.labels("CacheDomain", "Bug").inc()

    def _live(self, namespace: str) -> list[Pod]:
        models = self._store.domain(namespace).pods.values()
        return [pod for pods in models for pod in pods.values() if pod.live]

    def _note_ends(self, namespace: str) -> None:
        """Tell the custody which pods the kubelet reported as ended."""
        domain = self._store.domain(namespace)
        ended = {pod.uid for pods in domain.pods.values() for pod in pods.values() if pod.finished}
        ended |= {gone.uid for departures in domain.departures.values() for gone in departures if gone.clean}
        for uid in ended - self._ended:
            self._memory.custody(namespace).ended(uid)
        self._ended |= ended

    def _is_due(self, namespace: str, pod: Pod) -> bool:
        running = self._visits.get(pod.uid)
        if running is not None and not running.done():
            return False
        said = self._store.domain(namespace).states.get(pod.uid)
        if said is None or not said.in_contact or not pod.ip:
            return False
        asks = bool(self._memory.wanted(namespace)) and pod.uid not in self._asked.get(namespace, ())
        return (asks or said.state.keys_lacking > 0) and self._monotonic() >= self._not_before.get(pod.uid, 0.0)

    async def _visit(self, namespace: str, pod: Pod) -> None:
        """Ask a pod which keys it has, take those that are wanted, and bring those that it lacks."""
        brought = 0
        try:
            await self._holders.enter(namespace)
            held = await self._believed(namespace, pod, self._gates.keys(pod.ip or "", _name(namespace, pod)))
            self._memory.custody(namespace).seen(pod.uid, held.held)
            await self._take_back(namespace, pod, held)
            self._asked.setdefault(namespace, set()).add(pod.uid)
            brought = await self._bring(namespace, pod, held)
        except CustodyError as error:
            log.info("a pod was not brought data keys", extra={"pod": pod.name, "why": str(error)})
        except PodSilentError as error:
            if error.unheard_of:
                self._asked.setdefault(namespace, set()).add(pod.uid)
            log.info("a pod was not brought data keys", extra={"pod": pod.name, "why": str(error)})
        except Exception:
            log.exception("a pod was not brought data keys; this is a defect", extra={"pod": pod.name})
            metrics.FAILURES.labels("CacheDomain", "Bug").inc()
        failures = self._failures[pod.uid] = 0 if brought else self._failures.get(pod.uid, 0) + 1
        self._not_before[pod.uid] = self._monotonic() + RETRY_S[min(failures, len(RETRY_S) - 1)]

    async def _take_back(self, namespace: str, pod: Pod, held: KeysHeld) -> None:
        there = {*held.held} & {*self._memory.wanted(namespace).values()}
        for ids in _in_parts(sorted(there)):
            asked = self._gates.keys_back(pod.ip or "", _name(namespace, pod), KeysWanted(tuple(ids)))
            body = await self._believed(namespace, pod, asked)
            holders = {one.uid for one in self._live(namespace)}
            try:
                found = self._memory.take_back(namespace, body, holders)
            except ContractError as error:
                raise PodSilentError(f"pod {pod.name} sent back something else than keys") from error
            if found:
                # Others may lack just these, and were visited in vain.
                for uid in holders:
                    self._not_before.pop(uid, None)

    async def _bring(self, namespace: str, pod: Pod, held: KeysHeld) -> int:
        custody = self._memory.custody(namespace)
        brought = 0
        for epochs in _in_parts(custody.epochs_of(held.lacking)):
            if not self._leading():
                break
            message = custody.pack(pod.uid, epochs)
            try:
                asked = self._gates.bring_keys(pod.ip or "", _name(namespace, pod), message)
                word = await self._believed(namespace, pod, asked)
            finally:
                overwrite(message)
            brought += len({*held.lacking} - {*word.lacking})
        if brought:
            metrics.KEYS_BROUGHT.inc(brought)
        return brought

    async def _believed(self, namespace: str, pod: Pod, asked: Awaitable[tuple[T, str]]) -> T:
        """Return a pod's answer if its token is that of the pod. Raises PodSilentError."""
        try:
            answer, token = await asked
            doubt = await self._tokens.doubt(namespace, pod, token)
        except GateError as error:
            metrics.GATE_ERRORS.labels(str(error.reason)).inc()
            unheard_of = error.reason is GateFailure.UNSUPPORTED
            raise PodSilentError(f"pod {pod.name} did not answer: {error.reason}", unheard_of=unheard_of) from error
        except KubeError as error:
            raise PodSilentError(f"the token of pod {pod.name} could not be reviewed: {error.reason}") from error
        if doubt is not None:
            tell_refused(namespace, pod, doubt)
            raise PodSilentError(f"the answer of pod {pod.name} is not believed: {doubt}")
        return answer


def _in_parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield as many names at a time as one message may be about."""
    for first in range(0, len(names), MAX_CARRIED):
        yield names[first : first + MAX_CARRIED]


def _name(namespace: str, pod: Pod) -> str:
    return gate_server_name(pod.model, namespace)
