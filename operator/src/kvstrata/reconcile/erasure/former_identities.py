"""Deletes former caches: runs Jobs, one tier after the other, and records their state as facts.

Observes: Jobs. Writes: Jobs, by the `Jobs` of erasures. Runs again when: its model is planned, or a running Job
is due for a look.

The model is planned again after a round. A round is in the model's status before it begins, and Jobs are named after
former cache, tier and round, so that a new leader finds running and finished Jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import KubeError, NotLeadingError
from kvstrata.contract.messages.erase_report import Erased
from kvstrata.contract.receipt.facts import NOTHING
from kvstrata.model.erasure.facts import JobState
from kvstrata.model.reclaim import FormerCache, ReclaimReport
from kvstrata.model.refs import Key
from kvstrata.objects.erasure.delete_job import TierDeletion
from kvstrata.plan.actions import EndReclaim, ReclaimFormer
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.plan.kinds.model_rollback import keyspaces_in_force, reclaimable_tiers
from kvstrata.reconcile import metrics
from kvstrata.reconcile.background import RETRY_S, Background
from kvstrata.reconcile.erasure.jobs import Jobs
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

AT_ONCE = 2
KEYSPACES_OF_A_JOB = 20_000
JOBS_OF_A_ROUND = 100
"""For one tier: 2,000,000 keyspaces."""

RECLAIMED, FAILED = "reclaimed", "failed"
LOOK_EVERY_S = 5.0


class Reclaims(Background):
    """Deletes former caches; the slots are their orders. `now` is the wall clock in UTC. `jobs` check leadership
    themselves."""

    def __init__(
        self,
        store: Store,
        queue: WorkQueue,
        jobs: Jobs,
        now: Callable[[], datetime],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(queue)
        self._store, self._jobs, self._now, self._sleep = store, jobs, now, sleep
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def ask(self, namespace: str, question: ReclaimFormer) -> None:
        """Start a round unless one is running."""
        failure = "a former cache was not deleted, which is tried again"
        again = Key("CachedModel", namespace, question.cache.model)
        self._begin(question.cache.order, self._reclaim(namespace, question), failure, again)

    async def end(self, namespace: str, order: EndReclaim) -> None:
        """Stop deleting a former cache, and forget it. Raises KubeError and NotLeadingError. Its Jobs are gone or
        being deleted when this returns."""
        await self._end(order.cache.order)
        await self._jobs.remove(order.cache.order)
        self._forget(namespace, lambda known: known.order == order.cache.order)

    def show(self, namespace: str, name: str) -> None:
        """Export how many caches of a model wait by its status, and forget those of a model that is gone."""
        model = self._store.domain(namespace).models.get(name)
        if model is not None and (waiting := len(model.status.former_identities)):
            metrics.FORMER_IDENTITIES.labels(namespace, name).set(waiting)
            return
        metrics.FORMER_IDENTITIES.remove(namespace, name)
        if model is None:
            self._forget(namespace, lambda known: known.model == name)
            for counter in (metrics.RECLAIMED_BLOCKS, metrics.RECLAIMED_BYTES, metrics.RECLAIMS):
                counter.remove_by_labels({"namespace": namespace, "model": name})

    async def _reclaim(self, namespace: str, question: ReclaimFormer) -> None:
        cache = question.cache
        facts = self._store.domain(namespace).reclaims
        facts.pop((cache.order, question.round - 1), None)
        async with self._at_once:
            try:
                report = await self._round(namespace, question)
            except NotLeadingError:
                return
        if report is None:
            return
        facts[(cache.order, question.round)] = report
        outcome = RECLAIMED if report.state is JobState.DONE else FAILED
        metrics.RECLAIMS.labels(namespace, cache.model, outcome).inc()
        log.info(
            "a round of the deletion of a former cache is over",
            extra={"model": cache.model, "identity": cache.identity, "outcome": outcome, "why": report.message},
        )
        self._queue.add(Key("CachedModel", namespace, cache.model))

    async def _round(self, namespace: str, question: ReclaimFormer) -> ReclaimReport | None:
        """Run every Job of a round; return the result, None if the model is gone."""
        cache, domain = question.cache, self._store.domain(namespace)
        deleted = NOTHING
        keyspaces = keyspaces_in_force(domain.bundles.values())
        for tier in reclaimable_tiers(domain.tiers.values()):
            reported = f"its blocks are being deleted from CacheTier {tier.name}"
            running = ReclaimReport(cache, JobState.RUNNING, self._now(), reported)
            domain.reclaims[(cache.order, question.round)] = running
            self._queue.add(Key("CachedModel", namespace, cache.model))
            for order in self._orders(namespace, question, tier, keyspaces):
                run = await self._over(namespace, cache, order)
                if run is None:
                    return None
                deleted = sum((line.deleted for line in run.lines if isinstance(line, Erased)), deleted)
                if run.state is not JobState.DONE:
                    message = f"CacheTier {tier.name}: {run.problem or 'the deletion failed'}"
                    return ReclaimReport(cache, JobState.FAILED, self._now(), message, deleted)
        return ReclaimReport(cache, JobState.DONE, self._now(), deleted=deleted)

    def _orders(
        self, namespace: str, question: ReclaimFormer, tier: CacheTier, keyspaces: tuple[str, ...]
    ) -> Iterator[TierDeletion]:
        """Yield the Jobs of a round for one tier, with numbers unique over all rounds."""
        cache, domain = question.cache, self._store.world(namespace).domain_id or ""
        parts = range(0, len(keyspaces), KEYSPACES_OF_A_JOB)
        for number, start in enumerate(parts[:JOBS_OF_A_ROUND]):
            yield TierDeletion(
                cache.order, tier, (question.round - 1) * JOBS_OF_A_ROUND + number + 1, domain, 0,
                keyspaces[start : start + KEYSPACES_OF_A_JOB], identities=(cache.identity,),
            )  # fmt: skip

    async def _over(self, namespace: str, cache: FormerCache, order: TierDeletion) -> DeletionRun | None:
        """Run a Job to its end; None if the model is gone."""
        while self._is_there(namespace, cache):
            try:
                run = await self._jobs.start(order)
            except KubeError as error:
                log.warning("a deletion is waited for", extra={"model": cache.model, "error": str(error)})
                await self._sleep(max(RETRY_S, error.retry_after_s or 0.0))
                continue
            except (LookupError, ValueError) as error:
                return DeletionRun("", JobState.FAILED, problem=str(error))
            if run.state is not JobState.RUNNING:
                return run
            await self._sleep(LOOK_EVERY_S)
        return None

    def _is_there(self, namespace: str, cache: FormerCache) -> bool:
        found = self._store.domain(namespace).models.get(cache.model)
        return found is not None and found.uid == cache.uid

    def _forget(self, namespace: str, which: Callable[[FormerCache], bool]) -> None:
        facts = self._store.domain(namespace).reclaims
        for key in [key for key, report in facts.items() if which(report.cache)]:
            del facts[key]
