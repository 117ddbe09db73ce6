"""All erasures of one operator process: one task each while it leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from functools import partial
from types import TracebackType

from kvstrata.clients.kube import KubeError
from kvstrata.plan.actions import CarryOutErasure, EndErasure, ErasureOrder
from kvstrata.plan.erasure.advance import RETRY_S
from kvstrata.reconcile import metrics
from kvstrata.reconcile.erasure import ordering_object
from kvstrata.reconcile.erasure.deps import ErasureDeps
from kvstrata.reconcile.erasure.runner import ErasureRunner
from kvstrata.reconcile.writer import NotLeadingError

log = logging.getLogger(__name__)


class Erasures:
    """Runs erasures. A context manager, for one event loop; plans may repeat orders at will."""

    def __init__(self, deps: ErasureDeps) -> None:
        self._deps = deps
        self._runners: dict[str, ErasureRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Erasures:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [*self._tasks.values(), *self._ending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        metrics.ERASURES_OPEN.set(0)

    @property
    def open(self) -> int:
        return len(self._tasks)

    def take(self, namespace: str, order: ErasureOrder) -> None:
        """Start the erasure's task, or wake the running one."""
        match order:
            case CarryOutErasure():
                self._carry_out(namespace, order)
            case EndErasure():
                self._end(namespace, order)

    async def recall(self, watched: Collection[str] = ()) -> None:
        """Continue every stored erasure, of these namespaces or, without any, of all. Planning starts afterwards,
        because plans must know all of them. An erasure whose order is gone still owes a receipt."""
        while True:
            try:
                kept = [record async for record in self._deps.record_store.records()]
            except KubeError as error:
                log.warning("erasures that are kept could not be listed", extra={"error": str(error)})
                await self._deps.sleep(RETRY_S)
            else:
                break
        for record in kept:
            if watched and record.namespace not in watched:
                continue
            subject = record.erasure.order.subject
            order = CarryOutErasure(str(subject.kind), record.invalidation, subject.uid)
            self._carry_out(record.namespace, order).recall(record)

    def _carry_out(self, namespace: str, order: CarryOutErasure) -> ErasureRunner:
        runner = self._runners.get(order.uid)
        if runner is not None:
            runner.wake()
            return runner
        runner = self._runners[order.uid] = ErasureRunner(self._deps, namespace, order)
        self._tasks[order.uid] = asyncio.create_task(self._follow(runner), name=f"erasure {runner.name}")
        metrics.ERASURES_OPEN.set(len(self._tasks))
        return runner

    async def _follow(self, runner: ErasureRunner) -> None:
        while True:
            try:
                await runner.run(partial(self._jobs_but, runner.uid))
                break
            except NotLeadingError:
                return
            except Exception:
                log.exception("an erasure failed; this is a defect", extra={"erasure": runner.name})
                metrics.FAILURES.labels(runner.order.kind, "Bug").inc()
                await self._deps.sleep(RETRY_S)
                runner = self._runners[runner.uid] = ErasureRunner(self._deps, runner.namespace, runner.order)
        self._tasks.pop(runner.uid, None)
        metrics.ERASURES_OPEN.set(len(self._tasks))
        if runner.state is None:
            self._runners.pop(runner.uid, None)
            return
        end = EndErasure(runner.order.kind, runner.order.name, runner.uid)
        if ordering_object.ordering_of(self._deps, runner.namespace, end) is None:
            # Without the object, no plan orders the end.
            self._end(runner.namespace, end)

    def _jobs_but(self, uid: str) -> int:
        return sum(runner.jobs_running for runner in self._runners.values() if runner.uid != uid)

    def _end(self, namespace: str, order: EndErasure) -> None:
        if order.uid not in self._ending:
            self._ending[order.uid] = asyncio.create_task(self._ended(namespace, order))

    async def _ended(self, namespace: str, order: EndErasure) -> None:
        """Remove an erasure's Jobs, then its record, then the finalizer of its object."""
        await self._stop(order.uid)
        try:
            self._deps.may_write()
            await self._deps.jobs.remove(order.uid)
            self._deps.may_write()
            await self._deps.record_store.remove(order.uid)
            await ordering_object.release(self._deps, ordering_object.ordering_of(self._deps, namespace, order))
        except NotLeadingError:
            return
        except KubeError as error:
            log.warning("an erasure's end waits", extra={"order": order.name, "error": str(error)})
            if ordering_object.ordering_of(self._deps, namespace, order) is None:
                await self._deps.sleep(RETRY_S)
                del self._ending[order.uid]
                self._end(namespace, order)
                return
        else:
            self._runners.pop(order.uid, None)
            domain = self._deps.store.domain(namespace)
            domain.erasures.pop(order.uid, None)
            domain.forget_ending()
        del self._ending[order.uid]

    async def _stop(self, uid: str) -> None:
        """Stop a task before its end: it would create the record again."""
        task = self._tasks.pop(uid, None)
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._runners.pop(uid, None)
        metrics.ERASURES_OPEN.set(len(self._tasks))
