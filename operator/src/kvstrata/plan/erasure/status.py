"""Status of an eager invalidation during and after its erasure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from kvstrata.api.cacheinvalidation import MAX_ERASED_TIERS, CacheInvalidation, Phase
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.receipt.facts import Erasure as ReceiptFacts
from kvstrata.contract.receipt.vocabulary import Standing
from kvstrata.model.erasure.facts import ReceiptWritten
from kvstrata.model.erasure.record import ErasureNow
from kvstrata.objects.quantities import binary
from kvstrata.plan.actions import Decision, StatusWrite
from kvstrata.plan.conditions import kstatus, write_status
from kvstrata.plan.erasure.next_step import next_step
from kvstrata.plan.erasure.receipt import facts_of


def status_writes(
    invalidation: CacheInvalidation, found: ErasureNow, now: datetime, took: str
) -> tuple[StatusWrite, ...]:
    erasure = found.record.erasure
    step = next_step(erasure, found.seen, now)
    since = () if step.phase.finished else (f"under way since {format_timestamp(erasure.order.started)}",)
    message = "; ".join((step.decision.message, *found.troubles[:3], *since))
    why = Decision(step.decision.reason, message)
    facts = facts_of(erasure)
    receipt = erasure.only(ReceiptWritten)
    standings = [pod.standing for pod in facts.pods]
    fields: dict[str, Any] = {
        "phase": str(step.phase),
        "pods": {
            "acked": standings.count(Standing.ACKED),
            "live": len(standings) - standings.count(Standing.ENDED),
            "fenced": standings.count(Standing.FENCED),
        },
        "message": why.message,
        **_amounts(facts),
    }
    if not step.phase.finished:
        findings = (*kstatus(None, why, why), *step.findings)
        return write_status(invalidation, now, findings, fields, can_wait=True)
    fields |= {
        "completionTime": format_timestamp(now),
        "took": took,
        "awaiting": None,
        "receiptDigest": receipt.digest if receipt is not None else None,
    }
    failed = why if step.phase is Phase.FAILED else None
    return write_status(invalidation, now, (*kstatus(failed, None, why), *step.findings), fields)


def _amounts(facts: ReceiptFacts) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {
            "name": tier.tier,
            "found": sum(node.found.keys for node in tier.nodes),
            "deleted": sum(node.deleted.keys for node in tier.nodes),
            "remaining": sum(node.remaining.keys for node in tier.nodes),
            "bytes": sum(node.deleted.bytes for node in tier.nodes),
        }
        for tier in facts.tiers[:MAX_ERASED_TIERS]
        if tier.nodes
    ]
    if not rows:
        return {}
    return {
        "tiers": rows,
        "keys": sum(row["deleted"] for row in rows),
        "bytes": binary(sum(row["bytes"] for row in rows)),
    }
