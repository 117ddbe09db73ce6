"""A TenantCachePolicy that is deleted, from the world: whose access ends at once, and whose object goes when a receipt
says what became of what the tenant had cached (`deletion`).

Its epoch stays as it is in its status, and no new one takes its place: who has to try again erases the same.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.reasons import PolicyReason
from kvstrata.api.tenantcachepolicy import DeletionPolicy, TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope
from kvstrata.contract.receipt.vocabulary import SubjectKind
from kvstrata.model.erasure.facts import ReceiptWritten
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.plan.actions import Action, CarryOutErasure, Create, Decision, EndErasure, Plan, SetFinalizers
from kvstrata.plan.bundle.enforcement import ENFORCED
from kvstrata.plan.conditions import Finding, false, kstatus, true, write_status
from kvstrata.plan.erasure import policy_deletion as deletion
from kvstrata.plan.erasure.policy_deletion import ABANDON, FINALIZER, DeletionCase, plan_deletion

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
        case deletion.SetFinalizer():
            wanted = (*policy.metadata.finalizers, FINALIZER)
        case deletion.DropFinalizer():
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
    erasing = world.invalidations.get(deletion.invalidation_name(policy))
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


def _actions(policy: TenantCachePolicy, order: deletion.DeletionOrder | None) -> tuple[Action, ...]:
    kind = policy.INFO.kind
    match order:
        case deletion.DropFinalizer():
            return (SetFinalizers(_without_ours(policy), policy.metadata.resource_version, order.unproven),)
        case deletion.CreateInvalidation():
            return (Create(order.invalidation),)
        case deletion.EraseWithoutObject():
            return (CarryOutErasure(kind, policy.name, policy.uid),)
        case deletion.AbandonErasure() if order.uid == policy.uid:
            return (CarryOutErasure(kind, policy.name, policy.uid),)
        case deletion.AbandonErasure():
            return (CarryOutErasure(CacheInvalidation.INFO.kind, deletion.invalidation_name(policy), order.uid),)
    return ()


def _without_ours(policy: TenantCachePolicy) -> tuple[str, ...]:
    return tuple(one for one in policy.metadata.finalizers if one != FINALIZER)


def _no_access() -> Finding:
    return false(ENFORCED, PolicyReason.BEING_DELETED, "the policy is being deleted: it lets its tenant reuse nothing")
