"""How long invalidations take, and what looks after deletions find: counted when it is known for certain."""

from __future__ import annotations

from kvstrata.api.base import Resource
from kvstrata.api.cacheinvalidation import CacheInvalidation, InvalidationMode, Phase
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.vocabulary import moment_in_s
from kvstrata.model.erasure.facts import Deletion, JobState, Look
from kvstrata.model.erasure.record import ErasureRecord

from . import metrics

STEPS = ("unreachable", "keys_revoked", "erased", "verified")
"""Steps of an erasure that its receipt has moments of."""


def count_lazy(before: Resource | None, after: Resource | None) -> None:
    """Count how long it took until nobody could reach what is invalidated lazily, when the status says so first."""
    if not isinstance(after, CacheInvalidation) or after.spec.mode is not InvalidationMode.LAZY:
        return
    known = isinstance(before, CacheInvalidation) and before.uid == after.uid and before.status.phase is Phase.COMPLETE
    began, ended = after.status.start_time, after.status.completion_time
    if after.status.phase is Phase.COMPLETE and not known and began is not None and ended is not None:
        metrics.INVALIDATIONS.labels("Lazy", "unreachable").observe(max(0.0, (ended - began).total_seconds()))


def count_erasure(facts: Erasure) -> None:
    """Count how long each step of an erasure took, from the order on, when its receipt is written."""
    began_s = moment_in_s(facts.timings.started)
    for step in STEPS:
        at = getattr(facts.timings, step)
        if at is not None:
            metrics.INVALIDATIONS.labels("Eager", step).observe(max(0, moment_in_s(at) - began_s))


def count_looks(before: ErasureRecord, after: ErasureRecord) -> None:
    """Count looks at tiers that a record has and did not, what they found, and what went in later rounds."""
    for key, fact in after.erasure.facts.items():
        if before.erasure.facts.get(key) == fact:
            continue
        if isinstance(fact, Look):
            metrics.ORPHAN_SCANS.inc()
            metrics.ORPHANS.labels("found").inc(sum(amount.keys for amount in fact.left.values()))
        elif isinstance(fact, Deletion) and fact.state is JobState.DONE and fact.round > 1:
            metrics.ORPHANS.labels("removed").inc(fact.deleted.keys)
