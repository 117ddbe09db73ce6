"""Deletion of a TenantCachePolicy with `deletionPolicy: Erase`: the object stays until the erasure has a receipt.

The order is a CacheInvalidation with a name derived from the policy. A namespace under deletion accepts no new objects:
there the policy itself is the order, and the record in the operator's namespace is all that exists. The epoch stays in
the policy's status and is not replaced, so a retry erases the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvstrata.api.cacheinvalidation import CacheInvalidation, Phase
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import InvalidationReason, PolicyReason, SharedReason
from kvstrata.api.scalars import Duration, format_timestamp
from kvstrata.api.tenantcachepolicy import DeletionPolicy, TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.receipt.vocabulary import SubjectKind
from kvstrata.contract.wire import digest
from kvstrata.model.erasure.facts import ReceiptWritten
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects.labels import ERASES
from kvstrata.plan.actions import CarryOutErasure, Create, Decision, EndErasure, Plan, SetFinalizers
from kvstrata.plan.bundle.enforcement import ENFORCED, bundles_lack
from kvstrata.plan.conditions import Finding, false, kstatus, true, write_status
from kvstrata.plan.scopes import keyspace_of

FINALIZER = "kvstrata.io/erase"
ABANDON = "kvstrata.io/abandon-erasure"
"""Annotation by which a person abandons an erasure; its value is the reason, which the receipt repeats."""

KEPT_FOR_S = 24 * 3600
"""How long a finished CacheInvalidation stays; its receipt stays."""


@dataclass(frozen=True, slots=True)
class DeletionCase:
    """A policy and the state of its erasure.

    `draws` is the scope of an epoch about to be drawn. `erasing` is the CacheInvalidation with the derived name, `kept`
    are uids of erasures that have begun, `receipt` the digest of its receipt. `namespace_deleting`: nothing can be
    created any more. `nameable`: the domain's key and id are known. `overdue` is why it ends unproven, `refused` why
    its receipt is not written. `served`: a bundle may have its epoch.
    """

    policy: TenantCachePolicy
    draws: Scope | None = None
    erasing: CacheInvalidation | None = None
    kept: frozenset[str] = frozenset()
    receipt: str | None = None
    namespace_deleting: bool = False
    nameable: bool = True
    overdue: str = ""
    refused: str = ""
    served: bool = False

    @property
    def own(self) -> CacheInvalidation | None:
        """The CacheInvalidation, if it erases this policy."""
        uid = self.erasing.metadata.annotations.get(ERASES) if self.erasing is not None else None
        return self.erasing if uid == self.policy.uid else None

    @property
    def abandoned(self) -> str:
        """The reason given by the person who abandoned the erasure, or of its deadline; empty if none."""
        return self.policy.metadata.annotations.get(ABANDON, "").strip() or self.overdue


@dataclass(frozen=True, slots=True)
class DeletionStep:
    """The next action, if any, and why the object still exists."""

    action: SetFinalizers | Create | CarryOutErasure | None = None
    decision: Decision | None = None


def needs_finalizer(policy: TenantCachePolicy, draws: Scope | None = None) -> bool:
    """Whether deleting a policy erases something: data under an unshared epoch, in status or about to be drawn for the
    scope `draws`. Shared data stays when a tenant leaves."""
    reported = policy.status.scope
    kinds = {draws.kind if draws is not None else None, ScopeKind(reported.kind) if reported is not None else None}
    return policy.spec.deletion_policy is DeletionPolicy.ERASE and ScopeKind.TENANT in kinds


def overdue(
    held: TenantCachePolicy | CacheInvalidation, limit: Duration, now: datetime, began: datetime | None = None
) -> str:
    """Return why the deletion of an object ends unproven; empty within the limit. An erasure that `began` later, as
    after an outage of the operator, has as long."""
    since = held.metadata.deletion_timestamp
    if since is None or (now - max(since, began or since)).total_seconds() < limit.in_seconds:
        return ""
    return f"not proven within {limit}, the deletionDeadline of the CacheDomain"


def invalidation_name(policy: TenantCachePolicy) -> str:
    """Return the name of the erasing CacheInvalidation: at most 40 characters, and unique to the policy's uid."""
    return f"erase-{policy.name[:20].rstrip('-.')}-{digest([policy.name, policy.uid])[:12]}"


def reason_of(policy: TenantCachePolicy) -> str:
    return f"TenantCachePolicy {policy.name} was deleted"


def build_invalidation(policy: TenantCachePolicy) -> dict[str, Any]:
    """Return the CacheInvalidation that erases a policy. Shared scopes are excluded and named as residue. It has no
    owner: foreground deletion would delete it with the policy."""
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
    policy = case.policy
    has = FINALIZER in policy.metadata.finalizers
    if not policy.metadata.deleting:
        needs = needs_finalizer(policy, case.draws)
        return DeletionStep() if needs == has else DeletionStep(finalizers(policy, ours=needs))
    if not has:
        return DeletionStep()
    # No epoch of its own was ever used, or its owner changed the deletion policy.
    if not needs_finalizer(policy) or case.receipt is not None:
        return _last(case)
    # Its CacheInvalidation ends first: it is overdue through the policy.
    if case.overdue and case.refused and (case.own is None or case.own.finished):
        return _released(case, f"{case.overdue}: the receipt is not written, because {case.refused}")
    if case.abandoned:
        return _given_up(case)
    if case.erasing is not None and policy.uid not in case.kept:
        return DeletionStep(decision=_stuck(case, case.erasing))
    if case.namespace_deleting or policy.uid in case.kept:
        why = Decision(SharedReason.ERASING, "it is erased without an object, because the namespace is deleted")
        return DeletionStep(_carry_out(policy, policy.uid), why) if _can_be_named(case) else _unnamed(policy)
    why = Decision(SharedReason.ERASING, f"CacheInvalidation {invalidation_name(policy)} erases it")
    return DeletionStep(Create(build_invalidation(policy)), why)


def _given_up(case: DeletionCase) -> DeletionStep:
    """Abandon the running erasure, or begin one just for the receipt."""
    uid = case.own.uid if case.own is not None and case.own.uid in case.kept else case.policy.uid
    if uid == case.policy.uid and not _can_be_named(case):
        return _unnamed(case.policy)
    why = Decision(PolicyReason.ABANDONING, f"its receipt will state all that is not proven: {case.abandoned}")
    return DeletionStep(_carry_out(case.policy, uid), why)


def _can_be_named(case: DeletionCase) -> bool:
    """Whether the erasure can begin; in a namespace under deletion nothing missing returns, and an overdue one does not
    wait for it."""
    return case.nameable or case.policy.uid in case.kept or not (case.namespace_deleting or case.overdue)


def _unnamed(policy: TenantCachePolicy) -> DeletionStep:
    """Release it: without the domain's key no block can be attributed or reached."""
    unproven = (
        "the key and id of its domain are gone, with the namespace or until after the deletionDeadline: nothing can be "
        "erased by name, and no receipt is written"
    )
    return DeletionStep(finalizers(policy, ours=False, unproven=unproven))


def _carry_out(policy: TenantCachePolicy, uid: str) -> CarryOutErasure:
    """Begin or continue the erasure of this uid: that of the policy itself, or of its CacheInvalidation."""
    if uid == policy.uid:
        return CarryOutErasure(policy.INFO.kind, policy.name, uid)
    return CarryOutErasure(CacheInvalidation.INFO.kind, invalidation_name(policy), uid)


def finalizers(held: TenantCachePolicy | CacheInvalidation, *, ours: bool, unproven: str = "") -> SetFinalizers:
    """Return the action that sets or drops the finalizer of an object."""
    others = tuple(one for one in held.metadata.finalizers if one != FINALIZER)
    return SetFinalizers((*others, FINALIZER) if ours else others, held.metadata.resource_version, unproven)


def _last(case: DeletionCase) -> DeletionStep:
    """Release it, unless the erasure failed, was not abandoned, and can be tried again: a lost tier stays lost."""
    erases = needs_finalizer(case.policy) and not case.abandoned
    if erases and case.own is not None and case.own.status.phase is Phase.FAILED:
        failed, unreachable = case.own.status.condition(ConditionType.FAILED), ConditionType.LOGICALLY_INVALID
        if failed and failed.reason == InvalidationReason.NOT_PROVEN and case.own.status.is_true(unreachable):
            return _released(case, failed.message)
        return DeletionStep(decision=_stuck(case, case.own))
    return _released(case)


def _released(case: DeletionCase, unproven: str = "") -> DeletionStep:
    """Release it; an overdue one only when no bundle has its epoch, which a restarted operator finds so, too."""
    late = case.overdue and case.overdue == case.abandoned and needs_finalizer(case.policy)
    if late and case.served:
        why = f"{case.overdue}: the policy goes when each CachedModel that it reached has a bundle, without its epoch"
        return DeletionStep(decision=Decision(PolicyReason.ABANDONING, why))
    return DeletionStep(finalizers(case.policy, ours=False, unproven=unproven))


def _stuck(case: DeletionCase, erasing: CacheInvalidation) -> Decision:
    way_out = f"or annotate the policy with {ABANDON}: <reason> to give it up, which the receipt will state"
    if case.own is None:
        why = f"CacheInvalidation {erasing.name} exists and does not erase this policy: delete it, {way_out}"
        return Decision(PolicyReason.NAME_TAKEN, why)
    match erasing.status.phase:
        case Phase.FAILED:
            why = f"CacheInvalidation {erasing.name} failed: {erasing.status.message or 'it gives no message'}"
            return Decision(PolicyReason.ERASURE_FAILED, f"{why}; delete it to have the erasure tried again, {way_out}")
        case Phase.COMPLETE:
            why = f"CacheInvalidation {erasing.name} is complete and its receipt is not written yet"
            return Decision(PolicyReason.RECEIPT_MISSING, f"{why}: wait, {way_out}")
    return Decision(SharedReason.ERASING, f"CacheInvalidation {erasing.name} is running: its status shows the progress")


LOOK_AGAIN_S = 5.0
"""When to check work in progress again."""

LOOK_AGAIN_STUCK_S = 60.0
"""The same if a person must act; their change triggers a plan anyway."""


def finalizer_due(policy: TenantCachePolicy, draws: Scope | None) -> Plan | None:
    """Return the plan that sets or drops the finalizer of a live policy; None if it is right. It precedes anything
    cached under an epoch that is about to be drawn, and is dropped after the status names a shared epoch instead."""
    action = plan_deletion(DeletionCase(policy, draws=draws)).action
    key = Key(policy.INFO.kind, policy.namespace, policy.name)
    return Plan(actions=(action,), enqueue=(key,)) if action is not None else None


def plan_departure(world: World, policy: TenantCachePolicy, now: datetime) -> Plan:
    """Return the plan for a policy under deletion, including bundles without it."""
    step = plan_deletion(_case(world, policy, now))
    bundles = tuple(Key(BUNDLE, world.namespace, model) for model in sorted(world.models))
    actions = (step.action,) if step.action is not None else ()
    why = step.decision
    if why is None:
        return Plan(actions=actions, enqueue=bundles)
    why = why._replace(message=why.message + _since(policy, now))
    # These need a person.
    stuck = why.reason in (PolicyReason.ERASURE_FAILED, PolicyReason.NAME_TAKEN)
    findings = (*(kstatus(why, None, why) if stuck else kstatus(None, why, why)), _no_access())
    return Plan(
        actions=actions,
        statuses=write_status(policy, now, findings, {}),
        enqueue=bundles,
        wake_after_s=LOOK_AGAIN_STUCK_S if stuck else LOOK_AGAIN_S,
    )


def plan_creation_refused(policy: TenantCachePolicy, sentence: str, now: datetime) -> Plan:
    """Return the plan that reports why a write for the erasure of a deleted policy is refused."""
    why = Decision(
        PolicyReason.CREATION_REFUSED,
        f"a write that is to erase the tenant's cached blocks is refused: {sentence}; admit it (it is tried again), or "
        f"annotate the policy with {ABANDON}: <reason> to give the erasure up, which the receipt will state"
        f"{_since(policy, now)}",
    )
    return Plan(statuses=write_status(policy, now, (*kstatus(why, None, why), _no_access()), {}))


def plan_departed(world: World, name: str) -> Plan:
    bundles = tuple(Key(BUNDLE, world.namespace, model) for model in sorted(world.models))
    return Plan(actions=ends_of_predecessors(world, name), enqueue=bundles)


def ends_of_predecessors(world: World, name: str) -> tuple[EndErasure, ...]:
    """Return orders to remove finished records of former policies of this name, identified by uid."""
    there = world.policies.get(name)
    return tuple(
        EndErasure(TenantCachePolicy.INFO.kind, name, uid)
        for uid, found in sorted(world.erasures.items())
        if found.record.erasure.order.subject.kind is SubjectKind.POLICY
        and found.record.invalidation == name
        and (there is None or there.uid != uid)
        and found.record.erasure.only(ReceiptWritten) is not None
    )


def erases(policy: TenantCachePolicy) -> Finding:
    """Return whether deleting a policy whose deletion policy is Erase erases something."""
    if FINALIZER in policy.metadata.finalizers:
        sentence = "deleting this policy erases the tenant's cached blocks; it is removed when the receipt is written"
        return true(ConditionType.ERASES_ON_DELETION, PolicyReason.ERASES, sentence)
    return false(
        ConditionType.ERASES_ON_DELETION,
        PolicyReason.SHARES_ALL,
        "all that the tenant caches it shares: deleting this policy ends its access and erases nothing; a "
        "CacheInvalidation with sharedScopes Roll erases it for everyone",
    )


def _case(world: World, policy: TenantCachePolicy, now: datetime) -> DeletionCase:
    own, keyspace = world.erasures.get(policy.uid), keyspace_of(world.domain_key, policy.status.scope)
    written = own.record.erasure.only(ReceiptWritten) if own is not None else None
    erasing, ready = world.invalidations.get(invalidation_name(policy)), policy.status.condition(ConditionType.READY)
    has_no_object = ready is not None and ready.reason in (PolicyReason.CREATION_REFUSED, PolicyReason.ABANDONING)
    started = own.record.erasure.order.started if own is not None else now
    began = erasing.metadata.creation_timestamp if erasing is not None else None if has_no_object else started
    case = DeletionCase(
        policy,
        erasing=erasing,
        kept=frozenset(world.erasures),
        receipt=written.digest if written is not None else None,
        namespace_deleting=policy.uid in world.ending.refused,
        overdue=overdue(policy, world.domain_spec.deletion_deadline, now, began),
        nameable=world.identity is not None,
        served=keyspace is not None and not bundles_lack(world, {keyspace}, policy.status.models),
    )
    if case.own is not None:
        own = world.erasures.get(case.own.uid, own)
        case = replace(case, receipt=case.receipt or case.own.status.receipt_digest)
    return replace(case, refused=own.seen.receipt_problem) if own is not None else case


def _since(policy: TenantCachePolicy, now: datetime) -> str:
    return f"; waiting since {format_timestamp(policy.metadata.deletion_timestamp or now)}"


def _no_access() -> Finding:
    return false(ENFORCED, PolicyReason.BEING_DELETED, "the policy is being deleted: it lets its tenant reuse nothing")
