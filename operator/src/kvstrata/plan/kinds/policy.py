"""TenantCachePolicy: the tenant's scope and epoch, and the policy's enforcement."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import PolicyReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, Plan
from kvstrata.plan.budgets.admission import AdmissionDecision, decide_admission
from kvstrata.plan.budgets.capacity import within_budget
from kvstrata.plan.budgets.classification import because_of_policy, levels_of, tiers_admitted
from kvstrata.plan.budgets.usage import usage_status
from kvstrata.plan.bundle.compile import compile_policy, selects
from kvstrata.plan.bundle.enforcement import ENFORCED, Enforcement, holds, policy_enforcement
from kvstrata.plan.conditions import Finding, false, kstatus, true, write_status
from kvstrata.plan.erasure.policy_deletion import (
    ends_of_predecessors,
    erases,
    finalizer_due,
    plan_departed,
    plan_departure,
)
from kvstrata.plan.keys.data_keys import is_lost
from kvstrata.plan.pools.readers import pools_resolved
from kvstrata.plan.rules import first
from kvstrata.plan.rules import policy as chain
from kvstrata.plan.scopes import Epoch, current_epoch, former_scopes, fresh_epoch, held, scope_in_force, tenant_scope

ADMITTED = "Admitted"
LOOK_AGAIN_S = 30.0
"""How often a policy that is not enforced yet is planned again, even if no event asks for it."""


def plan_policy(world: World, name: str, now: datetime) -> Plan:
    """Return the plan for one policy.

    A missing or due epoch, and admission, are written to status first. Bundles are compiled from what the API server
    holds, so no keyspace depends on an epoch that could be lost, and the next leader cannot give a guarantee away.
    """
    policy = world.policies.get(name)
    if policy is None:
        return plan_departed(world, name)
    plan = _plan_present(world, policy, now)
    return replace(plan, actions=(*plan.actions, *ends_of_predecessors(world, name)))


def _plan_present(world: World, policy: TenantCachePolicy, now: datetime) -> Plan:
    if policy.metadata.deleting:
        return plan_departure(world, policy, now)
    blocked = first(chain.BLOCKING, world, policy)
    epoch, drawn = _epoch(world, policy, blocked)
    held_first = finalizer_due(policy, drawn.scope if drawn is not None else None)
    if held_first is not None:
        return held_first
    verdict = decide_admission(world, policy, blocked)
    if drawn is not None or verdict.due:
        fields = {
            "admission": verdict.status(let_go=False),
            **(_scope_fields(world, policy, drawn) if drawn is not None else {}),
        }
        what = "a new epoch was drawn" if drawn is not None else "its guarantees were decided on"
        return Plan(
            statuses=write_status(policy, now, _waiting(world, policy, blocked, verdict, what), fields),
            enqueue=(Key(policy.INFO.kind, world.namespace, policy.name), *_bundles(world)),
        )
    return _report(world, policy, now, epoch, blocked, verdict)


def _epoch(world: World, policy: TenantCachePolicy, blocked: Decision | None) -> tuple[Epoch | None, Epoch | None]:
    """Return the epoch in force, and the epoch that this policy must write into its status, if any. A blocked policy
    stays in its scope, because its last valid spec does."""
    shown = policy.status.scope
    if blocked and shown and not _roll_is_due(world, policy):
        return None, None
    scope = scope_in_force(world, policy)
    if scope.kind is not ScopeKind.TENANT:
        epoch = current_epoch(world, policy)
        told = held(policy.status.scope, scope)
        if epoch and (told is None or told.epoch != epoch.value or _generation_due(policy)):
            return epoch, epoch
        return epoch, None
    previous = held(policy.status.scope, scope)
    if previous is None or _roll_is_due(world, policy):
        drawn = fresh_epoch(world, scope, Key(policy.INFO.kind, world.namespace, policy.name), previous)
        return None, drawn
    return current_epoch(world, policy), None


def _generation_due(policy: TenantCachePolicy) -> bool:
    acted_on = policy.status.cache_generation
    return acted_on is not None and acted_on != policy.spec.effective_cache_generation


def _roll_is_due(world: World, policy: TenantCachePolicy) -> bool:
    own = held(policy.status.scope, tenant_scope(policy))
    return _generation_due(policy) or (own is not None and is_lost(world, own.epoch))


def _scope_fields(world: World, policy: TenantCachePolicy, epoch: Epoch) -> dict[str, object]:
    return {
        "scope": epoch.to_status(),
        "cacheGeneration": policy.spec.effective_cache_generation,
        "formerScopes": _former(world, policy),
        "usage": None,
    }


def _former(world: World, policy: TenantCachePolicy) -> list[dict[str, object]] | None:
    return [former.to_kubernetes() for former in former_scopes(world, policy)] or None


def _report(
    world: World,
    policy: TenantCachePolicy,
    now: datetime,
    epoch: Epoch | None,
    blocked: Decision | None,
    verdict: AdmissionDecision,
) -> Plan:
    compiled = compile_policy(world, policy)
    fields: dict[str, object] = {
        "enforcedGeneration": policy.status.enforced_generation,
        "usage": _usage(world, policy, compiled.entry, now),
    }
    if not blocked:
        fields["formerScopes"] = _former(world, policy)
    stalled = blocked or first(chain.ISOLATING, world, policy)
    if blocked:
        enforcement = Enforcement(_last_enforced(world, policy), committed=True)
    elif compiled.entry is None or epoch is None:
        enforcement = Enforcement(
            false(ENFORCED, PolicyReason.WAITING_FOR_DOMAIN, "the domain's key and epochs are being drawn"),
            committed=False,
        )
    else:
        enforcement = policy_enforcement(world, policy, compiled.entry)
        fields["digest"] = compiled.entry.content_digest()[:16]
        if enforcement.finding.status == "True":
            fields["enforcedGeneration"] = policy.generation
    pending = None
    if enforcement.finding.status == "False":
        pending = Decision(enforcement.finding.reason, enforcement.finding.message)
    fields["admission"] = verdict.status(let_go=enforcement.committed)
    findings = (
        *kstatus(stalled, pending, Decision(enforcement.finding.reason, enforcement.finding.message)),
        enforcement.finding,
        *_declared(world, policy, blocked, verdict),
    )
    bundles = _bundles(world) if not blocked and not enforcement.committed else ()
    # Status must not claim enforcement of this generation any longer than true.
    claims = policy.status.is_true(ENFORCED) and policy.status.observed_generation == policy.generation
    can_wait = pending is not None and stalled is None and not claims
    statuses = write_status(policy, now, findings, fields, can_wait=can_wait)
    return Plan(statuses=statuses, enqueue=bundles, wake_after_s=LOOK_AGAIN_S if pending is not None else None)


def _usage(world: World, policy: TenantCachePolicy, entry: Entry | None, now: datetime) -> dict[str, object] | None:
    """Return the usage of the tenant's own scope; a group reports a shared one."""
    if entry is None or entry.scope.kind is not ScopeKind.TENANT:
        return None
    declared = {budget.name for budget in policy.spec.tiers}
    budgets = [budget for budget in entry.budgets if budget.tier in declared]
    models = [name for name, model in world.models.items() if selects(policy, model)]
    return usage_status(world, entry.keyspace, budgets, models, policy.status.usage, now)


def _waiting(
    world: World, policy: TenantCachePolicy, blocked: Decision | None, verdict: AdmissionDecision, what: str
) -> tuple[Finding, ...]:
    waiting = Decision(PolicyReason.NOT_COMMITTED, f"{what}; pods are being told")
    enforced = false(ENFORCED, waiting.reason, waiting.message)
    return (*kstatus(blocked, waiting, waiting), enforced, *_declared(world, policy, blocked, verdict))


def _declared(
    world: World, policy: TenantCachePolicy, blocked: Decision | None, verdict: AdmissionDecision
) -> tuple[Finding, ...]:
    return (
        _admitted(blocked, verdict),
        _within_budget(world, policy, blocked),
        *_tiers_admitted(world, policy),
        pools_resolved(world, policy, blocked),
        *erases(policy),
    )


def _last_enforced(world: World, policy: TenantCachePolicy) -> Finding:
    if any(holds(committed.bundle, policy) for committed in world.bundles.values()):
        return false(
            ENFORCED,
            PolicyReason.LAST_VALID_IN_FORCE,
            f"this spec is not in force; the one of generation {policy.status.enforced_generation or 0} still is",
        )
    return false(ENFORCED, PolicyReason.NEVER_ENFORCED, "no valid version of this policy was ever in force")


def _admitted(blocked: Decision | None, verdict: AdmissionDecision) -> Finding:
    if blocked:
        return false(ADMITTED, blocked.reason, blocked.message)
    return verdict.finding or true(ADMITTED, PolicyReason.ACCEPTED, "the policy is accepted")


def _within_budget(world: World, policy: TenantCachePolicy, blocked: Decision | None) -> Finding:
    if blocked:
        return false(ConditionType.WITHIN_BUDGET, blocked.reason, blocked.message)
    models = [model for model in world.models.values() if selects(policy, model)]
    return within_budget(world, policy.spec.tiers, models, "the policy sets no limit")


def _tiers_admitted(world: World, policy: TenantCachePolicy) -> tuple[Finding, ...]:
    scope = scope_in_force(world, policy)
    models = [model for model in world.models.values() if selects(policy, model)]
    levels = levels_of(world, policy, scope)
    return tiers_admitted(world, levels, because_of_policy(policy, scope), models)


def _bundles(world: World) -> tuple[Key, ...]:
    return tuple(Key(BUNDLE, world.namespace, model) for model in sorted(world.models))
