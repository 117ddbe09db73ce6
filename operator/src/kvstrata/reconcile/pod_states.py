"""Acknowledgements: one long poll per pod; only answers whose token proves the pod count."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar, TypeVarTuple

from kvstrata.clients.gate import GateClient, GateError
from kvstrata.clients.kube import Kube, KubeError, TokenIdentity
from kvstrata.clients.resources import NODE, SECRET
from kvstrata.contract import ContractError
from kvstrata.contract.messages.pod_state import ACK_AUDIENCE, PodState, gate_server_name
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, Root
from kvstrata.contract.wire import digest_bytes
from kvstrata.model.pods import Pod, VerifiedState
from kvstrata.objects import names
from kvstrata.plan.bundle.restore import contradicts
from kvstrata.reconcile import metrics
from kvstrata.reconcile.audit import record_refused
from kvstrata.reconcile.background import utc_now
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secrets import decode
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")
Q = TypeVarTuple("Q")

LONG_POLL_S = 20.0
MIN_PAUSE_S = 0.02
RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
FIRST_ROUND_S = 3.0
NODES_EVERY_S = 15.0
NODES_REFUSED_S = 600.0
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
COUNTS_PODS = ("CachedModel", "CacheDomain")
GATHER_S = 0.05
"""How long keys that only count pods wait: all pods of a model acknowledge a commit at about the same time."""


class AckListener:
    def __init__(
        self, kube: Kube, gates: GateClient, store: Store, queue: WorkQueue, jitter: Callable[[], float] = random.random
    ) -> None:
        self._kube, self._gates, self._store, self._queue, self._jitter = kube, gates, store, queue, jitter
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._answered: set[str] = set()
        self._nodes_refused = False
        self._tokens = PodTokens(kube)

    async def run(self) -> None:
        try:
            while True:
                self._follow()
                await asyncio.sleep(0.2)
        finally:
            for task in self._polls.values():
                task.cancel()

    async def first_round(self) -> None:
        """Wait until every live pod has answered once, at most FIRST_ROUND_S seconds. Otherwise a new leader would
        take silence for a missing acknowledgement, and write every policy's status twice."""
        deadline = time.monotonic() + FIRST_ROUND_S
        while time.monotonic() < deadline:
            self._follow()
            if all(uid in self._answered for uid in self._polls):
                return
            await asyncio.sleep(0.02)

    def _follow(self) -> None:
        wanted: dict[str, tuple[str, Pod]] = {}
        for namespace in self._store.namespaces:
            for pods in self._store.domain(namespace).pods.values():
                wanted |= {pod.uid: (namespace, pod) for pod in pods.values() if pod.live and pod.ip}
        for uid in self._polls.keys() - wanted.keys():
            self._polls.pop(uid).cancel()
            self._answered.discard(uid)
        for uid, (namespace, pod) in wanted.items():
            running = self._polls.get(uid)
            if running is None or running.done():
                self._polls[uid] = asyncio.create_task(self._poll(namespace, pod), name=f"acks of {pod.name}")

    async def _poll(self, namespace: str, pod: Pod) -> None:
        failures = 0
        try:
            while True:
                if await self._ask(namespace, pod, long=not failures):
                    failures = 0
                    # A gate that always has news must not occupy the operator.
                    await asyncio.sleep(MIN_PAUSE_S)
                else:
                    failures += 1
                    await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S)) - 1] * (0.75 + 0.5 * self._jitter()))
        finally:
            self._gates.forget(pod.ip or "", gate_server_name(pod.model, namespace))

    async def follow_nodes(self) -> None:
        """Take vanished pods for ended once their Node is deleted or out of service, where the operator may read it."""
        while True:
            await asyncio.sleep(NODES_REFUSED_S if self._nodes_refused else NODES_EVERY_S)
            for namespace in self._store.namespaces:
                departures = self._store.domain(namespace).departures
                for model in list(departures):
                    left = {one.node for one in departures[model] if one.node and not one.clean}
                    if gone := {name for name in left if await self._is_gone(name)}:
                        ended = (replace(one, clean=one.clean or one.node in gone) for one in departures[model])
                        departures[model] = tuple(ended)
                        self._queue.add_all(self._store.keys_of(namespace))

    async def _is_gone(self, node: str) -> bool:
        try:
            found = await self._kube.get(NODE, None, node)
        except KubeError as error:
            if error.status == 403 and not self._nodes_refused:
                self._nodes_refused = True
                log.warning("without the right to get nodes, pods of deleted nodes count until they fence off")
            return False
        self._nodes_refused = False
        return found is None or any(one["key"] == OUT_OF_SERVICE for one in found["spec"].get("taints") or ())

    async def _ask(self, namespace: str, pod: Pod, *, long: bool) -> bool:
        """Ask a pod for its state; return whether its answer was believed."""
        known = self._store.domain(namespace).states.get(pod.uid)
        after, wait_s = known.state.acked if known else 0, LONG_POLL_S if known and long else 0.0
        try:
            server_name = gate_server_name(pod.model, namespace)
            state, token = await self._gates.state(pod.ip or "", server_name, after, wait_s)
            wrong_pod = (state.pod_uid, state.namespace, state.model) != (pod.uid, namespace, pod.model)
            refusal = "WrongPod" if wrong_pod else await self._tokens.token_problem(namespace, pod, token)
            if refusal is None:
                await self.receive(namespace, pod, state)
                return True
        except GateError as error:
            metrics.GATE_ERRORS.labels(str(error.reason)).inc()
            self._store.lose_contact(namespace, pod.uid)
            log.debug("a gate did not answer", extra={"pod": pod.name, "reason": str(error.reason)})
        except KubeError as error:
            log.warning("a pod's word could not be checked", extra={"pod": pod.name, "error": str(error)})
        else:
            self._store.lose_contact(namespace, pod.uid)
            record_refused(namespace, pod, refusal)
            log.warning("an acknowledgement was refused", extra={"pod": pod.name, "reason": refusal})
        return False

    async def receive(self, namespace: str, pod: Pod, state: PodState) -> None:
        """Store a pod's verified state. Raises KubeError if the API server is asked and fails."""
        contradicted = await self._contradicted(namespace, pod, state)
        self._answered.add(pod.uid)
        self._measure(namespace, pod, state)
        for key in self._store.observe_state(
            pod, namespace, VerifiedState(state, utc_now(), contradicted=contradicted)
        ):
            self._queue.add(key, GATHER_S if key.kind in COUNTS_PODS else 0.0)

    def _measure(self, namespace: str, pod: Pod, state: PodState) -> None:
        """Observe the latency of the first acknowledgement that covers the last commit."""
        domain = self._store.domain(namespace)
        revision, committed_at = domain.committed_at.get(pod.model, (0, 0.0))
        before = domain.states.get(pod.uid)
        if before and before.state.acked < revision <= state.acked:
            metrics.ACK_LATENCY.observe(time.monotonic() - committed_at)

    async def _contradicted(self, namespace: str, pod: Pod, state: PodState) -> bool:
        """Whether the API server holds less than the pod, as after a restore. It is asked only if this process'
        knowledge does not explain the pod's state, as during a commit."""
        domain = self._store.domain(namespace)
        model, committed = domain.models.get(pod.model), domain.bundles.get(pod.model)
        if model is None:
            return False
        root = committed.bundle.root if committed is not None else None
        # A root without a domain is about to be rewritten, and has no bytes yet.
        known = digest_bytes(root.encode()) if root is not None and root.domain else state.root
        if not contradicts(state, model.uid, root, known):
            before = domain.states.get(pod.uid)
            # Bundles may have overtaken it since, but not in its history.
            return before is not None and before.contradicted and _serves_under(before.state) == _serves_under(state)
        stored = await self._kube.get(SECRET, namespace, names.bundle_root(pod.model))
        data = decode(stored).get(ROOT_DATA_KEY, b"") if stored is not None else b""
        try:
            found = Root.decode(data) if stored is not None else None
        except ContractError:
            return False  # A damaged root is rewritten under a revision above all known ones.
        return contradicts(state, model.uid, found, digest_bytes(data))


def _serves_under(state: PodState) -> tuple[int, int, str]:
    return state.revision, state.term, state.root


TOKEN_CACHE_S = 60.0


class PodAnswerError(Exception):
    """A pod did not answer, or its token is not its own."""


class PodTokens:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: dict[str, tuple[float, TokenIdentity]] = {}

    async def answer_of(
        self, namespace: str, pod: Pod, ask: Callable[[str, str, *Q], Awaitable[tuple[T, str]]], *request: *Q
    ) -> T:
        """Return the answer of a pod's gate to a request of GateClient. Raises PodAnswerError."""
        try:
            answer, token = await ask(pod.ip or "", gate_server_name(pod.model, namespace), *request)
            problem = await self.token_problem(namespace, pod, token)
        except GateError as error:
            metrics.GATE_ERRORS.labels(str(error.reason)).inc()
            message = f"pod {pod.name} did not answer: {error.reason}"
            log.info(message)
            raise PodAnswerError(message) from error
        except KubeError as error:
            message = f"the token of pod {pod.name} could not be reviewed: {error.reason}"
            log.warning(message)
            raise PodAnswerError(message) from error
        if problem is not None:
            record_refused(namespace, pod, problem)
            message = f"the answer of pod {pod.name} is not believed: {problem}"
            log.warning(message)
            raise PodAnswerError(message)
        return answer

    async def token_problem(self, namespace: str, pod: Pod, token: str) -> str | None:
        """Return why a token is not that of `pod`, or None. Raises KubeError."""
        found = await self._identity(token)
        if found is None or found.username != f"system:serviceaccount:{namespace}:{names.model_child(pod.model)}":
            return "WrongAccount"
        return None if found.pod_uid == pod.uid else "ForeignToken"

    async def _identity(self, token: str) -> TokenIdentity | None:
        """Return the token's identity, None if it is not valid; one review a minute for each token."""
        now = time.monotonic()
        digest = hashlib.sha256(token.encode()).hexdigest()
        cached = self._known.get(digest)
        if cached and cached[0] > now:
            return cached[1]
        identity = await self._kube.review_token(token, ACK_AUDIENCE)
        if identity is not None:
            self._known = {d: entry for d, entry in self._known.items() if entry[0] > now}
            self._known[digest] = (now + TOKEN_CACHE_S, identity)
        return identity
