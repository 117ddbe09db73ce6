"""Executes orders of an erasure, which may be repeated, and returns the events that they end in."""

from __future__ import annotations

import contextlib
import logging

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import KubeError, NotLeadingError
from kvstrata.model.erasure.facts import JobState, ReceiptWritten, Rolled
from kvstrata.model.erasure.record import ErasureRecord, TierNow
from kvstrata.model.pods import Pod
from kvstrata.objects.erasure.delete_job import TierDeletion
from kvstrata.plan.erasure import deletions, gather, orders
from kvstrata.plan.erasure.advance import RETRY_S, ErasureState, OrderDone, OrderFailed
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.plan.erasure.receipt_chain import ChainConflictError
from kvstrata.plan.redis.backend import in_force, report_of
from kvstrata.reconcile import metrics
from kvstrata.reconcile.erasure.deps import ErasureDeps
from kvstrata.reconcile.erasure.receipt_chain import record_chain, recorded_chain
from kvstrata.reconcile.erasure.tiers import LookError
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.pod_states import PodAnswerError

log = logging.getLogger(__name__)


async def execute(deps: ErasureDeps, state: ErasureState, order: orders.Order) -> OrderDone | OrderFailed:
    """Raises NotLeadingError after leadership was lost. No event holds a secret."""
    kind = type(order).__name__
    event: OrderDone | OrderFailed
    try:
        async with deps.limit if isinstance(order, orders.ToPod | orders.ToTier) else contextlib.nullcontext():
            event = await _carry_out(deps, state, order)
    except NotLeadingError:
        raise
    except (CustodyError, ChainConflictError) as error:
        event = OrderFailed(order, str(error), refused=True)
    except (KubeError, LookError, PodAnswerError) as error:
        event = OrderFailed(order, str(error))
    except Exception:
        log.exception("an order of an erasure failed; this is a defect", extra={"order": kind})
        metrics.FAILURES.labels("CacheInvalidation", "Bug").inc()
        event = OrderFailed(order, "")
    if isinstance(event, OrderFailed):
        log.info("an order of an erasure is not carried out yet", extra={"order": kind, "why": event.problem})
    return event


async def _carry_out(deps: ErasureDeps, state: ErasureState, order: orders.Order) -> OrderDone:
    record, pods = state.record, deps.pods
    match order:
        case orders.RevokeKeys():
            return OrderDone(order, await deps.keys.revoke(record, order))
        case orders.DestroyKeys():
            return OrderDone(order, await deps.keys.destroy(record, order))
        case orders.AskPodToErase():
            return OrderDone(order, (await pods.erase(record, _pod(deps, record, order.uid), order),))
        case orders.ResetEngine():
            return OrderDone(order, (await pods.reset(record, _pod(deps, record, order.uid), order),))
        case orders.AskPodToVerify():
            return OrderDone(order, (await pods.verify(record, _pod(deps, record, order.uid), order),))
        case orders.ReadServers():
            return await _read_servers(deps, record, order)
        case orders.NameChunks() | orders.VerifyTier():
            if (tier := _tier(deps, record, order.tier)) is None:
                raise LookError(order.tier, "it does not exist any more")
            look, names = await deps.looks.look(record, tier)
            return OrderDone(order, (look,) if isinstance(order, orders.VerifyTier) else (), names)
        case orders.FollowDeletion():
            return await _follow_deletion(deps, state, order)
        case orders.IssueReceipt():
            return await _issue(deps, record, order)


async def _read_servers(deps: ErasureDeps, record: ErasureRecord, order: orders.ReadServers) -> OrderDone:
    """Read a tier's primaries, unless its servers are known not to answer."""
    world = deps.store.world(record.namespace)
    tier = world.tiers.get(order.tier)
    if tier is None:
        return OrderDone(order)
    # A new leader has no report yet; it learns of servers within seconds, without a wake-up.
    pause_s = RETRY_S if report_of(world, tier) is None else 0.0
    if away := gather.tier_away(world, tier):
        return OrderDone(order, servers=TierNow((), "", False, away), pause_s=pause_s)
    return OrderDone(order, servers=await deps.looks.servers(record, tier), pause_s=pause_s)


async def _follow_deletion(deps: ErasureDeps, state: ErasureState, order: orders.FollowDeletion) -> OrderDone:
    erasure = state.record.erasure
    run = await deps.jobs.look(erasure.order.uid, order.tier, order.round)
    if run is None or not run.begun:
        run = await _start_deletion(deps, state, order)
    if run.state is JobState.RUNNING:
        return OrderDone(order, problem=run.problem)
    return OrderDone(order, tuple(deletions.over(erasure, order.tier, order.round, run, deps.now())))


async def _start_deletion(deps: ErasureDeps, state: ErasureState, order: orders.FollowDeletion) -> DeletionRun:
    record = state.record
    asked, rolled = record.erasure.order, record.erasure.only(Rolled)
    tier = _tier(deps, record, order.tier)
    if tier is None:
        return DeletionRun("", JobState.FAILED, problem=f"CacheTier {order.tier} does not exist any more")
    tier = in_force(tier) or tier  # pods stay with these servers until new ones pass
    revision = max((target.revision for target in rolled.targets), default=0) if rolled else 0
    strays = state.strays.get(order.tier, ())
    deletion = TierDeletion(
        asked.uid, tier, order.round, record.domain, revision, asked.keyspaces, strays, chunks=asked.chunks
    )
    deps.may_write()
    try:
        return await deps.jobs.start(deletion)
    except LookupError as error:
        raise LookError(order.tier, str(error)) from error
    except ValueError as error:
        return DeletionRun("", JobState.FAILED, problem=str(error))


async def _issue(deps: ErasureDeps, record: ErasureRecord, order: orders.IssueReceipt) -> OrderDone:
    store, namespace, domain = deps.store, record.namespace, record.domain
    deps.may_write()
    chain = await deps.chains.issue(namespace, domain, recorded_chain(store, namespace, domain), order.facts)
    deps.may_write()
    await record_chain(deps.kube, store, chain)
    metrics.count_erasure(order.facts)
    return OrderDone(order, (ReceiptWritten(chain.digest_of(order.facts.subject.uid)),))


def _tier(deps: ErasureDeps, record: ErasureRecord, name: str) -> CacheTier | None:
    return deps.store.domain(record.namespace).tiers.get(name)


def _pod(deps: ErasureDeps, record: ErasureRecord, uid: str) -> Pod:
    pods = deps.store.domain(record.namespace).pods.values()
    found = next((pod for some in pods for pod in some.values() if pod.uid == uid), None)
    if found is None:
        raise PodAnswerError("a pod is gone that was to be asked")
    return found
