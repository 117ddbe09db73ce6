"""Requests of erasures to pods: erase copies, look for blocks that they could read before, reset engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from kvstrata.clients.gate import GateClient
from kvstrata.clients.kube import Kube
from kvstrata.contract import ContractError
from kvstrata.contract.messages import erase
from kvstrata.contract.messages.engine_reset import ResetOutcome, ResetRequest
from kvstrata.contract.messages.erase import MAX_ERASED_KEYSPACES, ErasedTier, EraseOutcome, EraseRequest, VerifyRequest
from kvstrata.contract.receipt.facts import Copies
from kvstrata.model.erasure.facts import EngineKept, EngineReset, PodErased, PodProbed
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.model.pods import Pod
from kvstrata.plan.erasure.gather import OWN_MEMORY
from kvstrata.plan.erasure.orders import AskPodToErase, AskPodToVerify, ResetEngine
from kvstrata.reconcile.pod_states import PodAnswerError, PodTokens

T = TypeVar("T")
Q = TypeVar("Q")

WAIT_MS = 30_000
"""How long a pod may wait for readers and writers before it names those that hold the rest."""


class Pods:
    """`now` is the wall clock in UTC."""

    def __init__(self, kube: Kube, gates: GateClient, now: Callable[[], datetime]) -> None:
        self._gates, self._tokens, self._now = gates, PodTokens(kube), now

    async def erase(self, record: ErasureRecord, pod: Pod, order: AskPodToErase) -> PodErased:
        """Have a pod erase the named tiers. Raises PodAnswerError as long as anything is left."""
        keyspaces = record.erasure.order.keyspaces
        if len(keyspaces) > MAX_ERASED_KEYSPACES:
            raise PodAnswerError(f"pods erase {MAX_ERASED_KEYSPACES} keyspaces at a time, and it is {len(keyspaces)}")
        named = () if OWN_MEMORY in order.tiers else order.tiers
        answer = await self._believed(record, pod, self._gates.erase, EraseRequest(keyspaces, named, WAIT_MS))
        if answer.outcome is not EraseOutcome.COMPLETE:
            raise PodAnswerError(
                f"pod {pod.name} has not erased everything: {'; '.join(answer.held_by[:3]) or answer.outcome}"
            )
        rows = {tier.tier: tier for tier in answer.cache.tiers}
        if missing := sorted(set(order.tiers) - rows.keys()):
            raise PodAnswerError(f"pod {pod.name} does not report its tier {missing[0] or 'of memory'}")
        copies = {name: _copies(rows[name]) for name in order.tiers}
        folders = tuple(name for name in order.tiers if erase.Check.PLACES in rows[name].checked)
        return PodErased(order.uid, order.round, answer.gate_boot, answer.cache.boot, self._now(), copies, folders)

    async def verify(self, record: ErasureRecord, pod: Pod, order: AskPodToVerify) -> PodProbed:
        """Ask a pod for blocks of each keyspace: of the named chunks, or else of those that it remembers having
        erased. Raises PodAnswerError."""
        boots: set[tuple[str, str]] = set()
        known = asked = missed = 0
        for keyspace in record.erasure.order.keyspaces:
            named = record.named.get(keyspace, ())
            chunks = b"".join(map(bytes.fromhex, named))
            answer = await self._believed(record, pod, self._gates.verify, VerifyRequest(keyspace, chunks or None))
            if answer.in_force or answer.found.in_force:
                raise PodAnswerError(f"pod {pod.name} has a policy in force that was revoked")
            boots.add((answer.gate_boot, answer.found.boot))
            there = max((max(tier.found, tier.kept or 0) for tier in answer.found.tiers), default=0)
            known += max(answer.asked, len(named))
            asked += answer.asked
            missed += answer.asked - there
        if len(boots) != 1:
            raise PodAnswerError(f"pod {pod.name} restarted while it was asked")
        ((gate_boot, cache_boot),) = boots
        return PodProbed(order.uid, order.round, gate_boot, cache_boot, self._now(), known, asked, missed)

    async def reset(self, record: ErasureRecord, pod: Pod, order: ResetEngine) -> EngineReset | EngineKept:
        """Have a pod's engine empty its prefix cache; EngineKept if it cannot. Raises PodAnswerError to be retried."""
        answer = await self._believed(record, pod, self._gates.reset, ResetRequest(WAIT_MS))
        match answer.outcome:
            case ResetOutcome.RESET:
                return EngineReset(order.uid, self._now())
            case ResetOutcome.CANNOT:
                return EngineKept(order.uid, self._now())
            case ResetOutcome.BUSY:
                raise PodAnswerError(
                    f"the engine of pod {pod.name} has not emptied its prefix cache: requests hold blocks"
                )
        raise PodAnswerError(f"the engine of pod {pod.name} does not answer")

    async def _believed(
        self, record: ErasureRecord, pod: Pod, ask: Callable[[str, str, Q], Awaitable[tuple[T, str]]], request: Q
    ) -> T:
        try:
            return await self._tokens.answer_of(record.namespace, pod, ask, request)
        except ContractError as error:
            raise PodAnswerError(f"pod {pod.name} could not be asked") from error


def _copies(tier: ErasedTier) -> Copies:
    return Copies(tier.found.blocks, tier.deleted.blocks, tier.remaining.blocks, tier.deleted.bytes)
