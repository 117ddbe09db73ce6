"""Deletion of a TenantCachePolicy with `deletionPolicy: Erase`: its object stays until a receipt says what became of
what the tenant had cached.

Nothing calls this yet: the operator sets no finalizer, and `ErasesOnDeletion` says so. What it takes beyond this
module: eager invalidations that are carried out, and for a namespace that is being deleted, in which the API server
creates nothing any more, an order and a record in the operator's namespace (`EraseWithoutObject`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstrata.api.cacheinvalidation import CacheInvalidation, Phase
from kvstrata.api.reasons import Reason
from kvstrata.api.tenantcachepolicy import DeletionPolicy, TenantCachePolicy
from kvstrata.contract.canonical import digest

from .types import Decision

FINALIZER = "kvstrata.io/erase"
ABANDON = "kvstrata.io/abandon-erasure"
"""Annotation by which a person gives an erasure up; its value is the reason, which the receipt repeats."""

ERASES = "kvstrata.io/erases"
"""Annotation of the CacheInvalidation: the uid of the policy whose deletion ordered it."""

KEPT_FOR_S = 24 * 3600
"""How long the CacheInvalidation stays when it has finished; its receipt stays for good."""


class DeletionReason(Reason):
    """Why a policy that is being deleted is still there."""

    ERASING = "Erasing", "What the tenant has cached is being erased."
    ERASURE_FAILED = "ErasureFailed", "The erasure failed; a person has to decide."
    NAME_TAKEN = "NameTaken", "Another CacheInvalidation has the name of the one that erases."
    RECEIPT_MISSING = "ReceiptMissing", "The erasure is over, and its receipt is not written."
    ABANDONING = "Abandoning", "The erasure is given up; the receipt that says so is being written."


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """Set the finalizer, before anything of the tenant is cached under an epoch of the policy."""


@dataclass(frozen=True, slots=True)
class DropFinalizer:
    """Let the object go."""


@dataclass(frozen=True, slots=True)
class CreateInvalidation:
    """Create the CacheInvalidation that erases; its name follows from the policy, so there is one."""

    invalidation: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EraseWithoutObject:
    """Begin, or go on with, the erasure that has this uid, kept in the operator's namespace."""

    uid: str


@dataclass(frozen=True, slots=True)
class AbandonErasure:
    """Have the erasure end as given up for this reason, with a receipt; one that never began gets one, too."""

    uid: str
    reason: str


DeletionOrder = SetFinalizer | DropFinalizer | CreateInvalidation | EraseWithoutObject | AbandonErasure


@dataclass(frozen=True, slots=True)
class DeletionCase:
    """A policy, and what there is about its erasure.

    `shares` is whether one of its scopes is shared with others. `erasing` is the CacheInvalidation under the derived
    name, `receipt` the digest of the receipt of that one, or of the erasure without an object, and `namespace_deleting`
    whether nothing can be created any more.
    """

    policy: TenantCachePolicy
    shares: bool = False
    erasing: CacheInvalidation | None = None
    receipt: str | None = None
    namespace_deleting: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether the CacheInvalidation erases this policy."""
        return self.erasing is not None and self.erasing.metadata.annotations.get(ERASES) == self.policy.uid

    @property
    def abandoned(self) -> str:
        """For what reason a person gave the erasure up; empty if nobody did."""
        return self.policy.metadata.annotations.get(ABANDON, "").strip()


@dataclass(frozen=True, slots=True)
class DeletionStep:
    """What to do next, if anything, and why the object is still there, if it is to be."""

    order: DeletionOrder | None = None
    decision: Decision | None = None


def needs_finalizer(policy: TenantCachePolicy) -> bool:
    """Whether something outside Kubernetes may exist that the policy's deletion is to erase.

    A policy without an epoch has cached nothing: one that never became valid, or the younger of two for a tenant.
    """
    cached = policy.status.scope is not None or bool(policy.status.former_scopes)
    return policy.spec.deletion_policy is DeletionPolicy.ERASE and cached


def invalidation_name(policy: TenantCachePolicy) -> str:
    """Return the name of the CacheInvalidation that erases a policy: it has at most 40 characters, and a policy of the
    same name that comes later gets another."""
    return f"erase-{policy.name[:20].rstrip('-.')}-{digest([policy.name, policy.uid])[:12]}"


def build_invalidation(case: DeletionCase) -> dict[str, Any]:
    """Return the CacheInvalidation that erases a policy.

    Scopes that the tenant shares are left, and named as residue: what others reuse does not go because one leaves. It
    has no owner: a deletion in the foreground would delete it with the policy, before it has done its work.
    """
    policy = case.policy
    spec: dict[str, Any] = {
        "scope": {"tenant": policy.spec.tenant},
        "mode": "Eager",
        "reason": f"TenantCachePolicy {policy.name} was deleted",
        "ttlSecondsAfterFinished": KEPT_FOR_S,
    }
    if case.shares:
        spec["sharedScopes"] = "Exclude"
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": "CacheInvalidation",
        "metadata": {
            "name": invalidation_name(policy),
            "namespace": policy.namespace,
            "annotations": {ERASES: policy.uid},
        },
        "spec": spec,
    }


def plan_deletion(case: DeletionCase) -> DeletionStep:
    """Return the next step for a policy's finalizer; it goes when a receipt is there, and not before."""
    policy = case.policy
    has = FINALIZER in policy.metadata.finalizers
    if not policy.metadata.deleting:
        if needs_finalizer(policy) == has:
            return DeletionStep()
        return DeletionStep(DropFinalizer() if has else SetFinalizer())
    if not has:
        return DeletionStep()
    # Its epoch is gone from status or its owner changed their mind: nothing is left to wait for.
    if not needs_finalizer(policy) or case.receipt is not None:
        return _last(case)
    if case.abandoned:
        uid = case.erasing.uid if case.erasing is not None and case.is_ours else policy.uid
        why = Decision(DeletionReason.ABANDONING, f"the receipt is to say that it was given up: {case.abandoned}")
        return DeletionStep(AbandonErasure(uid, case.abandoned), why)
    if case.erasing is None:
        why = Decision(DeletionReason.ERASING, f"CacheInvalidation {invalidation_name(policy)} erases it")
        if case.namespace_deleting:
            why = Decision(DeletionReason.ERASING, "it is erased without an object, because the namespace is deleted")
            return DeletionStep(EraseWithoutObject(policy.uid), why)
        return DeletionStep(CreateInvalidation(build_invalidation(case)), why)
    return DeletionStep(decision=_stuck(case, case.erasing))


def _last(case: DeletionCase) -> DeletionStep:
    """Let it go, unless the receipt on record is of an erasure that failed and nobody gave up."""
    erasing = case.erasing if case.is_ours else None
    if erasing is not None and erasing.status.phase is Phase.FAILED and not case.abandoned:
        return DeletionStep(decision=_stuck(case, erasing))
    return DeletionStep(DropFinalizer())


def _stuck(case: DeletionCase, erasing: CacheInvalidation) -> Decision:
    way_out = f"or annotate the policy with {ABANDON}: <reason> to give it up, which the receipt will say"
    if not case.is_ours:
        why = f"CacheInvalidation {erasing.name} exists and does not erase this policy: delete it, {way_out}"
        return Decision(DeletionReason.NAME_TAKEN, why)
    match erasing.status.phase:
        case Phase.FAILED:
            why = f"CacheInvalidation {erasing.name} failed: {erasing.status.message or 'it gives no message'}"
            return Decision(
                DeletionReason.ERASURE_FAILED, f"{why}; delete it to have the erasure tried again, {way_out}"
            )
        case Phase.COMPLETE:
            why = f"CacheInvalidation {erasing.name} is complete and its receipt is not written yet"
            return Decision(DeletionReason.RECEIPT_MISSING, f"{why}: wait, {way_out}")
    why = f"CacheInvalidation {erasing.name} is at work: {erasing.status.message or 'it has just begun'}"
    return Decision(DeletionReason.ERASING, why)
