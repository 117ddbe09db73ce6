"""Requests of prefix pools; answers become facts. A pod renders one prefix at a time, so it is asked for one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from kvstrata.api.prefixpool import PrefixPool
from kvstrata.clients.gate import GateClient
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import CONFIG_MAP
from kvstrata.contract import ContractError
from kvstrata.contract.messages.pools import Rendered, WarmOutcome, WarmRequest
from kvstrata.model.pods import Pod
from kvstrata.model.pools import PodAnswer, SourceReport, WarmReport
from kvstrata.model.refs import Key
from kvstrata.plan.actions import InspectPool, ReadSource, RenderPool, WarmPool
from kvstrata.plan.pools.content import sources_of
from kvstrata.plan.pools.rendering import RENDER_AGAIN_S
from kvstrata.reconcile.background import RETRY_S, Background, utc_now
from kvstrata.reconcile.domain_store import DomainStore
from kvstrata.reconcile.pod_states import PodAnswerError, PodTokens
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

FORGET_AFTER = timedelta(seconds=2 * RENDER_AGAIN_S)
"""A fact that no plan refreshes belongs to a prefix without a pool."""


_GO_ON = (WarmOutcome.STORED, WarmOutcome.INCOMPLETE)

K = TypeVar("K")
T = TypeVar("T")
Q = TypeVarTuple("Q")


@dataclass(frozen=True, slots=True)
class _Warmup:
    """Slot of a warm-up: one at a time for each version and pod."""

    namespace: str
    model: str
    pod_uid: str
    pool: str
    scope: str


class Warming(Background):
    def __init__(self, kube: Kube, gates: GateClient, store: Store, queue: WorkQueue) -> None:
        super().__init__(queue)
        self._kube, self._gates, self._store = kube, gates, store
        self._tokens = PodTokens(kube)
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By UID of a pod that is being asked."""

    def read(self, namespace: str, question: ReadSource) -> None:
        self._ask((namespace, question), self._read(namespace, question))

    def render(self, namespace: str, question: RenderPool) -> None:
        again = Key(question.asker, namespace, question.pool)
        self._ask((again, question.pod.uid), self._render_all(namespace, question, again), again)

    def inspect(self, namespace: str, question: InspectPool) -> None:
        again = Key(PrefixPool.INFO.kind, namespace, question.pool)
        self._ask((namespace, question), self._inspect(namespace, question), again)

    def warm(self, namespace: str, question: WarmPool) -> None:
        """Start a warm-up within its model's limit; otherwise plan the pool again later."""
        again = Key(PrefixPool.INFO.kind, namespace, question.pool)
        of_model = _Warmup(namespace, question.pod.model, question.pod.uid, question.pool, question.scope)
        running = [slot for slot in self._tasks if isinstance(slot, _Warmup) and slot.model == of_model.model]
        if of_model in running or len([slot for slot in running if slot.namespace == namespace]) < question.at_once:
            self._ask(of_model, self._warm_all(namespace, question), again)
        else:
            self._queue.add(again, RETRY_S)

    def _ask(self, slot: Hashable, work: Coroutine[Any, Any, None], *again: Key) -> None:
        self._begin(slot, work, "a question for a pool failed, and is asked again", *again)

    async def _read(self, namespace: str, where: ReadSource) -> None:
        slot, domain = (where.name, where.key), self._store.domain(namespace)
        pools = domain.pools
        again_s = 0.0
        try:
            found = await self._kube.get(CONFIG_MAP, namespace, where.name)
        except KubeError as error:
            log.warning("a ConfigMap could not be read", extra={"config_map": where.name, "error": str(error)})
            again_s = RETRY_S
        else:
            named = f"ConfigMap {where.name} in namespace {namespace}"
            text = ((found or {}).get("data") or {}).get(where.key)
            problem = f"{named} has no key {where.key} with text" if found is not None else f"{named} does not exist"
            domain.sources[slot] = SourceReport(text, problem if text is None else "", utc_now())
            for gone in domain.sources.keys() - {source for pool in pools.values() for source in sources_of(pool)}:
                del domain.sources[gone]
        for pool in pools.values():
            if slot in sources_of(pool):
                self._queue.add(Key("PrefixPool", namespace, pool.name), again_s)

    async def _render_all(self, namespace: str, question: RenderPool, again: Key) -> None:
        busy = self._busy.setdefault(question.pod.uid, asyncio.Lock())
        for prefix in question.prefixes:
            async with busy:
                report = await self._answer(namespace, question.pod, self._gates.render, prefix)
            domain = self._store.domain(namespace)
            if question.pod.name not in domain.pods[question.pod.model]:
                return
            domain.renders[question.pod.uid][prefix.digest] = _shared(domain, prefix.digest, report)
        _forget(self._store.domain(namespace).renders[question.pod.uid])
        self._queue.add(again)

    async def _answer(
        self, namespace: str, pod: Pod, ask: Callable[[str, str, *Q], Awaitable[tuple[T, str]]], *request: *Q
    ) -> PodAnswer[T]:
        answer = None
        with contextlib.suppress(PodAnswerError, ContractError):
            answer = await self._tokens.answer_of(namespace, pod, ask, *request)
        return PodAnswer(answer, utc_now())

    async def _warm_all(self, namespace: str, question: WarmPool) -> None:
        pod = question.pod
        for prefix in question.prefixes:
            request = WarmRequest(question.pool_uid, question.scope, question.manifest, prefix)
            warmed = await self._answer(namespace, pod, self._gates.warm, request, question.timeout_s)
            outcome = warmed.answer.outcome if warmed.answer is not None else None
            domain = self._store.domain(namespace)
            if pod.name not in domain.pods[pod.model]:
                break
            known = domain.warmed[pod.uid]
            slot = (question.scope, prefix.digest)
            known[slot] = WarmReport.after(known.get(slot), outcome, warmed.at)
            if outcome not in _GO_ON:
                break
        _forget(self._store.domain(namespace).warmed.get(pod.uid, {}))
        await self._inspect(namespace, InspectPool(question.pool, question.pool_uid, pod))

    async def _inspect(self, namespace: str, question: InspectPool) -> None:
        pod = question.pod
        report = await self._answer(namespace, pod, self._gates.pool, question.pool_uid)
        domain = self._store.domain(namespace)
        if pod.name in domain.pods[pod.model]:
            domain.holdings[pod.uid][question.pool_uid] = report
            _forget(domain.holdings[pod.uid])
        self._queue.add(Key("PrefixPool", namespace, question.pool))


def _forget(reports: dict[K, WarmReport] | dict[K, PodAnswer[T]]) -> None:
    for old in [name for name, report in reports.items() if utc_now() - report.at > FORGET_AFTER]:
        del reports[old]


def _shared(domain: DomainStore, digest: str, report: PodAnswer[Rendered]) -> PodAnswer[Rendered]:
    """Share the hashes of an equal report: there are many pods, and manifests are large."""
    made = report.answer
    if made is None:
        return report
    for reports in domain.renders.values():
        known = reports.get(digest)
        if known is not None and known.answer is not None and known.answer.hashes == made.hashes:
            return replace(report, answer=replace(made, hashes=known.answer.hashes))
    return report
