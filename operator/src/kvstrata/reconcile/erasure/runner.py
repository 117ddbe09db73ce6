"""Runs one erasure: applies events to its state and executes the effects that `plan.erasure.advance` returns.

Observes: the order (an invalidation, or a deleted policy without one), pods and their acknowledgements, servers of
tiers, Jobs. Writes: the record in the operator's namespace, and through `Executor` everything that is ordered. Runs
again when: the order is planned, an order of the erasure was executed, or the time of `WakeAfter` has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import KubeError
from kvstrata.contract import ContractError
from kvstrata.model.erasure.facts import Verdict
from kvstrata.model.erasure.record import ErasureNow, ErasureRecord
from kvstrata.model.refs import Key
from kvstrata.plan.actions import CarryOutErasure
from kvstrata.plan.erasure import advance, deletions, ordering
from kvstrata.plan.erasure.next_step import next_step
from kvstrata.plan.erasure.ordering import Ordering
from kvstrata.plan.erasure.orders import Order
from kvstrata.reconcile import metrics
from kvstrata.reconcile.erasure import ordering_object
from kvstrata.reconcile.erasure.audit import record_news
from kvstrata.reconcile.erasure.deps import ErasureDeps
from kvstrata.reconcile.erasure.executor import Executor
from kvstrata.reconcile.erasure.record_store import StoredRecord
from kvstrata.reconcile.writer import NotLeadingError

log = logging.getLogger(__name__)


class ErasureRunner:
    def __init__(self, deps: ErasureDeps, namespace: str, order: CarryOutErasure) -> None:
        self._deps, self._executor = deps, Executor(deps)
        self.namespace, self.order, self.uid = namespace, order, order.uid
        self.name = f"{namespace}/{order.name}"
        self.state: advance.ErasureState | None = None
        self._events: list[advance.OrderDone | advance.OrderFailed] = []
        self._tasks: dict[Order, asyncio.Task[None]] = {}
        self._pause_s = 0.0
        self._woken = asyncio.Event()

    @property
    def jobs_running(self) -> int:
        return len(deletions.running(self.state.record.erasure)) if self.state is not None else 0

    @property
    def key(self) -> Key:
        return Key(self.order.kind, self.namespace, self.order.name)

    @property
    def found(self) -> Ordering | None:
        return ordering_object.ordering_of(self._deps, self.namespace, self.order)

    def wake(self) -> None:
        self._woken.set()

    def recall(self, record: ErasureRecord) -> None:
        """Publish the stored record to plans before the first pass."""
        if self.uid not in self._deps.store.domain(self.namespace).erasures:
            seen = self._observe(record, 0).observed
            pinned_tiers = next_step(record.erasure, seen, self._deps.now()).pinned_tiers
            self._publish(ErasureNow(record, seen, pinned_tiers=pinned_tiers))

    async def run(self, elsewhere: Callable[[], int]) -> None:
        """Run until the receipt is written, until neither a record nor an order exists, or until cancelled.
        `elsewhere` counts running Jobs of other erasures. Raises NotLeadingError after leadership was lost."""
        try:
            while self.state is None or not self.state.over:
                try:
                    if self.state is None and not await self._take_up():
                        return
                    await self.turn(elsewhere())
                except (KubeError, ContractError) as error:
                    log.warning("an erasure waits", extra={"erasure": self.name, "error": str(error)})
                    self._pause_s = advance.RETRY_S
                await self._pause()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def turn(self, elsewhere: int) -> None:
        while self.state is not None and self._events:
            await self._apply(self.state, self._events.pop(0))
        if self.state is not None:
            await self._apply(self.state, self._observe(self.state.record, elsewhere))

    async def _take_up(self) -> bool:
        """Set the state from the record, which is created first; return False if there will be none."""
        stored = await self._deps.record_store.read(self.uid)
        while stored is None:
            world, found, now = self._deps.store.world(self.namespace), self.found, self._deps.now()
            record = ordering.begin(world, self.key, found, now)
            if record is not None:
                own = self._deps.named.keys() & set(record.erasure.order.keyspaces)
                await ordering_object.hold(self._deps, found)
                self._deps.may_write()
                named = {keyspace: self._deps.named[keyspace] for keyspace in own}
                stored = await self._deps.record_store.create(record.with_names(named))
            elif ordering.is_over(world, self.key, found):
                return False
            else:
                self._pause_s = advance.RETRY_S
                await self._pause()
        self.recall(stored.record)
        self.state = advance.ErasureState.of(stored.record, stored.version, self._observe(stored.record, 0).observed)
        return True

    def _observe(self, record: ErasureRecord, elsewhere: int) -> advance.Woken:
        world, found, now = self._deps.store.world(self.namespace), self.found, self._deps.now()
        return ordering.woken(world, self.key, found, record, elsewhere, now)

    async def _apply(self, before: advance.ErasureState, event: advance.Event) -> None:
        self.state, effects = state, _ = advance.advance(before, event, self._deps.now())
        for effect in effects:
            await self._execute(state, effect)

    async def _execute(self, state: advance.ErasureState, effect: advance.Effect) -> None:
        match effect:
            case advance.WriteRecord(record):
                self._deps.may_write()
                stored = await self._deps.record_store.write(StoredRecord(state.record, state.version), record)
                record_news(state.record, stored.record)
                await self._apply(state, advance.RecordWritten(stored.record, stored.version))
            case advance.StartOrder(order):
                self._tasks[order] = asyncio.create_task(self._carry_out(state, order), name=f"erasure {self.name}")
            case advance.Publish(now):
                self._publish(now)
            case advance.EmitEvent(verdict):
                await self._emit(state.record, verdict)
            case advance.WakeAfter(seconds):
                self._pause_s = seconds

    async def _carry_out(self, state: advance.ErasureState, order: Order) -> None:
        with contextlib.suppress(NotLeadingError):  # the runner finds the same, and ends
            self._events.append(await self._executor.execute(state, order))
            del self._tasks[order]
            self._woken.set()

    def _publish(self, now: ErasureNow) -> None:
        """Show the erasure to plans, and enqueue the objects whose status shows it."""
        erasures = self._deps.store.domain(self.namespace).erasures
        before, erasures[self.uid] = erasures.get(self.uid), now
        self._deps.queue.add(self.key)
        for tier in now.pinned_tiers ^ (before.pinned_tiers if before is not None else frozenset()):
            self._deps.queue.add(Key(CacheTier.INFO.kind, self.namespace, tier))

    async def _emit(self, record: ErasureRecord, verdict: Verdict) -> None:
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
