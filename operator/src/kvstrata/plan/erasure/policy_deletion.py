"""Deletion of a TenantCachePolicy with `deletionPolicy: Erase`: its object stays until a receipt says what became of
what the tenant had cached.

The order is a CacheInvalidation, whose name follows from the policy. In a namespace that is being deleted the API
server creates nothing any more: there the policy itself is the order, and its record, in the operator's namespace, all
that there is of the erasure. The epoch stays in the status of the policy and no new one takes its place, so an operator
that tries again erases the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvstrata.api.cacheinvalidation import CacheInvalidation, Phase
from kvstrata.api.reasons import PolicyReason
from kvstrata.api.tenantcachepolicy import DeletionPolicy, TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.receipt.vocabulary import SubjectKind
from kvstrata.contract.wire import digest
from kvstrata.model.erasure.facts import ReceiptWritten
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects.labels import ERASES
from kvstrata.plan.actions import Action, CarryOutErasure, Create, Decision, EndErasure, Plan, SetFinalizers
from kvstrata.plan.bundle.enforcement import ENFORCED
from kvstrata.plan.conditions import Finding, false, kstatus, true, write_status

FINALIZER = "kvstrata.io/erase"
ABANDON = "kvstrata.io/abandon-erasure"
"""Annotation by which a person gives an erasure up; its value is the reason, which the receipt repeats."""


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


ERASES_ON_DELETION = "ErasesOnDeletion"

LOOK_AGAIN_S = 5.0
"""When to look again at what is under way."""

LOOK_AGAIN_STUCK_S = 60.0
"""The same where a person has to do something, which tells of itself."""

STUCK = frozenset({PolicyReason.ERASURE_FAILED, PolicyReason.NAME_TAKEN})
"""Reasons for which only a person can do anything."""


def finalizer_due(policy: TenantCachePolicy, draws: Scope | None) -> Plan | None:
    """Return the plan that sets or drops the finalizer of a policy that lives; None if it is as it has to be.

    `draws` is the scope of which it is about to get an epoch: the finalizer is there before anything can be cached
    under it, and goes after the status names the epoch that is shared instead.
    """
    step = plan_deletion(DeletionCase(policy, draws=draws))
    match step.order:
        case SetFinalizer():
            wanted = (*policy.metadata.finalizers, FINALIZER)
        case DropFinalizer():
            wanted = _without_ours(policy)
        case _:
            return None
    return Plan(
        actions=(SetFinalizers(wanted, policy.metadata.resource_version),),
        enqueue=(Key(policy.INFO.kind, policy.namespace, policy.name),),
    )


def plan_departure(world: World, policy: TenantCachePolicy, now: datetime) -> Plan:
    """Return the plan for a policy that is being deleted; bundles are planned, too, because they are without it."""
    step = plan_deletion(_case(world, policy))
    bundles = tuple(Key(BUNDLE, world.namespace, model) for model in sorted(world.models))
    why = step.decision
    if why is None:
        return Plan(actions=_actions(policy, step.order), enqueue=bundles)
    stuck = why.reason in STUCK
    findings = (*(kstatus(why, None, why) if stuck else kstatus(None, why, why)), _no_access(), *erases(policy))
    return Plan(
        actions=_actions(policy, step.order),
        statuses=write_status(policy, now, findings, {}),
        enqueue=bundles,
        wake_after_s=LOOK_AGAIN_STUCK_S if stuck else LOOK_AGAIN_S,
    )


def plan_creation_refused(policy: TenantCachePolicy, child: str, sentence: str, now: datetime) -> Plan:
    """Return the plan that tells that `child`, which is to erase a deleted policy, cannot be created, and why."""
    why = Decision(
        PolicyReason.CREATION_REFUSED,
        f"{child}, which is to erase what the tenant has cached, is refused: {sentence}; admit it (it is tried "
        f"again), or annotate the policy with {ABANDON}: <reason> to give the erasure up, which the receipt will say",
    )
    return Plan(statuses=write_status(policy, now, (*kstatus(why, None, why), _no_access(), *erases(policy)), {}))


def plan_departed(world: World, name: str) -> Plan:
    """Return the plan for a policy that is gone."""
    bundles = tuple(Key(BUNDLE, world.namespace, model) for model in sorted(world.models))
    return Plan(actions=ends_of_predecessors(world, name), enqueue=bundles)


def ends_of_predecessors(world: World, name: str) -> tuple[EndErasure, ...]:
    """Return orders to let go what is kept of erasures whose order was itself a policy of this name that is gone.

    One that is there now is another, unless it has the uid.
    """
    there = world.policies.get(name)
    return tuple(
        EndErasure(TenantCachePolicy.INFO.kind, name, uid)
        for uid, found in sorted(world.erasures.items())
        if found.record.erasure.order.subject.kind is SubjectKind.POLICY
        and found.record.invalidation == name
        and (there is None or there.uid != uid)
        and found.record.erasure.only(ReceiptWritten) is not None
    )


def erases(policy: TenantCachePolicy) -> tuple[Finding, ...]:
    """Return whether the deletion of a policy erases something; nothing of one that does not want it."""
    if policy.spec.effective_deletion_policy is not DeletionPolicy.ERASE:
        return ()
    if FINALIZER in policy.metadata.finalizers:
        told = "deleting this policy erases what the tenant has cached; it goes when a receipt says what became of it"
        return (true(ERASES_ON_DELETION, PolicyReason.ERASES, told),)
    return (
        false(
            ERASES_ON_DELETION,
            PolicyReason.SHARES_ALL,
            "all that the tenant caches it shares: deleting this policy ends its access and erases nothing; a "
            "CacheInvalidation with sharedScopes Roll erases it for everyone",
        ),
    )


def _case(world: World, policy: TenantCachePolicy) -> DeletionCase:
    erasing = world.invalidations.get(invalidation_name(policy))
    case = DeletionCase(
        policy,
        erasing=erasing,
        kept=frozenset(world.erasures),
        receipt=_receipt(world, policy),
        namespace_deleting=policy.uid in world.ending.refused,
        nameable=world.identity is not None,
    )
    if erasing is None or not case.is_ours:
        return case
    return replace(case, receipt=case.receipt or erasing.status.receipt_digest)


def _receipt(world: World, policy: TenantCachePolicy) -> str | None:
    """Return the digest of the receipt of the erasure that the policy was itself the order of."""
    found = world.erasures.get(policy.uid)
    written = found.record.erasure.only(ReceiptWritten) if found is not None else None
    return written.digest if written is not None else None


def _actions(policy: TenantCachePolicy, order: DeletionOrder | None) -> tuple[Action, ...]:
    kind = policy.INFO.kind
    match order:
        case DropFinalizer():
            return (SetFinalizers(_without_ours(policy), policy.metadata.resource_version, order.unproven),)
        case CreateInvalidation():
            return (Create(order.invalidation),)
        case EraseWithoutObject():
            return (CarryOutErasure(kind, policy.name, policy.uid),)
        case AbandonErasure() if order.uid == policy.uid:
            return (CarryOutErasure(kind, policy.name, policy.uid),)
        case AbandonErasure():
            return (CarryOutErasure(CacheInvalidation.INFO.kind, invalidation_name(policy), order.uid),)
    return ()


def _without_ours(policy: TenantCachePolicy) -> tuple[str, ...]:
    return tuple(one for one in policy.metadata.finalizers if one != FINALIZER)


def _no_access() -> Finding:
    return false(ENFORCED, PolicyReason.BEING_DELETED, "the policy is being deleted: it lets its tenant reuse nothing")
