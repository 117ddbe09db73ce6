"""Runs one erasure: stores new facts and executes the resulting orders.

Observes: the order (an invalidation, or a deleted policy without one), pods and their acknowledgements, servers of
tiers, Jobs. Writes: the record in the operator's namespace, and through `orders` everything that
`plan.erasure.next_step` orders. Runs again when: the order is planned, an order was executed, or
`ErasureStep.again_s` has passed.

Facts are stored before anything follows from them, and a running deletion before its Job is created, so a new leader
reads the record and repeats the same orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import KubeError
from kvstrata.contract import ContractError
from kvstrata.model.erasure.evidence import found_again, tiers_at_hand, unreachable_at
from kvstrata.model.erasure.facts import Fact, ReceiptWritten, Verdict
from kvstrata.model.erasure.record import ErasureNow, ErasureRecord, Observed, TierNow
from kvstrata.model.refs import Key
from kvstrata.plan.actions import CarryOutErasure
from kvstrata.plan.erasure import gather
from kvstrata.plan.erasure.next_step import LOOK_AGAIN_S, Conclude, ErasureStep, IssueReceipt, next_step
from kvstrata.plan.erasure.orders import (
    AskPodToErase,
    AskPodToVerify,
    DestroyKeys,
    ResetEngine,
    RevokeKeys,
    StartDeletion,
    VerifyTier,
)
from kvstrata.reconcile import metrics
from kvstrata.reconcile.erasure import deletions
from kvstrata.reconcile.erasure.audit import tell_news
from kvstrata.reconcile.erasure.deps import ErasureDeps
from kvstrata.reconcile.erasure.executor import CustodyAwayError, Orders, ReceiptConflictError, TroubleError, with_names
from kvstrata.reconcile.erasure.record_store import StoredRecord
from kvstrata.reconcile.erasure.source import Source
from kvstrata.reconcile.erasure.tiers import chunks_of
from kvstrata.reconcile.writer import NotLeadingError

log = logging.getLogger(__name__)

RETRY_S = 1.0
JOB_EVERY_S = 1.0
SERVERS_EVERY_S = 5.0
SHORTEST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
"""The pause grows to this while nothing changes: an erasure may wait for days."""

_MANY = frozenset({"AskPodToErase", "AskPodToVerify", "ResetEngine", "VerifyTier", "names", "servers"})
"""Orders of which there may be hundreds, and those that load servers."""


class ErasureRunner:
    def __init__(self, deps: ErasureDeps, namespace: str, order: CarryOutErasure) -> None:
        self._deps, self._orders = deps, Orders(deps)
        self.namespace, self.order, self.uid = namespace, order, order.uid
        self._source = Source(deps, namespace, order)
        self._kept: StoredRecord | None = None
        self._void = False
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._inbox: list[Fact] = []
        self._servers: dict[str, TierNow] = {}
        self._asked_servers: dict[str, float] = {}
        self._unheard = set[str]()
        self._named: dict[str, dict[str, tuple[str, ...]]] = {}
        self._strays: dict[str, tuple[str, ...]] = {}
        self._troubles: dict[Hashable, str] = {}
        self._custody_problem = self._receipt_problem = ""
        self._told: object = None
        self._patience_s = SHORTEST_PAUSE_S
        self._woken = asyncio.Event()

    @property
    def record(self) -> ErasureRecord | None:
        return self._kept.record if self._kept is not None else None

    @property
    def _stored(self) -> StoredRecord:
        if self._kept is None:
            raise RuntimeError("an erasure that is not kept yet goes nowhere")
        return self._kept

    @property
    def jobs_running(self) -> int:
        return len(deletions.running(self.record.erasure)) if self.record is not None else 0

    @property
    def over(self) -> bool:
        return self.record is not None and self.record.erasure.only(ReceiptWritten) is not None

    def wake(self) -> None:
        self._woken.set()

    def recall(self, record: ErasureRecord) -> None:
        """Publish the stored record to plans before the first pass."""
        seen = self._observed(record, 0)
        pinned = next_step(record.erasure, seen, self._deps.now()).pinned_tiers
        erasures = self._deps.store.domain(self.namespace).erasures
        if self.uid in erasures:
            return
        erasures[self.uid] = ErasureNow(record, seen, pinned_tiers=pinned)
        for tier in pinned:
            self._deps.queue.add(Key(CacheTier.INFO.kind, self.namespace, tier))

    async def run(self, elsewhere: Callable[[], int]) -> None:
        """Run until the receipt is written, until neither a record nor an order exists, or until cancelled.
        `elsewhere` counts running Jobs of other erasures. Raises NotLeadingError after leadership was lost."""
        try:
            while True:
                try:
                    pause_s = await self._pass(elsewhere())
                except (KubeError, ContractError) as error:
                    log.warning("an erasure waits", extra={"erasure": self.name, "error": str(error)})
                    pause_s = RETRY_S
                if (self._told is not None and self.over) or self._void:
                    return
                await self._pause(pause_s)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _pass(self, elsewhere: int) -> float:
        if self._kept is None and not await self._take_up():
            return RETRY_S
        await self._hear(self._news())
        record = self._stored.record
        seen = self._observed(record, elsewhere)
        # A chain that refused a receipt is tried again: it may have been repaired.
        step = next_step(record.erasure, replace(seen, receipt_problem=""), self._deps.now())
        verdict = next((order.verdict for order in step.orders if isinstance(order, Conclude)), None)
        if verdict is not None:
            await self._hear((verdict,))
            if not verdict.complete:
                self._deps.named.update(self._stored.record.named)
            await self._tell(verdict)
            return 0.0
        starts = [order for order in step.orders if isinstance(order, StartDeletion)]
        unseen = {order.tier for order in starts if not self._has_seen(order.tier)}
        ready = [order for order in starts if order.tier not in unseen]
        await self._hear(deletions.begun(record.erasure, ready, seen.tiers, self._deps.now()))
        news = self._publish(seen, step)
        self._order(record, step.orders, unseen)
        self._patience_s = SHORTEST_PAUSE_S if news else min(LONGEST_PAUSE_S, 2 * self._patience_s)
        if self._unheard:
            return RETRY_S  # a new leader learns of servers within seconds, without a wake-up
        if step.again_s is None or step.again_s == LOOK_AGAIN_S:
            return self._patience_s  # some changes cause no wake-up
        return min(self._patience_s, step.again_s)

    async def _take_up(self) -> bool:
        self._kept = await self._deps.record_store.read(self.uid)
        if self._kept is not None:
            self.recall(self._kept.record)
            return True
        record = self._source.begin()
        if record is None:
            self._void = self._source.over
            return False
        own = self._deps.named.keys() & set(record.erasure.order.keyspaces)
        record = replace(record, named={keyspace: self._deps.named[keyspace] for keyspace in own})
        await self._source.hold()
        self._deps.may_write()
        self._kept = await self._deps.record_store.create(record)
        self.recall(self._kept.record)
        return True

    def _news(self) -> tuple[Fact, ...]:
        taken, self._inbox = tuple(self._inbox), []
        return (*taken, *self._source.news(self.record)) if self.record is not None else taken

    async def _hear(self, facts: Iterable[Fact]) -> None:
        kept, heard, named = self._stored, tuple(facts), dict(self._named)
        record = kept.record.with_facts(*heard)
        for tier, chunks in named.items():
            record = with_names(record, tier, chunks)
        if record == kept.record:
            return
        self._deps.may_write()
        try:
            self._kept = await self._deps.record_store.write(kept, record)
        except KubeError:
            # Orders report only once.
            self._inbox = [*heard, *self._inbox]
            raise
        for tier in named:
            del self._named[tier]
        tell_news(kept.record, self._kept.record)

    def _observed(self, record: ErasureRecord, elsewhere: int) -> Observed:
        world = self._deps.store.world(self.namespace)
        return Observed(
            operator=self._deps.operator,
            tiers=dict(self._servers),
            pods=gather.pods_at_hand(world, record.erasure),
            deletions_elsewhere=elsewhere,
            custody_problem=self._custody_problem,
            receipt_problem=self._receipt_problem,
            abandoned=self._source.abandoned,
            unattended=self._source.unattended(),
        )

    def _has_seen(self, tier: str) -> bool:
        """Whether the names that a deletion needs are known: strays of other writers that a look found."""
        record = self._stored.record
        return tier in record.named_tiers and (tier in self._strays or not found_again(record.erasure, tier))

    def _order(self, record: ErasureRecord, orders: Iterable[object], unseen: Iterable[str]) -> None:
        for order in orders:
            match order:
                case RevokeKeys() | DestroyKeys():
                    self._begin(order, self._hear_of, self._orders.end_keys, record, order)
                case AskPodToErase() | AskPodToVerify() | ResetEngine():
                    self._begin(order, self._hear_of, self._orders.ask, record, order)
                case VerifyTier():
                    self._begin(order, self._verify, record, order)
                case IssueReceipt():
                    self._begin("receipt", self._hear_of, self._orders.issue, record, order)
        for tier in unseen:
            self._begin(("names", tier), self._name_chunks, record, tier)
        for tier, round in sorted(deletions.running(self._stored.record.erasure)):
            self._begin(("deletion", tier, round), self._see_deleted, tier, round)
        if record.erasure.only(Verdict) is None and unreachable_at(record.erasure) is not None:
            for shared in tiers_at_hand(record.erasure):
                if self._deps.monotonic() - self._asked_servers.get(shared.name, -SERVERS_EVERY_S) < SERVERS_EVERY_S:
                    continue
                self._begin(("servers", shared.name), self._look_at_servers, record, shared.name)

    def _begin(self, slot: Hashable, work: Callable[..., Coroutine[Any, Any, None]], *about: Any) -> None:
        if slot not in self._tasks:
            carried_out = self._carried_out(slot, partial(work, *about))
            self._tasks[slot] = asyncio.create_task(carried_out, name=f"erasure {self.name}")

    async def _carried_out(self, slot: Hashable, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        kind = _kind_of(slot)
        failed = True
        try:
            if kind in _MANY:
                async with self._deps.limit:
                    await work()
            else:
                await work()
            failed = False
            self._troubles.pop(slot, None)
        except NotLeadingError:
            return  # the runner finds the same, and ends
        except (TroubleError, KubeError) as error:
            log.info("an order of an erasure is not carried out yet", extra={"order": kind, "why": str(error)})
            self._note(slot, error)
        except Exception:
            log.exception("an order of an erasure failed; this is a defect", extra={"order": kind})
            metrics.FAILURES.labels("CacheInvalidation", "Bug").inc()
        finally:
            metrics.ERASURE_ORDERS.labels(kind, "Failed" if failed else "Done").inc()
        self._woken.set()
        if failed:
            await self._deps.sleep(RETRY_S)
        del self._tasks[slot]
        self._woken.set()

    def _note(self, slot: Hashable, error: Exception) -> None:
        text = str(error)
        if isinstance(error, CustodyAwayError):
            self._custody_problem = text
        elif isinstance(error, ReceiptConflictError):
            self._receipt_problem = text
        else:
            self._troubles[slot] = text

    async def _hear_of(
        self, work: Callable[..., Coroutine[Any, Any, tuple[Fact, ...]]], record: ErasureRecord, order: object
    ) -> None:
        said = await work(record, order)
        self._inbox += said
        if isinstance(order, RevokeKeys | DestroyKeys):
            self._custody_problem = ""
            if self._stored.record.with_facts(*said) is self._stored.record:
                # Without news, asking again at once would bring none.
                self._woken.set()
                await self._deps.sleep(LOOK_AGAIN_S)
        if isinstance(order, IssueReceipt):
            self._receipt_problem = ""
            metrics.count_erasure(order.facts)

    async def _verify(self, record: ErasureRecord, order: VerifyTier) -> None:
        found = await self._orders.look(record, order.tier)
        self._strays[order.tier] = found.names
        self._inbox.append(found.look)

    async def _name_chunks(self, record: ErasureRecord, tier: str) -> None:
        found = await self._orders.look(record, tier)
        self._named[tier] = dict(chunks_of(found.names))
        if tier in record.named_tiers:
            self._strays[tier] = found.names

    async def _look_at_servers(self, record: ErasureRecord, tier: str) -> None:
        """Read a tier's primaries, unless its servers are known not to answer."""
        world = self._deps.store.world(self.namespace)
        found = world.tiers.get(tier)
        away = gather.tier_away(world, found) if found is not None else ""
        unheard = found is not None and gather.not_probed_yet(world, found)
        (self._unheard.add if unheard else self._unheard.discard)(tier)
        if away:
            known = self._servers.get(tier, TierNow((), ""))
            self._servers[tier] = replace(known, reachable=False, message=away)
        elif found is not None:
            keyspaces = record.erasure.order.keyspaces
            self._servers[tier] = await self._deps.looks.servers(found, record.domain, keyspaces)
        self._asked_servers[tier] = self._deps.monotonic() - (SERVERS_EVERY_S - RETRY_S if unheard else 0.0)

    async def _see_deleted(self, tier: str, round: int) -> None:
        slot = ("deletion", tier, round)
        while self.record is not None:
            said = await self._orders.delete(self.record, tier, round, self._strays.get(tier, ()))
            if not isinstance(said, str):
                self._inbox += said
                return
            if said != self._troubles.get(slot, ""):
                self._troubles[slot] = said
                self._woken.set()
            await self._deps.sleep(JOB_EVERY_S)

    def _publish(self, seen: Observed, step: ErasureStep) -> bool:
        """Enqueue the order's object if its status changes, if only with time; return whether it does."""
        record = self._stored.record
        troubles = tuple(sorted({text for text in self._troubles.values() if text}))
        now = ErasureNow(record, seen, troubles, step.pinned_tiers)
        if (told := (now, step.phase, step.decision)) == self._told:
            return False
        self._told = told
        erasures = self._deps.store.domain(self.namespace).erasures
        before = erasures.get(self.uid)
        erasures[self.uid] = now
        self._deps.queue.add(self._source.key)
        for tier in now.pinned_tiers ^ (before.pinned_tiers if before is not None else frozenset()):
            self._deps.queue.add(Key(CacheTier.INFO.kind, self.namespace, tier))
        return True

    async def _tell(self, verdict: Verdict) -> None:
        found = self._source.found
        metrics.ERASURES.labels("Complete" if verdict.complete else "Failed").inc()
        log.info("an erasure was judged", extra={"erasure": self.name, "reason": verdict.reason})
        if found is not None:
            await self._deps.events.tell(found, verdict.reason, verdict.message, warning=not verdict.complete)

    async def _pause(self, at_most_s: float) -> None:
        if at_most_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at_most_s):
                    await self._woken.wait()
        self._woken.clear()

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.order.name}"


def _kind_of(slot: Hashable) -> str:
    if isinstance(slot, tuple):
        return str(slot[0])
    return slot if isinstance(slot, str) else type(slot).__name__
