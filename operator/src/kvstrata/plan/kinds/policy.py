"""TenantCachePolicy: the tenant's scope and epoch, and the policy's enforcement."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import PolicyReason, SharedReason
from kvstrata.api.status import MAX_REACHED, ScopeStatus
from kvstrata.api.tenantcachepolicy import DeletionPolicy, TenantCachePolicy
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, Plan, bundle_keys, key_of
from kvstrata.plan.budgets.admission import AdmissionDecision, admission_of
from kvstrata.plan.budgets.capacity import within_budget
from kvstrata.plan.budgets.classification import tiers_admitted
from kvstrata.plan.budgets.usage import usage_status
from kvstrata.plan.bundle.compile import PolicyInputs, compile_policy, gather, held_entry, selects
from kvstrata.plan.bundle.enforcement import ENFORCED, Enforcement, policy_enforcement, unenforced
from kvstrata.plan.conditions import Finding, false, kstatus, true, write_status
from kvstrata.plan.erasure import policy_deletion
from kvstrata.plan.keys.data_keys import is_lost
from kvstrata.plan.pools.readers import pools_resolved
from kvstrata.plan.redis.backend import with_stores
from kvstrata.plan.rules import first
from kvstrata.plan.rules import policy as chain
from kvstrata.plan.scopes import former_scopes, fresh_epoch, generation_due, held, tenant_scope

LOOK_AGAIN_S = 30.0
"""How often a policy that is not enforced yet is planned again, even if no event asks for it."""


def plan_policy(world: World, name: str, now: datetime) -> Plan:
    """Return the plan for one policy.

    A missing or due epoch, and admission, are written to status first. Bundles are compiled from the API server's
    state, so no keyspace depends on an epoch that could be lost, and the next leader cannot give a guarantee away.
    """
    policy = world.policies.get(name)
    if policy is None:
        return policy_deletion.plan_departed(world, name)
    plan = _plan_present(world, policy, now)
    return replace(plan, actions=(*plan.actions, *policy_deletion.ends_of_predecessors(world, name)))


def _plan_present(world: World, policy: TenantCachePolicy, now: datetime) -> Plan:
    if policy.metadata.deleting:
        return policy_deletion.plan_departure(world, policy, now)
    inputs = gather(world, policy)
    verdict = admission_of(world, policy, inputs.blocked)
    drawn = _drawn(world, policy, inputs)
    held_first = policy_deletion.finalizer_due(policy, Scope(drawn.kind, drawn.name) if drawn is not None else None)
    if held_first is not None:
        return held_first
    models = policy.status.models if inputs.blocked and drawn is None else _reached(world, policy)
    if drawn is None and models == policy.status.models and not verdict.due:
        return _report(world, policy, now, inputs, verdict)
    what = "a new epoch was drawn" if drawn is not None else "its CachedModels or guarantees were recorded"
    waiting = Decision(SharedReason.NOT_COMMITTED, f"{what}; pods have not acknowledged it yet")
    findings = _findings(world, policy, inputs, verdict, None, false(ENFORCED, *waiting))
    fields: dict[str, object] = {"admission": verdict.status(let_go=False), "models": list(models) if models else None}
    if drawn is not None:
        fields |= {
            "scope": with_stores(world, drawn),
            "cacheGeneration": policy.spec.cache_generation,
            "formerScopes": _former(world, policy),
            "usage": None,
        }
    return Plan(
        statuses=write_status(policy, now, (*kstatus(inputs.blocked, waiting), *findings), fields),
        enqueue=(key_of(policy), *bundle_keys(world)),
    )


def _drawn(world: World, policy: TenantCachePolicy, inputs: PolicyInputs) -> ScopeStatus | None:
    """Return the epoch that this policy must write into its status, None if it has the one in force. A blocked policy
    stays in its scope if its last valid spec may be in force there."""
    own = held(policy.status.scope, tenant_scope(policy))
    due = generation_due(policy) or (own is not None and is_lost(world, own.epoch))
    stays = policy.status.enforced_generation is not None or bool(_holding(world, policy))
    if inputs.blocked and policy.status.scope and stays and not due:
        return None
    shown = held(policy.status.scope, inputs.scope)
    if inputs.scope.kind is ScopeKind.TENANT:
        return fresh_epoch(world, inputs.scope, shown) if shown is None or due else None
    epoch = inputs.epoch
    if epoch is None or not (shown is None or shown.epoch != epoch.epoch or generation_due(policy)):
        return None
    return epoch.model_copy(update={"models": None})  # the group's status has them


def _reached(world: World, policy: TenantCachePolicy) -> tuple[str, ...] | None:
    """Return the models with pods that may ever have the policy's entry, None for all: recorded before any has it."""
    chosen, status = policy.spec.models, policy.status
    if chosen is None or (status.scope is not None and status.models is None):
        return None
    selected = (model.name for model in _selected(world, policy))
    found = {*(status.models or ()), *(chosen.names or ()), *selected, *_holding(world, policy)}
    return tuple(sorted(found)) if 0 < len(found) <= MAX_REACHED else None


def _former(world: World, policy: TenantCachePolicy) -> list[dict[str, object]] | None:
    return [former.to_kubernetes() for former in former_scopes(world, policy)] or None


def _report(
    world: World, policy: TenantCachePolicy, now: datetime, inputs: PolicyInputs, verdict: AdmissionDecision
) -> Plan:
    entry, blocked = compile_policy(world, inputs), inputs.blocked
    none_enforces = unenforced(world, [model.name for model in _selected(world, policy)])
    if blocked:
        enforcement = Enforcement(_last_enforced(world, policy), committed=True, coverage=none_enforces)
    elif entry is None:
        drawing = false(ENFORCED, SharedReason.WAITING_FOR_DOMAIN, world.domain_awaited)
        enforcement = Enforcement(drawing, committed=False, coverage=none_enforces)
    else:
        enforcement = policy_enforcement(world, policy, entry)
    is_enforced = enforcement.finding.status == "True"
    fields: dict[str, object] = {
        "scope": with_stores(world, policy.status.scope),
        "enforcedGeneration": policy.generation if is_enforced else policy.status.enforced_generation,
        "usage": _usage(world, policy, entry, now),
        "admission": verdict.status(let_go=enforcement.committed),
        "enforcedBy": enforcement.coverage.shown,
    }
    if not blocked:
        fields["formerScopes"] = _former(world, policy)
    if entry is not None:
        fields["digest"] = entry.content_digest()[:16]
    stalled, pending = blocked or first(chain.ISOLATING, world, policy), enforcement.finding.failure
    findings = (
        *kstatus(stalled, pending or verdict.waiting, enforcement.finding.cause),
        *_findings(world, policy, inputs, verdict, entry, enforcement.finding),
    )
    # Status must not claim enforcement of this generation any longer than true.
    claims = policy.status.is_true(ENFORCED) and policy.status.observed_generation == policy.generation
    can_wait = pending is not None and stalled is None and not claims
    return Plan(
        statuses=write_status(policy, now, findings, fields, can_wait=can_wait),
        enqueue=() if enforcement.committed else bundle_keys(world),
        wake_after_s=LOOK_AGAIN_S if pending is not None else None,
    )


def _usage(world: World, policy: TenantCachePolicy, entry: Entry | None, now: datetime) -> dict[str, object] | None:
    """Return the usage of the tenant's own scope; a group reports a shared one."""
    if entry is None or entry.scope.kind is not ScopeKind.TENANT:
        return None
    declared = {budget.tier for budget in policy.spec.budgets}
    budgets = [budget for budget in entry.budgets if budget.tier in declared]
    models = [model.name for model in _selected(world, policy)]
    return usage_status(world, entry.keyspace, budgets, models, policy.status.usage, now)


def _findings(
    world: World,
    policy: TenantCachePolicy,
    inputs: PolicyInputs,
    verdict: AdmissionDecision,
    entry: Entry | None,
    enforced: Finding,
) -> tuple[Finding | None, ...]:
    """Return the conditions besides Ready. Enforced applies while a pod has, or has to have, an entry of the policy; a
    wrong spec leaves the last valid one in force."""
    own = entry.keyspace if entry is not None and entry.scope.kind is ScopeKind.TENANT else None
    models, blocked = _selected(world, policy), inputs.blocked
    admitted = verdict.finding or true(ConditionType.ADMITTED, PolicyReason.ACCEPTED, "the policy is accepted")
    acting = {*(model.name for model in models), *_holding(world, policy)}
    return (
        enforced if any(map(world.serving_pods, acting)) else None,
        false(ConditionType.ADMITTED, *blocked) if blocked else admitted,
        within_budget(world, policy.spec.budgets, models, blocked, keyspace=own),
        tiers_admitted(world, inputs.scope, models, policy),
        pools_resolved(world, policy, blocked),
        policy_deletion.erases(policy) if policy.spec.deletion_policy is DeletionPolicy.ERASE else None,
    )


def _last_enforced(world: World, policy: TenantCachePolicy) -> Finding:
    if not _holding(world, policy):
        return false(ENFORCED, PolicyReason.NEVER_ENFORCED, "no valid version of this policy was ever in force")
    generation = policy.status.enforced_generation or 0
    message = f"this spec is not in force; the one of generation {generation} still is"
    return false(ENFORCED, PolicyReason.LAST_VALID_IN_FORCE, message)


def _selected(world: World, policy: TenantCachePolicy) -> list[CachedModel]:
    return [model for model in world.models.values() if selects(policy, model)]


def _holding(world: World, policy: TenantCachePolicy) -> list[str]:
    """Return the models with an entry of the policy in their bundle."""
    return [name for name, one in world.bundles.items() if held_entry(one.bundle, policy) is not None]
