"""Audit events of an erasure, from its facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.contract.messages.audit import Action, Happened
from kvstrata.model.erasure.facts import (
    Deletion,
    EngineKept,
    EngineReset,
    Fact,
    FilesErased,
    JobState,
    KeyDestroyed,
    KeyNotDestroyed,
    KeyRemoved,
    Look,
    PodErased,
    PodProbed,
    PodSeen,
    ReceiptWritten,
    Rolled,
    ServersSeen,
    TierLost,
    Verdict,
)
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.reconcile.audit import tell
from kvstrata.reconcile.metrics import count_looks


def tell_news(before: ErasureRecord, after: ErasureRecord) -> None:
    for happened in _news(before, after):
        tell(happened)
    count_looks(before, after)


def _news(before: ErasureRecord, after: ErasureRecord) -> Iterator[Happened]:
    subject = after.erasure.order.subject
    name = f"{CacheInvalidation.INFO.kind}/{after.invalidation}"
    for key, fact in sorted(after.erasure.facts.items()):
        if before.erasure.facts.get(key) != fact and (told := _told(fact)) is not None:
            yield replace(told, namespace=after.namespace, object=name, uid=subject.uid)


def _told(fact: Fact) -> Happened | None:
    match fact:
        case Rolled():
            return Happened(action=Action.SCOPES_ROLLED, count=len(fact.revoked))
        case PodSeen():
            return Happened(
                action=Action.POD_STANDS, pod_uid=fact.uid, revision=fact.revision, reason=str(fact.standing)
            )
        case PodErased():
            copies = fact.copies.values()
            return Happened(
                action=Action.POD_ERASED,
                pod_uid=fact.uid,
                blocks=sum(one.erased for one in copies),
                bytes=sum(one.bytes for one in copies),
                remaining=sum(one.remaining for one in copies),
            )
        case FilesErased():
            return Happened(
                action=Action.FILES_ERASED,
                pod_uid=fact.uid,
                tier=fact.tier,
                blocks=fact.copies.erased,
                bytes=fact.copies.bytes,
                remaining=fact.copies.remaining,
            )
        case EngineReset():
            return Happened(action=Action.ENGINE_RESET, pod_uid=fact.uid)
        case EngineKept():
            return Happened(action=Action.ENGINE_KEPT, pod_uid=fact.uid)
        case PodProbed():
            left = fact.asked - fact.missed
            return Happened(action=Action.POD_PROBED, pod_uid=fact.uid, count=fact.asked, remaining=left)
        case KeyDestroyed():
            return Happened(action=Action.KEY_DESTROYED, fingerprint=fact.fingerprint)
        case KeyRemoved():
            return Happened(action=Action.KEY_REVOKED, fingerprint=fact.fingerprint)
        case KeyNotDestroyed() | ServersSeen():
            return None  # nothing changed
        case Deletion():
            return _deleted(fact)
        case Look():
            left = sum(amount.keys for amount in fact.left.values())
            return Happened(action=Action.TIER_VERIFIED, tier=fact.tier, count=len(fact.left), remaining=left)
        case TierLost():
            return Happened(action=Action.TIER_LOST, tier=fact.tier)
        case Verdict():
            return Happened(action=Action.ERASURE_JUDGED, reason=fact.reason)
        case ReceiptWritten():
            return Happened(action=Action.RECEIPT_WRITTEN, receipt=fact.digest)


def _deleted(fact: Deletion) -> Happened | None:
    if fact.state is JobState.RUNNING:
        return None
    return Happened(
        action=Action.SERVER_DELETED,
        tier=fact.tier,
        server=fact.node or None,
        reason=str(fact.state),
        blocks=fact.deleted.keys,
        bytes=fact.deleted.bytes,
        remaining=fact.remaining.keys,
    )
