"""Audit events of an erasure, from its facts."""

from __future__ import annotations

from dataclasses import replace

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.contract.messages.audit import Action, Happened
from kvstrata.contract.receipt.facts import Copies
from kvstrata.model.erasure import facts
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.reconcile.audit import record
from kvstrata.reconcile.metrics import count_look


def record_news(before: ErasureRecord, after: ErasureRecord) -> None:
    """Log and count each fact that a write added."""
    name = f"{CacheInvalidation.INFO.kind}/{after.invalidation}"
    for key, fact in sorted(after.erasure.facts.items()):
        if before.erasure.facts.get(key) == fact:
            continue
        count_look(fact)
        if (event := _event_of(fact)) is not None:
            record(replace(event, namespace=after.namespace, object=name, uid=after.erasure.order.uid))


def _event_of(fact: facts.Fact) -> Happened | None:
    """Return the event of a fact; None if nothing changed."""
    match fact:
        case facts.Rolled():
            return Happened(action=Action.SCOPES_ROLLED, count=len(fact.revoked))
        case facts.PodSeen(uid, standing):
            return Happened(action=Action.POD_STANDS, pod_uid=uid, revision=fact.revision, reason=str(standing))
        case facts.PodErased(uid):
            return _copies(Happened(action=Action.POD_ERASED, pod_uid=uid), *fact.copies.values())
        case facts.EngineKept(uid):
            return Happened(action=Action.ENGINE_KEPT, pod_uid=uid)
        case facts.EngineReset(uid):
            return Happened(action=Action.ENGINE_RESET, pod_uid=uid)
        case facts.PodProbed(uid):
            left = fact.asked - fact.missed
            return Happened(action=Action.POD_PROBED, pod_uid=uid, count=fact.asked, remaining=left)
        case facts.KeyDestroyed(fingerprint):
            return Happened(action=Action.KEY_DESTROYED, fingerprint=fingerprint)
        case facts.KeyRemoved(fingerprint):
            return Happened(action=Action.KEY_REVOKED, fingerprint=fingerprint)
        case facts.Deletion() if fact.state is not facts.JobState.RUNNING:
            deleted, left, server = fact.deleted, fact.remaining.keys, fact.node or None
            about = Happened(action=Action.SERVER_DELETED, tier=fact.tier, server=server, reason=str(fact.state))
            return replace(about, blocks=deleted.keys, bytes=deleted.bytes, remaining=left)
        case facts.Look(tier):
            left = sum(amount.keys for amount in fact.left.values())
            return Happened(action=Action.TIER_VERIFIED, tier=tier, count=len(fact.left), remaining=left)
        case facts.TierLost(tier):
            return Happened(action=Action.TIER_LOST, tier=tier)
        case facts.Verdict():
            return Happened(action=Action.ERASURE_JUDGED, reason=fact.reason)
        case facts.ReceiptWritten(digest):
            return Happened(action=Action.RECEIPT_WRITTEN, receipt=digest)
    return None


def _copies(about: Happened, *copies: Copies) -> Happened:
    blocks, size = sum(one.erased for one in copies), sum(one.bytes for one in copies)
    return replace(about, blocks=blocks, bytes=size, remaining=sum(one.remaining for one in copies))
