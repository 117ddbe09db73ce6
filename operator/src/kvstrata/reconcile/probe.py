"""Probes of isolation: a few pods at a time; results become facts, and a failure also an Event."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from kvstrata.clients.gate import GateClient
from kvstrata.clients.kube import Kube
from kvstrata.contract.messages.probe import Probed, ProbeRequest
from kvstrata.model.probe import ProbeReport
from kvstrata.model.refs import Key
from kvstrata.plan.actions import ProbePod
from kvstrata.plan.isolation import failure_message, failure_stands
from kvstrata.reconcile import metrics
from kvstrata.reconcile.background import Background, Leads, utc_now
from kvstrata.reconcile.events import Events
from kvstrata.reconcile.pod_states import PodAnswerError, PodTokens
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Pods probed at a time, over all models: all are due when an operator starts."""

EVENT = "IsolationBroken"


class Probing(Background):
    """Probes pods; the slots are their UIDs."""

    def __init__(self, kube: Kube, gates: GateClient, store: Store, queue: WorkQueue, leading: Leads) -> None:
        super().__init__(queue)
        self._gates, self._store, self._leading = gates, store, leading
        self._tokens, self._events = PodTokens(kube), Events(kube)
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def probe(self, namespace: str, question: ProbePod) -> None:
        again = Key("CachedModel", namespace, question.model)
        work = self._probe(namespace, question)
        self._begin(question.pod.uid, work, "a probe of isolation failed, and is asked again", again)

    def show(self, namespace: str, name: str) -> None:
        """Export whether the status of a model reports a failure of isolation."""
        model = self._store.domain(namespace).models.get(name)
        if model is not None and failure_stands(model):
            metrics.ISOLATION_BROKEN.labels(namespace, name).set(1)
        else:
            metrics.ISOLATION_BROKEN.remove(namespace, name)

    async def _probe(self, namespace: str, question: ProbePod) -> None:
        async with self._at_once:
            answer = await self._answer(namespace, question)
        domain, pod = self._store.domain(namespace), question.pod
        outcome = str(answer.outcome) if answer is not None else "Unanswered"
        metrics.PROBES.labels(namespace, question.model, outcome).inc()
        if pod.name not in domain.pods[question.model]:
            return  # The pod is gone meanwhile.
        known = domain.probes.get(pod.uid)
        domain.probes[pod.uid] = ProbeReport.after(known, answer, question.keyspaces, utc_now())
        if answer is not None and answer.outcome.failed:
            await self._publish(namespace, question, answer)
        self._queue.add(Key("CachedModel", namespace, question.model))

    async def _publish(self, namespace: str, question: ProbePod, answer: Probed) -> None:
        message = failure_message(question.pod.name, answer)
        log.error("isolation is broken", extra={"model": question.model, "found": message})
        model = self._store.domain(namespace).models.get(question.model)
        if model is not None and not failure_stands(model) and self._leading():
            await self._events.publish(model, EVENT, message, warning=True)

    async def _answer(self, namespace: str, question: ProbePod) -> Probed | None:
        request = ProbeRequest(question.revision, question.readers)
        with contextlib.suppress(PodAnswerError):
            return await self._tokens.answer_of(namespace, question.pod, self._gates.probe, request)
        return None
