"""CacheInvalidation: new epochs first, then every pod's acknowledgement that the old ones are gone.

The order of writes makes it resumable: the intent (scope, old and new epoch) is in the invalidation's status before any
epoch changes; a scope is rolled only while it has the old epoch; and the revisions to wait for are those of bundles
without the old keyspaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from math import inf
from typing import Any

from kvstrata.api.cacheinvalidation import MAX_AWAITING, CacheInvalidation, Phase, SharedScopes
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import InvalidationReason, SharedReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace, epoch_from_random
from kvstrata.contract.receipt.vocabulary import Mode
from kvstrata.contract.wire import digest
from kvstrata.model.erasure.facts import ReceiptWritten, Verdict
from kvstrata.model.world import World
from kvstrata.objects.labels import ERASES
from kvstrata.plan.actions import CarryOutErasure, Decision, EndErasure, Plan, Question, Remove, bundle_keys, key_of
from kvstrata.plan.bundle.enforcement import bundles_lack
from kvstrata.plan.conditions import Finding, false, kstatus, listed, true, write_status
from kvstrata.plan.erasure import status as erasurestatus
from kvstrata.plan.erasure.epoch_rolls import epoch_writes, holder_of, leaves, models_with
from kvstrata.plan.erasure.policy_deletion import FINALIZER, finalizers
from kvstrata.plan.erasure.prefix import chunks_of as prefix_chunks
from kvstrata.plan.pools.content import Progress
from kvstrata.plan.redis.backend import stores_of
from kvstrata.plan.rules import first
from kvstrata.plan.rules import invalidation as chain
from kvstrata.plan.witnesses import REPORTED_WITHIN, account_for, awaited, has_waited, witnesses_now

LOOK_AGAIN_S = 5.0
"""When to repeat orders about an erasure."""

REPORTED_S = 60.0
"""Time in which a new leader writes new epochs and every pod that answers reports to it."""


def plan_invalidation(world: World, name: str, now: datetime) -> Plan:
    """Return the next step of an invalidation; every step is idempotent and names the next in status.phase."""
    invalidation = world.invalidations.get(name)
    held = invalidation is not None and FINALIZER in invalidation.metadata.finalizers
    if invalidation is None or (invalidation.metadata.deleting and not held):
        return Plan(enqueue=bundle_keys(world))  # objects that paused for it resume
    phase = invalidation.status.phase or Phase.PENDING
    if phase.finished:
        return _end(world, invalidation) if held else _expire(invalidation, now)
    if invalidation.spec.mode is Mode.EAGER and phase is not Phase.PENDING:
        return _erase(world, invalidation, now)
    if invalidation.spec.deadline is not None and _left_s(world, invalidation, now) < 0:
        late = Decision(
            InvalidationReason.DEADLINE_EXCEEDED,
            f"not complete within {invalidation.spec.deadline}; epochs that were rolled stay rolled, and pods "
            "that have not acknowledged may reuse until they fence themselves off: see status.awaiting for when",
        )
        return _fail(invalidation, now, late)
    match phase:
        case Phase.PENDING:
            step = _begin(world, invalidation, now)
        case Phase.ROLLING:
            step = _roll(world, invalidation, now)
        case _:
            step = _await(world, invalidation, now)
    left_s = max(0.0, _left_s(world, invalidation, now)) + 1
    wake_after_s = min(left_s, step.wake_after_s if step.wake_after_s is not None else inf)
    return replace(step, wake_after_s=wake_after_s if wake_after_s < inf else None)


def _erase(world: World, invalidation: CacheInvalidation, now: datetime) -> Plan:
    """Return the next step of an eager invalidation with a written intent. Epochs are rolled as for a lazy one, after
    the record exists; all else follows from the record."""
    order = CarryOutErasure(invalidation.INFO.kind, invalidation.name, invalidation.uid)
    found = world.erasures.get(invalidation.uid)
    if found is None:
        return _before_it_is_kept(world, invalidation, now, order)
    verdict = found.record.erasure.only(Verdict)
    if invalidation.status.rolled_time is None and verdict is None:
        step = _roll(world, invalidation, now)
        return replace(step, actions=(*step.actions, order))
    if invalidation.spec.scope.prefix is not None and verdict is not None and not verdict.proves:
        # Otherwise its keyspaces and the rest of the prefix would be in use again.
        writes = tuple(epoch_writes(world, invalidation.status.scopes))
        if writes:
            return Plan(actions=(order,), statuses=writes, enqueue=(*bundle_keys(world), key_of(invalidation)))
    reported = erasurestatus.status_writes(invalidation, found, now, _took(invalidation, now))
    # Its own status does not wake it, and its record may be removed.
    is_over = any("completionTime" in write.status for write in reported)
    over = (*bundle_keys(world), key_of(invalidation)) if is_over else ()
    return Plan(actions=(order,), statuses=reported, enqueue=over)


def _before_it_is_kept(world: World, invalidation: CacheInvalidation, now: datetime, order: CarryOutErasure) -> Plan:
    questions: tuple[Question, ...] = ()
    if invalidation.spec.scope.prefix is not None and invalidation.status.rolled_time is None:
        named = prefix_chunks(world, invalidation, now)
        why, questions = named.objection, named.questions
        if why is None and _left_s(world, invalidation, now) < 0:
            late = "pods did not name the chunks in time: nothing was done"
            why = Decision(InvalidationReason.DEADLINE_EXCEEDED, late)
        if why is not None:
            return replace(_fail(invalidation, now, why), enqueue=(*bundle_keys(world), key_of(invalidation)))
    return Plan(actions=(order, *questions), wake_after_s=LOOK_AGAIN_S)


def _end(world: World, invalidation: CacheInvalidation) -> Plan:
    """End it and remove its record, unless a receipt is owed. A deleted one does not wait for a receipt that is
    refused: the record stays until it is written."""
    found = world.erasures.get(invalidation.uid)
    owed = found is not None and found.record.erasure.only(ReceiptWritten) is None
    if found is not None and owed and invalidation.metadata.deleting and found.seen.receipt_problem:
        unproven = f"the receipt is not written, because {found.seen.receipt_problem}"
        return Plan(actions=(finalizers(invalidation, ours=False, unproven=unproven),))
    order = (CarryOutErasure if owed else EndErasure)(invalidation.INFO.kind, invalidation.name, invalidation.uid)
    return Plan(actions=(order,), wake_after_s=LOOK_AGAIN_S)


def _begin(world: World, invalidation: CacheInvalidation, now: datetime) -> Plan:
    if world.domain_key is None:
        return _wait_for_domain(world, invalidation, now, world.domain_awaited)
    refused = first(chain.RULES, world, invalidation)
    if refused:
        return _fail(invalidation, now, refused)
    if invalidation.spec.scope.prefix is not None:
        named = prefix_chunks(world, invalidation, now)
        if named.objection is not None:
            return replace(_fail(invalidation, now, named.objection), actions=named.questions)
        if named.pending is not None:
            return _wait_for_names(invalidation, now, named, named.pending)
    leaving = chain.erased_policy(world, invalidation)
    scopes = chain.scopes_to_roll(world, invalidation) if leaving is None else ()
    missing = [scope for scope in scopes if holder_of(world, scope) is None]
    if missing:
        return _wait_for_domain(world, invalidation, now, f"scope {missing[0]} has not drawn its first epoch yet")
    rolled = [intent for scope in scopes for intent in _intents(world, scope)] if leaving is None else _ends(leaving)
    if not rolled and invalidation.spec.mode is Mode.EAGER:
        nothing = (
            f"{invalidation.spec.scope.summary} has no scope of its own that was ever cached under: nothing was done"
        )
        return _fail(invalidation, now, Decision(InvalidationReason.NOTHING_TO_ERASE, nothing))
    message = f"{len(scopes)} scopes {'get a new epoch' if invalidation.spec.scope.prefix is None else 'pause'}"
    if leaving is not None:
        message = f"TenantCachePolicy {leaving.name} leaves every bundle"
    waiting = Decision(InvalidationReason.ROLLING_EPOCHS, message)
    fields = {**_started(invalidation, now), "phase": str(Phase.ROLLING), "scopes": rolled}
    if invalidation.spec.mode is Mode.EAGER:  # another roll may replace these epochs before its record is written
        fields["stores"] = [one.to_kubernetes() for one in stores_of(world, {intent["oldEpoch"] for intent in rolled})]
    return _go_on(invalidation, now, waiting, fields)


def _started(invalidation: CacheInvalidation, now: datetime) -> dict[str, Any]:
    start = format_timestamp(invalidation.status.start_time or now)
    return {"startTime": start, "scopeSummary": invalidation.spec.scope.summary}


def _wait_for_domain(world: World, invalidation: CacheInvalidation, now: datetime, message: str) -> Plan:
    if _left_s(world, invalidation, now) < 0:
        return _not_proven(world, invalidation, now, f"{message}; no epoch is rolled")
    waiting = kstatus(pending=Decision(SharedReason.WAITING_FOR_DOMAIN, message))
    return Plan(statuses=write_status(invalidation, now, waiting, _started(invalidation, now)), wake_after_s=1)


def _go_on(invalidation: CacheInvalidation, now: datetime, waiting: Decision, fields: Mapping[str, Any]) -> Plan:
    """Return the plan that reports progress, and plans the invalidation again."""
    findings = (*kstatus(pending=waiting), false(ConditionType.LOGICALLY_INVALID, *waiting))
    statuses = write_status(invalidation, now, findings, {**fields, "message": waiting.message})
    return Plan(statuses=statuses, enqueue=(key_of(invalidation),))


def _ends(policy: TenantCachePolicy) -> list[dict[str, Any]]:
    """Return the epoch of a deleted policy, which stays in its status so that a retry erases the same."""
    reported = policy.status.scope
    if reported is None or reported.kind is not ScopeKind.TENANT:
        return []
    return [{"kind": str(reported.kind), "name": reported.name, "oldEpoch": reported.epoch}]


def _wait_for_names(invalidation: CacheInvalidation, now: datetime, named: Progress[Any], why: Decision) -> Plan:
    fields = {**_started(invalidation, now), "message": why.message}
    statuses = write_status(invalidation, now, kstatus(pending=why), fields)
    return Plan(actions=named.questions, statuses=statuses, wake_after_s=named.again_s or LOOK_AGAIN_S)


def _intents(world: World, scope: Scope) -> list[dict[str, Any]]:
    """Return a scope's old and new epochs, drawn per scope from the plan's entropy. A pool under replacement has two,
    because the next may take over at any time. The scope of a deleted policy gets none."""
    holder = holder_of(world, scope)
    epochs = [holder.status.scope.epoch if holder is not None and holder.status.scope is not None else ""]
    if scope.kind is ScopeKind.POOL and (following := world.pools[scope.name].status.next) is not None:
        epochs.append(following.scope.epoch)
    drawn = bytes.fromhex(digest([world.entropy.hex(), str(scope)]))[:16]
    following_epoch = {} if leaves(holder) else {"newEpoch": epoch_from_random(drawn)}
    return [{"kind": str(scope.kind), "name": scope.name, "oldEpoch": epoch, **following_epoch} for epoch in epochs]


def _roll(world: World, invalidation: CacheInvalidation, now: datetime) -> Plan:
    """Write new epochs; when all are written, wait for the pods. Paused scopes keep theirs: bundles omit them because
    of this invalidation."""
    writes = tuple(epoch_writes(world, invalidation.status.scopes)) if invalidation.spec.scope.prefix is None else ()
    if writes:
        return Plan(statuses=writes, enqueue=(*bundle_keys(world), key_of(invalidation)))
    models, gone = models_with(world, invalidation.status.scopes), _left_keyspaces(world, invalidation)
    if gone is None or not bundles_lack(world, gone, models):
        if invalidation.spec.mode is Mode.LAZY and _left_s(world, invalidation, now) < 0:
            return _not_proven(world, invalidation, now, "epochs are rolled, and not every bundle has the new ones yet")
        return Plan(enqueue=bundle_keys(world), wake_after_s=1)
    targets = [
        {"model": model, "revision": committed.bundle.root.revision}
        for model, committed in sorted(world.bundles.items())
        if model in world.models and (models is None or model in models)
    ]
    live = {pod.uid for target in targets for pod in world.live_pods(str(target["model"]))}
    awaiting = [
        {
            "model": witness.model,
            "pod": witness.pod,
            "uid": witness.uid,
            **({"fencedBy": format_timestamp(witness.fenced_by)} if witness.fenced_by else {}),
        }
        for witness in sorted(
            witnesses_now(world, now, models=models, new_only=invalidation.spec.mode is Mode.LAZY),
            key=lambda one: one.uid in live,  # found again if the list is cut
        )
    ][:MAX_AWAITING]
    waiting = Decision(SharedReason.AWAITING_ACKS, f"{len(awaiting)} pods are asked to acknowledge")
    fields = {
        "phase": str(Phase.AWAITING_ACKS),
        "targets": targets,
        "awaiting": awaiting,
        "rolledTime": format_timestamp(now),
    }
    return _go_on(invalidation, now, waiting, fields)


def _left_keyspaces(world: World, invalidation: CacheInvalidation) -> frozenset[str] | None:
    if world.identity is None:
        return None
    old = ((Scope(one.kind, one.name), one.old_epoch) for one in invalidation.status.scopes if one.old_epoch)
    return frozenset(derive_keyspace(world.identity[0], scope, epoch) for scope, epoch in old)


def _await(world: World, invalidation: CacheInvalidation, now: datetime) -> Plan:
    revisions = {target.model: target.revision for target in invalidation.status.targets}
    witnesses, rolled = awaited(world, invalidation), invalidation.status.rolled_time or now
    waited = has_waited(world, world.rolled_since.get(invalidation.uid, rolled), now)
    lazy = invalidation.spec.mode is Mode.LAZY
    account = account_for(world, witnesses, revisions, now, new_only=lazy, waited=waited)
    pods = {"acked": account.acked, "live": account.live, "fenced": account.fenced}
    if not account.open:
        return _complete(invalidation, now, pods)
    names = listed(witness.pod for witness in account.open)
    if _left_s(world, invalidation, now) < 0:
        late = "epochs are rolled, and these may serve from the old ones until they end or read their policy again"
        return _not_proven(world, invalidation, now, f"{late}: {names}")
    message = (
        f"{account.acked} of {account.live} pods acknowledged; waiting for {names} since {format_timestamp(rolled)}"
    )
    moments = [witness.fenced_by for witness in account.open if witness.fenced_by is not None]
    if len(moments) < len(account.open):
        message += "; a pod that may run under onStale ServeStale is never counted as fenced"
    step = _go_on(invalidation, now, Decision(SharedReason.AWAITING_ACKS, message), {"pods": pods})
    moments += [] if waited else [now + REPORTED_WITHIN]
    wake_after_s = max(1.0, (min(moments) - now).total_seconds()) if moments else None
    return replace(step, enqueue=(), wake_after_s=wake_after_s)


def _complete(invalidation: CacheInvalidation, now: datetime, pods: Mapping[str, int]) -> Plan:
    message = f"{pods['acked']} pods acknowledged that the old epochs are gone"
    if pods["fenced"]:
        message += f"; {pods['fenced']} could not be reached and have fenced themselves off"
    if invalidation.spec.shared_scopes is SharedScopes.EXCLUDE:
        message += "; left as asked: scopes shared with others"
    done = Decision(InvalidationReason.LOGICALLY_INVALID, message)
    complete = "unreachable now; the bytes age out of each tier"
    findings = (
        *kstatus(ready=done),
        true(ConditionType.LOGICALLY_INVALID, *done),
        true(ConditionType.COMPLETE, InvalidationReason.LAZY_COMPLETE, complete),
    )
    fields = {"phase": str(Phase.COMPLETE), "pods": dict(pods), "awaiting": None}
    return _finish(invalidation, now, findings, fields, message)


def _fail(invalidation: CacheInvalidation, now: datetime, why: Decision) -> Plan:
    findings = (*kstatus(why), true(ConditionType.FAILED, *why))
    fields = {**_started(invalidation, now), "phase": str(Phase.FAILED)}
    return _finish(invalidation, now, findings, fields, why.message)


def _not_proven(world: World, invalidation: CacheInvalidation, now: datetime, why: str) -> Plan:
    limit = f"{world.domain_spec.deletion_deadline}, the deletionDeadline of the CacheDomain"
    late = Decision(InvalidationReason.NOT_PROVEN, f"not proven within {limit}: {why}")
    return _fail(invalidation, now, late)


def _finish(
    invalidation: CacheInvalidation, now: datetime, findings: Iterable[Finding], fields: Mapping[str, Any], message: str
) -> Plan:
    end = {"completionTime": format_timestamp(now), "took": _took(invalidation, now), "message": message}
    # Its own status does not wake it, and its time to live has begun.
    statuses = write_status(invalidation, now, findings, {**fields, **end})
    return Plan(statuses=statuses, enqueue=(key_of(invalidation),))


def _expire(invalidation: CacheInvalidation, now: datetime) -> Plan:
    ttl_s = invalidation.spec.ttl_seconds_after_finished
    ended = invalidation.status.completion_time
    if ttl_s is None or ended is None:
        return Plan()
    left_s = ttl_s - (now - ended).total_seconds()
    if left_s > 0:
        return Plan(wake_after_s=left_s)
    return Plan(actions=(Remove(invalidation.INFO.kind, invalidation.name, invalidation.uid),))


def _left_s(world: World, invalidation: CacheInvalidation, now: datetime) -> float:
    """Return the seconds until the deadline, negative after it. The domain's is for lazy ones, and for that of a
    deleted policy before it begins; a new leader, as after an outage, first reads the pods' reports."""
    start, limit_s, reported_s = invalidation.status.start_time, invalidation.spec.deadline_s, -inf
    if limit_s is None and (invalidation.spec.mode is Mode.LAZY or ERASES in invalidation.metadata.annotations):
        limit_s = world.domain_spec.deletion_deadline.in_seconds
        if world.led_since is not None:
            reported_s = REPORTED_S - (now - world.led_since).total_seconds()
    if start is None or limit_s is None:
        return inf
    return max(limit_s - (now - start).total_seconds(), reported_s)


def _took(invalidation: CacheInvalidation, now: datetime) -> str:
    start = invalidation.status.start_time or now
    return f"{max(0, int((now - start).total_seconds()))}s"
