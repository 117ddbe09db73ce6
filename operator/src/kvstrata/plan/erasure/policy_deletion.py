"""Deletion of a TenantCachePolicy with `deletionPolicy: Erase`: its object stays until a receipt says what became of
what the tenant had cached.

The order is a CacheInvalidation, whose name follows from the policy. In a namespace that is being deleted the API
server creates nothing any more: there the policy itself is the order, and its record, in the operator's namespace, all
that there is of the erasure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstrata.api.cacheinvalidation import CacheInvalidation, Phase
from kvstrata.api.reasons import PolicyReason
from kvstrata.api.tenantcachepolicy import DeletionPolicy, TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.wire import digest
from kvstrata.plan.actions import Decision

FINALIZER = "kvstrata.io/erase"
ABANDON = "kvstrata.io/abandon-erasure"
"""Annotation by which a person gives an erasure up; its value is the reason, which the receipt repeats."""

ERASES = "kvstrata.io/erases"
"""Annotation of the CacheInvalidation: the uid of the policy whose deletion ordered it."""

KEPT_FOR_S = 24 * 3600
"""How long the CacheInvalidation stays when it has finished; its receipt stays for good."""


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """Set the finalizer, before anything of the tenant is cached under an epoch of the policy."""


@dataclass(frozen=True, slots=True)
class DropFinalizer:
    """Let the object go. `unproven` says why no receipt tells of it, where one was to."""

    unproven: str = ""


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

    `draws` is the scope of which the policy is about to get an epoch. `erasing` is the CacheInvalidation under the
    derived name, `kept` are the uids of erasures that have begun, `receipt` the digest of the receipt of that one, or
    of the erasure without an object. `namespace_deleting` is whether nothing can be created any more, `nameable`
    whether it is known by which names the tenant's blocks go, and whose receipts theirs is one of.
    """

    policy: TenantCachePolicy
    draws: Scope | None = None
    erasing: CacheInvalidation | None = None
    kept: frozenset[str] = frozenset()
    receipt: str | None = None
    namespace_deleting: bool = False
    nameable: bool = True

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


def needs_finalizer(policy: TenantCachePolicy, draws: Scope | None = None) -> bool:
    """Whether the deletion of a policy erases something: what is under an epoch that nobody shares.

    `draws` is the scope of which it is about to get an epoch. As long as its status has one of its own, that is still
    to be erased, whatever it is about to get. What a tenant shares stays when it leaves, so one that only ever shared
    leaves nothing to be erased; nor does one without an epoch.
    """
    told = policy.status.scope
    kinds = {draws.kind if draws is not None else None, ScopeKind(told.kind) if told is not None else None}
    return policy.spec.effective_deletion_policy is DeletionPolicy.ERASE and ScopeKind.TENANT in kinds


def invalidation_name(policy: TenantCachePolicy) -> str:
    """Return the name of the CacheInvalidation that erases a policy: it has at most 40 characters, and a policy of the
    same name that comes later gets another."""
    return f"erase-{policy.name[:20].rstrip('-.')}-{digest([policy.name, policy.uid])[:12]}"


def reason_of(policy: TenantCachePolicy) -> str:
    """Return what a receipt gives as the reason."""
    return f"TenantCachePolicy {policy.name} was deleted"


def build_invalidation(policy: TenantCachePolicy) -> dict[str, Any]:
    """Return the CacheInvalidation that erases a policy.

    Scopes that the tenant shares are left, and named as residue: what others reuse does not go because one leaves. It
    has no owner: a deletion in the foreground would delete it with the policy, before it has done its work.
    """
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": CacheInvalidation.INFO.kind,
        "metadata": {
            "name": invalidation_name(policy),
            "namespace": policy.namespace,
            "annotations": {ERASES: policy.uid},
        },
        "spec": {
            "scope": {"tenant": policy.spec.tenant},
            "sharedScopes": "Exclude",
            "mode": "Eager",
            "reason": reason_of(policy),
            "ttlSecondsAfterFinished": KEPT_FOR_S,
        },
    }


def plan_deletion(case: DeletionCase) -> DeletionStep:
    """Return the next step for a policy's finalizer; it goes when a receipt is there, and not before."""
    policy = case.policy
    has = FINALIZER in policy.metadata.finalizers
    if not policy.metadata.deleting:
        if needs_finalizer(policy, case.draws) == has:
            return DeletionStep()
        return DeletionStep(DropFinalizer() if has else SetFinalizer())
    if not has:
        return DeletionStep()
    # Nothing was ever under an epoch of its own, or its owner changed their mind: nothing is left to wait for.
    if not needs_finalizer(policy) or case.receipt is not None:
        return _last(case)
    if case.abandoned:
        return _given_up(case)
    if case.erasing is not None and policy.uid not in case.kept:
        return DeletionStep(decision=_stuck(case, case.erasing))
    if case.namespace_deleting or policy.uid in case.kept:
        why = Decision(PolicyReason.ERASING, "it is erased without an object, because the namespace is deleted")
        return DeletionStep(EraseWithoutObject(policy.uid), why) if _can_be_named(case) else _unnamed()
    why = Decision(PolicyReason.ERASING, f"CacheInvalidation {invalidation_name(policy)} erases it")
    return DeletionStep(CreateInvalidation(build_invalidation(policy)), why)


def _given_up(case: DeletionCase) -> DeletionStep:
    """Have the erasure that is under way say so in its receipt, or one that begins for this alone."""
    erasing = case.erasing if case.is_ours else None
    uid = erasing.uid if erasing is not None and erasing.uid in case.kept else case.policy.uid
    if uid == case.policy.uid and not _can_be_named(case):
        return _unnamed()
    why = Decision(PolicyReason.ABANDONING, f"the receipt is to say that it was given up: {case.abandoned}")
    return DeletionStep(AbandonErasure(uid, case.abandoned), why)


def _can_be_named(case: DeletionCase) -> bool:
    """Whether the erasure can begin, in a namespace in which nothing that is missing comes back."""
    return case.nameable or case.policy.uid in case.kept or not case.namespace_deleting


def _unnamed() -> DeletionStep:
    """Let it go with its namespace: without the domain's key nobody can tell which blocks were whose, nor reach one."""
    return DeletionStep(
        DropFinalizer(
            "the namespace is being deleted, and the key and id of its domain went before an operator saw it: nothing "
            "can be erased by name, and no receipt is written"
        )
    )


def _last(case: DeletionCase) -> DeletionStep:
    """Let it go, unless the receipt on record is of an erasure that failed and nobody gave up."""
    erasing = case.erasing if case.is_ours else None
    erases = needs_finalizer(case.policy) and not case.abandoned
    if erases and erasing is not None and erasing.status.phase is Phase.FAILED:
        return DeletionStep(decision=_stuck(case, erasing))
    return DeletionStep(DropFinalizer())


def _stuck(case: DeletionCase, erasing: CacheInvalidation) -> Decision:
    way_out = f"or annotate the policy with {ABANDON}: <reason> to give it up, which the receipt will say"
    if not case.is_ours:
        why = f"CacheInvalidation {erasing.name} exists and does not erase this policy: delete it, {way_out}"
        return Decision(PolicyReason.NAME_TAKEN, why)
    match erasing.status.phase:
        case Phase.FAILED:
            why = f"CacheInvalidation {erasing.name} failed: {erasing.status.message or 'it gives no message'}"
            return Decision(PolicyReason.ERASURE_FAILED, f"{why}; delete it to have the erasure tried again, {way_out}")
        case Phase.COMPLETE:
            why = f"CacheInvalidation {erasing.name} is complete and its receipt is not written yet"
            return Decision(PolicyReason.RECEIPT_MISSING, f"{why}: wait, {way_out}")
    return Decision(PolicyReason.ERASING, f"CacheInvalidation {erasing.name} is at work: its status says how far it is")
