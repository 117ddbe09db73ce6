"""Executes single orders of an erasure, which may be repeated. Retryable failures raise TroubleError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain
from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import KubeError
from kvstrata.clients.resources import BY_KIND
from kvstrata.model.erasure.facts import Fact, JobState, ReceiptWritten, Rolled
from kvstrata.model.erasure.record import ErasureOrder, ErasureRecord
from kvstrata.model.pods import Pod
from kvstrata.plan.erasure.next_step import IssueReceipt
from kvstrata.plan.erasure.orders import AskPodToErase, AskPodToVerify, DestroyKeys, ResetEngine, RevokeKeys
from kvstrata.plan.erasure.receipt_chain import ChainConflict
from kvstrata.reconcile.erasure import deletions
from kvstrata.reconcile.erasure.deletions import DeletionRun, TierDeletion
from kvstrata.reconcile.erasure.deps import ErasureDeps
from kvstrata.reconcile.erasure.pods import PodError
from kvstrata.reconcile.erasure.tiers import Found, LookError
from kvstrata.reconcile.keys import CustodyError


class TroubleError(Exception):
    """An order could not be executed now. The message holds no secret."""


class ReceiptConflictError(TroubleError):
    """The chain of receipts cannot be continued."""


class CustodyAwayError(TroubleError):
    """The custody of data keys cannot act now."""


class Orders:
    def __init__(self, deps: ErasureDeps) -> None:
        self._deps = deps

    async def end_keys(self, record: ErasureRecord, order: RevokeKeys | DestroyKeys) -> tuple[Fact, ...]:
        try:
            if isinstance(order, DestroyKeys):
                return await self._deps.keys.destroy(record, order)
            return await self._deps.keys.revoke(record, order)
        except CustodyError as error:
            raise CustodyAwayError(str(error)) from error

    async def ask(self, record: ErasureRecord, order: AskPodToErase | AskPodToVerify | ResetEngine) -> tuple[Fact, ...]:
        pod = self._pod(record.namespace, order.uid)
        try:
            if isinstance(order, AskPodToErase):
                return (await self._deps.pods.erase(record.namespace, pod, order),)
            if isinstance(order, ResetEngine):
                return (await self._deps.pods.reset(record.namespace, pod, order),)
            return (await self._deps.pods.verify(record.namespace, pod, order, record.named),)
        except PodError as error:
            raise TroubleError(str(error)) from error

    async def look(self, record: ErasureRecord, tier: str) -> Found:
        try:
            found = self._tier(record.namespace, tier)
            order = record.erasure.order
            return await self._deps.looks.look(found, record.domain, order.keyspaces, chunks_meant(order))
        except LookError as error:
            raise TroubleError(f"CacheTier {tier}: {error}") from error

    async def delete(
        self, record: ErasureRecord, tier: str, round: int, strays: tuple[str, ...]
    ) -> tuple[Fact, ...] | str:
        """Have the Job of a round run; return its result, or a message while it runs."""
        uid = record.erasure.order.uid
        run = await self._deps.jobs.look(uid, tier, round)
        if run is None or not run.begun:
            run = await self._start(record, tier, round, strays)
        if run.state is JobState.RUNNING:
            return run.problem
        return tuple(deletions.over(record.erasure, tier, round, run, self._deps.now()))

    async def _start(self, record: ErasureRecord, tier: str, round: int, strays: tuple[str, ...]) -> DeletionRun:
        order, stated = record.erasure.order, record.erasure.only(Rolled)
        found = self._deps.store.domain(record.namespace).objects["CacheTier"].get(tier)
        if found is None:
            return DeletionRun("", JobState.FAILED, problem=f"CacheTier {tier} does not exist any more")
        revision = max((target.revision for target in stated.targets), default=0) if stated else 0
        self._deps.may_write()
        try:
            return await self._deps.jobs.start(
                TierDeletion(
                    order.uid,
                    found,
                    round,
                    record.domain,
                    revision,
                    order.keyspaces,
                    strays,
                    chunks=chunks_meant(order),
                )
            )
        except LookupError as error:
            raise TroubleError(f"CacheTier {tier}: {error}") from error
        except ValueError as error:
            return DeletionRun("", JobState.FAILED, problem=str(error))

    async def issue(self, record: ErasureRecord, order: IssueReceipt) -> tuple[Fact, ...]:
        async with self._deps.issuing[record.namespace]:
            domain = self._domain_of(record)
            told = domain.status.receipts if domain is not None else None
            self._deps.may_write()
            done = await self._deps.chains.issue(record.namespace, record.domain, told, order.facts)
            if isinstance(done, ChainConflict):
                raise ReceiptConflictError(done.message)
            await self._tell_domain(record, {"count": done.count, "head": done.head})
        return (ReceiptWritten(done.digest),)

    async def _tell_domain(self, record: ErasureRecord, receipts: Mapping[str, Any]) -> None:
        domain, namespace = self._domain_of(record), record.namespace
        if domain is None or (domain.status.receipts and domain.status.receipts.count >= receipts["count"]):
            return
        resource = BY_KIND[CacheDomain.INFO.kind]
        self._deps.may_write()
        try:
            written = await self._deps.kube.patch_status(
                resource, namespace, DOMAIN_NAME, {"receipts": dict(receipts)}, domain.metadata.resource_version
            )
        except KubeError as error:
            if error.is_not_found:
                return
            raise
        self._deps.store.observe(written | {"apiVersion": resource.api_version, "kind": resource.kind})

    def _domain_of(self, record: ErasureRecord) -> CacheDomain | None:
        """Return the domain that an erasure's receipt belongs to; a successor has another chain."""
        found: CacheDomain | None = self._deps.store.domain(record.namespace).objects["CacheDomain"].get(DOMAIN_NAME)
        return found if found is not None and found.status.domain_id == record.domain else None

    def _tier(self, namespace: str, name: str) -> CacheTier:
        found: CacheTier | None = self._deps.store.domain(namespace).objects["CacheTier"].get(name)
        if found is None:
            raise LookError("it does not exist any more")
        return found

    def _pod(self, namespace: str, uid: str) -> Pod:
        pods = self._deps.store.domain(namespace).pods.values()
        found = next((pod for some in pods for pod in some.values() if pod.uid == uid), None)
        if found is None:
            raise TroubleError("a pod is gone that was to be asked")
        return found


def chunks_meant(order: ErasureOrder) -> tuple[str, ...]:
    """The chunks to erase, none for whole keyspaces."""
    return order.prefix.chunks if order.prefix is not None else ()


def with_names(record: ErasureRecord, tier: str, named: Mapping[str, tuple[str, ...]]) -> ErasureRecord:
    own = set(record.erasure.order.keyspaces)
    merged = dict(record.named)
    for keyspace, chunks in named.items():
        if keyspace in own:
            merged[keyspace] = tuple(sorted({*merged.get(keyspace, ()), *chunks}))
    return replace(record, named=merged, named_tiers=tuple(sorted({*record.named_tiers, tier})))
