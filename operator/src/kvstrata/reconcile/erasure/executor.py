"""Executes orders of an erasure, which may be repeated, and returns the events that they end in."""

from __future__ import annotations

import contextlib
import logging

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import KubeError
from kvstrata.model.erasure.facts import JobState, ReceiptWritten, Rolled
from kvstrata.model.erasure.record import ErasureRecord, TierNow
from kvstrata.model.pods import Pod
from kvstrata.plan.erasure import deletions, gather, orders
from kvstrata.plan.erasure.advance import RETRY_S, ErasureState, OrderDone, OrderFailed
from kvstrata.plan.erasure.deletions import DeletionRun, TierDeletion
from kvstrata.plan.erasure.receipt_chain import ChainConflict
from kvstrata.reconcile import metrics
from kvstrata.reconcile.erasure import receipt_count
from kvstrata.reconcile.erasure.deps import ErasureDeps
from kvstrata.reconcile.erasure.tiers import LookError
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.pod_states import PodAnswerError
from kvstrata.reconcile.writer import NotLeadingError

log = logging.getLogger(__name__)

_METRIC_LABELS: dict[type, str] = {
    orders.FollowDeletion: "deletion",
    orders.IssueReceipt: "receipt",
    orders.NameChunks: "names",
    orders.ReadServers: "servers",
}


class Executor:
    def __init__(self, deps: ErasureDeps) -> None:
        self._deps = deps

    async def execute(self, state: ErasureState, order: orders.Order) -> OrderDone | OrderFailed:
        """Raises NotLeadingError after leadership was lost. No event holds a secret."""
        kind = _METRIC_LABELS.get(type(order), type(order).__name__)
        event: OrderDone | OrderFailed
        try:
            async with (
                self._deps.limit if isinstance(order, orders.ToPod | orders.ToTier) else contextlib.nullcontext()
            ):
                event = await self._carry_out(state, order)
        except NotLeadingError:
            raise
        except CustodyError as error:
            event = OrderFailed(order, str(error), refused=True)
        except (KubeError, LookError, PodAnswerError) as error:
            event = OrderFailed(order, str(error))
        except Exception:
            log.exception("an order of an erasure failed; this is a defect", extra={"order": kind})
            metrics.FAILURES.labels("CacheInvalidation", "Bug").inc()
            event = OrderFailed(order, "")
        if isinstance(event, OrderFailed):
            log.info("an order of an erasure is not carried out yet", extra={"order": kind, "why": event.problem})
            metrics.ERASURE_ORDERS.labels(kind, "Failed").inc()
        elif event.facts or not isinstance(order, orders.FollowDeletion):
            metrics.ERASURE_ORDERS.labels(kind, "Done").inc()
        return event

    async def _carry_out(self, state: ErasureState, order: orders.Order) -> OrderDone | OrderFailed:
        record, pods = state.record, self._deps.pods
        match order:
            case orders.RevokeKeys():
                return OrderDone(order, await self._deps.keys.revoke(record, order))
            case orders.DestroyKeys():
                return OrderDone(order, await self._deps.keys.destroy(record, order))
            case orders.AskPodToErase():
                return OrderDone(order, (await pods.erase(record, self._pod(record, order.uid), order),))
            case orders.ResetEngine():
                return OrderDone(order, (await pods.reset(record, self._pod(record, order.uid), order),))
            case orders.AskPodToVerify():
                return OrderDone(order, (await pods.verify(record, self._pod(record, order.uid), order),))
            case orders.ReadServers():
                return await self._read_servers(state, order)
            case orders.NameChunks():
                return OrderDone(order, names=(await self._deps.looks.look(record, self._tier(record, order)))[1])
            case orders.VerifyTier():
                look, names = await self._deps.looks.look(record, self._tier(record, order))
                return OrderDone(order, (look,), names)
            case orders.FollowDeletion():
                return await self._follow_deletion(state, order)
            case orders.IssueReceipt():
                return await self._issue(record, order)

    async def _read_servers(self, state: ErasureState, order: orders.ReadServers) -> OrderDone:
        """Read a tier's primaries, unless its servers are known not to answer."""
        world = self._deps.store.world(state.record.namespace)
        tier = world.tiers.get(order.tier)
        if tier is None:
            return OrderDone(order)
        # A new leader learns of servers within seconds, without a wake-up.
        pause_s = RETRY_S if gather.not_probed_yet(world, tier) else 0.0
        if away := gather.tier_away(world, tier):
            return OrderDone(order, servers=TierNow((), "", False, away), pause_s=pause_s)
        return OrderDone(order, servers=await self._deps.looks.servers(state.record, tier), pause_s=pause_s)

    async def _follow_deletion(self, state: ErasureState, order: orders.FollowDeletion) -> OrderDone:
        erasure = state.record.erasure
        run = await self._deps.jobs.look(erasure.order.uid, order.tier, order.round)
        if run is None or not run.begun:
            run = await self._start_deletion(state, order)
        if run.state is JobState.RUNNING:
            return OrderDone(order, problem=run.problem)
        return OrderDone(order, tuple(deletions.over(erasure, order.tier, order.round, run, self._deps.now())))

    async def _start_deletion(self, state: ErasureState, order: orders.FollowDeletion) -> DeletionRun:
        record = state.record
        asked, rolled = record.erasure.order, record.erasure.only(Rolled)
        tier = self._deps.store.domain(record.namespace).objects["CacheTier"].get(order.tier)
        if tier is None:
            return DeletionRun("", JobState.FAILED, problem=f"CacheTier {order.tier} does not exist any more")
        revision = max((target.revision for target in rolled.targets), default=0) if rolled else 0
        strays = state.strays.get(order.tier, ())
        self._deps.may_write()
        try:
            return await self._deps.jobs.start(
                TierDeletion(
                    asked.uid, tier, order.round, record.domain, revision, asked.keyspaces, strays, chunks=asked.chunks
                )
            )
        except LookupError as error:
            raise LookError(order.tier, str(error)) from error
        except ValueError as error:
            return DeletionRun("", JobState.FAILED, problem=str(error))

    async def _issue(self, record: ErasureRecord, order: orders.IssueReceipt) -> OrderDone | OrderFailed:
        store, namespace, domain = self._deps.store, record.namespace, record.domain
        counted = receipt_count.counted(store, namespace, domain)
        self._deps.may_write()
        done = await self._deps.chains.issue(namespace, domain, counted, order.facts)
        if isinstance(done, ChainConflict):
            return OrderFailed(order, done.message, refused=True)
        self._deps.may_write()
        await receipt_count.count(self._deps.kube, store, namespace, domain, done.count, done.head)
        metrics.count_erasure(order.facts)
        return OrderDone(order, (ReceiptWritten(done.digest),))

    def _tier(self, record: ErasureRecord, order: orders.NameChunks | orders.VerifyTier) -> CacheTier:
        found: CacheTier | None = self._deps.store.domain(record.namespace).objects["CacheTier"].get(order.tier)
        if found is None:
            raise LookError(order.tier, "it does not exist any more")
        return found

    def _pod(self, record: ErasureRecord, uid: str) -> Pod:
        pods = self._deps.store.domain(record.namespace).pods.values()
        found = next((pod for some in pods for pod in some.values() if pod.uid == uid), None)
        if found is None:
            raise PodAnswerError("a pod is gone that was to be asked")
        return found
