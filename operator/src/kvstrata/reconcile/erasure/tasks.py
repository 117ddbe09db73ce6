"""All erasures of one operator process: one task each while it leads.

A task applies events to its erasure's state and executes the effects that `plan.erasure.advance` returns.

Observes: the order (an invalidation, or a deleted policy without one), pods and their acknowledgements, servers of
tiers, Jobs. Writes: the record in the operator's namespace, and through `executor` everything that is ordered. Runs
again when: the order is planned, an order of the erasure was executed, or the time to wake up has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import KubeError, NotLeadingError
from kvstrata.contract import ContractError
from kvstrata.model.erasure.facts import Verdict
from kvstrata.model.erasure.record import ErasureNow, ErasureRecord
from kvstrata.model.refs import Key
from kvstrata.plan.actions import CarryOutErasure, EndErasure, ErasureOrder
from kvstrata.plan.erasure import advance, deletions, ordering
from kvstrata.plan.erasure.next_step import next_step
from kvstrata.plan.erasure.ordering import Ordering
from kvstrata.plan.erasure.orders import Order
from kvstrata.reconcile import metrics
from kvstrata.reconcile.audit import record_news
from kvstrata.reconcile.background import Background
from kvstrata.reconcile.claims import NameConflictError
from kvstrata.reconcile.erasure.deps import ErasureDeps
from kvstrata.reconcile.erasure.executor import execute

log = logging.getLogger(__name__)


class Erasures(Background):
    """Runs erasures, by their uid, and ends them, by the order. Plans may repeat orders at will."""

    def __init__(self, deps: ErasureDeps) -> None:
        super().__init__(deps.queue)
        self._deps = deps
        self._runners: dict[str, ErasureRunner] = {}

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        metrics.ERASURES_OPEN.set(0)

    @property
    def open(self) -> int:
        return sum(isinstance(slot, str) for slot in self._tasks)

    def take(self, namespace: str, order: ErasureOrder) -> None:
        """Start the erasure's task, or wake the running one."""
        match order:
            case CarryOutErasure():
                self._carry_out(namespace, order)
            case EndErasure():
                self._finish(namespace, order)

    async def recall(self, watched: Collection[str] = ()) -> None:
        """Continue every stored erasure, of these namespaces or, without any, of all. Planning starts afterwards,
        because plans must know all of them. An erasure whose order is gone still owes a receipt."""
        while True:
            try:
                kept = [record async for record in self._deps.record_store.records()]
                break
            except KubeError as error:
                log.warning("erasures that are kept could not be listed", extra={"error": str(error)})
                await self._deps.sleep(advance.RETRY_S)
        for record in kept:
            if (watched and record.namespace not in watched) or self._deps.store.is_anothers(record.namespace):
                continue
            subject = record.erasure.order.subject
            order = CarryOutErasure(str(subject.kind), record.invalidation, subject.uid)
            self._carry_out(record.namespace, order).recall(record)

    def _carry_out(self, namespace: str, order: CarryOutErasure) -> ErasureRunner:
        runner = self._runners.get(order.uid)
        if runner is not None:
            runner.wake()
            return runner
        runner = self._runners[order.uid] = ErasureRunner(self._deps, self._runners, namespace, order)
        self._begin(order.uid, self._follow(runner), "an erasure failed; this is a defect")
        metrics.ERASURES_OPEN.set(self.open)
        return runner

    async def _follow(self, runner: ErasureRunner) -> None:
        while True:
            try:
                await runner.run()
                break
            except NotLeadingError:
                return
            except Exception:
                log.exception("an erasure failed; this is a defect", extra={"erasure": runner.name})
                metrics.FAILURES.labels(runner.order.kind, "Bug").inc()
                await self._deps.sleep(advance.RETRY_S)
                runner = ErasureRunner(self._deps, self._runners, runner.namespace, runner.order)
                self._runners[runner.uid] = runner
        self._tasks.pop(runner.uid, None)
        metrics.ERASURES_OPEN.set(self.open)
        if runner.state is None:
            self._runners.pop(runner.uid, None)
            return
        end = EndErasure(runner.order.kind, runner.order.name, runner.uid)
        if self._deps.ordering_of(runner.namespace, end) is None:
            # Without the object, no plan orders the end.
            self._finish(runner.namespace, end)

    def _finish(self, namespace: str, order: EndErasure) -> None:
        self._begin(order, self._finished(namespace, order), "an erasure was not ended; this is a defect")

    async def _finished(self, namespace: str, order: EndErasure) -> None:
        """Stop an erasure, which would create its record again. Remove its Jobs, then its record, then the finalizer of
        its object. Without the object no plan repeats the order."""
        while True:
            if order.uid in self._tasks:
                await self._end(order.uid)
                self._runners.pop(order.uid, None)
                metrics.ERASURES_OPEN.set(self.open)
            try:
                self._deps.may_write()
                await self._deps.jobs.remove(order.uid)
                self._deps.may_write()
                await self._deps.record_store.remove(order.uid)
                await self._deps.hold(self._deps.ordering_of(namespace, order), held=False)
                break
            except NotLeadingError:
                return
            except KubeError as error:
                log.warning("an erasure's end waits", extra={"order": order.name, "error": str(error)})
                if self._deps.ordering_of(namespace, order) is not None:
                    return
                await self._deps.sleep(advance.RETRY_S)
        self._runners.pop(order.uid, None)
        domain = self._deps.store.domain(namespace)
        domain.erasures.pop(order.uid, None)
        domain.forget_ending()


class ErasureRunner:
    """Runs one erasure. `runners` has those of all erasures, by uid."""

    def __init__(
        self, deps: ErasureDeps, runners: Mapping[str, ErasureRunner], namespace: str, order: CarryOutErasure
    ) -> None:
        self._deps, self._runners = deps, runners
        self.namespace, self.order, self.uid = namespace, order, order.uid
        self.name = f"{namespace}/{order.name}"
        self.state: advance.ErasureState | None = None
        self._events: list[advance.OrderDone | advance.OrderFailed] = []
        self._tasks: dict[Order, asyncio.Task[None]] = {}
        self._pause_s, self._refusal = 0.0, ""
        self._woken = asyncio.Event()

    @property
    def jobs_running(self) -> int:
        return len(deletions.running(self.state.record.erasure)) if self.state is not None else 0

    @property
    def key(self) -> Key:
        return Key(self.order.kind, self.namespace, self.order.name)

    @property
    def found(self) -> Ordering | None:
        return self._deps.ordering_of(self.namespace, self.order)

    def wake(self) -> None:
        self._woken.set()

    def recall(self, record: ErasureRecord) -> None:
        """Publish the stored record to plans before the first pass."""
        if self.uid not in self._deps.store.domain(self.namespace).erasures:
            seen = self._observe(record).observed
            pinned_tiers = next_step(record.erasure, seen, self._deps.now()).pinned_tiers
            self._show(ErasureNow(record, seen, pinned_tiers=pinned_tiers))

    async def run(self) -> None:
        """Run until the receipt is written, until neither a record nor an order exists, or until cancelled. Raises
        NotLeadingError after leadership was lost."""
        try:
            while self.state is None or not self.state.over:
                try:
                    if self.state is None and not await self._take_up():
                        return
                    await self.turn()
                    self._refusal = ""
                except (KubeError, ContractError) as error:
                    log.warning("an erasure waits", extra={"erasure": self.name, "error": str(error)})
                    self._pause_s = advance.RETRY_S
                    if isinstance(error, KubeError) and (error.is_refusal or isinstance(error, NameConflictError)):
                        await self._report_refusal(error)
                await self._pause()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _report_refusal(self, error: KubeError) -> None:
        """Record it once as an Event: without a record no status shows the erasure."""
        if self._refusal != error.message and (found := self.found) is not None:
            self._refusal = error.message
            is_conflict = isinstance(error, NameConflictError)
            way_out = "delete or rename it in the operator's namespace" if is_conflict else "admit it"
            message = f"{error.message}: {way_out}. The erasure waits"
            await self._deps.events.publish(found, error.reason, message, warning=True)

    async def turn(self) -> None:
        while self.state is not None and self._events:
            await self._apply(self.state, self._events.pop(0))
        if self.state is not None:
            await self._apply(self.state, self._observe(self.state.record))

    async def _take_up(self) -> bool:
        """Set the state from the record, which is created first; return False if there will be none."""
        stored = await self._deps.record_store.read(self.uid)
        while stored is None:
            world, found, now = self._deps.store.world(self.namespace), self.found, self._deps.now()
            record = ordering.begin(world, self.key, found, now)
            if record is not None:
                own = self._deps.named.keys() & set(record.erasure.order.keyspaces)
                await self._deps.hold(found)
                self._deps.may_write()
                named = {keyspace: self._deps.named[keyspace] for keyspace in own}
                stored = await self._deps.record_store.create(record.with_names(named))
                record_news(None, stored.record)
            elif ordering.is_over(world, self.key, found):
                return False
            else:
                self._pause_s = advance.RETRY_S
                await self._pause()
        self.recall(stored.record)
        self.state = advance.ErasureState.of(stored, self._observe(stored.record).observed)
        return True

    def _observe(self, record: ErasureRecord) -> advance.Woken:
        world, found, now = self._deps.store.world(self.namespace), self.found, self._deps.now()
        elsewhere = sum(runner.jobs_running for runner in self._runners.values() if runner is not self)
        return ordering.woken(world, self.key, found, record, elsewhere, now)

    async def _apply(self, before: advance.ErasureState, event: advance.Event) -> None:
        self.state, effects = state, _ = advance.advance(before, event, self._deps.now())
        if effects.write is not None:
            self._deps.may_write()
            stored = await self._deps.record_store.write(state.stored, effects.write)
            record_news(state.record, stored.record)
            await self._apply(state, stored)
        if effects.show is not None:
            self._show(effects.show)
        for order in effects.start:
            self._tasks[order] = asyncio.create_task(self._carry_out(state, order), name=f"erasure {self.name}")
        if effects.wake_after_s is not None:
            self._pause_s = effects.wake_after_s
        if effects.announce is not None:
            await self._announce(state.record, effects.announce)

    async def _carry_out(self, state: advance.ErasureState, order: Order) -> None:
        with contextlib.suppress(NotLeadingError):  # the runner finds the same, and ends
            self._events.append(await execute(self._deps, state, order))
            del self._tasks[order]
            self._woken.set()

    def _show(self, now: ErasureNow) -> None:
        """Show the erasure to plans, and enqueue the objects whose status shows it."""
        erasures = self._deps.store.domain(self.namespace).erasures
        before, erasures[self.uid] = erasures.get(self.uid), now
        self._deps.queue.add(self.key)
        for tier in now.pinned_tiers ^ (before.pinned_tiers if before is not None else frozenset()):
            self._deps.queue.add(Key(CacheTier.INFO.kind, self.namespace, tier))

    async def _announce(self, record: ErasureRecord, verdict: Verdict) -> None:
        metrics.ERASURES.labels("Complete" if verdict.complete else "Failed").inc()
        log.info("an erasure was judged", extra={"erasure": self.name, "reason": verdict.reason})
        if not verdict.complete:
            self._deps.named.update(record.named)
        if (found := self.found) is not None:
            await self._deps.events.publish(found, verdict.reason, verdict.message, warning=not verdict.complete)

    async def _pause(self) -> None:
        if self._pause_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._woken.wait()
        self._woken.clear()
