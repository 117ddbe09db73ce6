"""TenantCachePolicy: the tenant's scope and epoch, and the policy's enforcement."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from kvstrata.api.reasons import PolicyReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, Plan
from kvstrata.plan.budgets.admission import AdmissionDecision, admission_of
from kvstrata.plan.budgets.capacity import within_budget
from kvstrata.plan.budgets.classification import because_of_policy, levels_of, tiers_admitted
from kvstrata.plan.budgets.usage import usage_status
from kvstrata.plan.bundle.compile import PolicyInputs, compile_policy, gather, selects
from kvstrata.plan.bundle.enforcement import ENFORCED, Enforcement, holds, policy_enforcement, unenforced
from kvstrata.plan.conditions import Finding, false, kstatus, true, write_status
from kvstrata.plan.erasure.policy_deletion import (
    ends_of_predecessors,
    erases,
    finalizer_due,
    plan_departed,
    plan_departure,
)
from kvstrata.plan.keys.data_keys import is_lost
from kvstrata.plan.kinds.applicable import applicable
from kvstrata.plan.pools.readers import pools_resolved
from kvstrata.plan.rules import first
from kvstrata.plan.rules import policy as chain
from kvstrata.plan.scopes import Epoch, former_scopes, fresh_epoch, held, tenant_scope

ADMITTED = "Admitted"
LOOK_AGAIN_S = 30.0
"""How often a policy that is not enforced yet is planned again, even if no event asks for it."""


def plan_policy(world: World, name: str, now: datetime) -> Plan:
    """Return the plan for one policy.

    A missing or due epoch, and admission, are written to status first. Bundles are compiled from the API server's
    state, so no keyspace depends on an epoch that could be lost, and the next leader cannot give a guarantee away.
    """
    policy = world.policies.get(name)
    if policy is None:
        return plan_departed(world, name)
    plan = _plan_present(world, policy, now)
    return replace(plan, actions=(*plan.actions, *ends_of_predecessors(world, name)))


def _plan_present(world: World, policy: TenantCachePolicy, now: datetime) -> Plan:
    if policy.metadata.deleting:
        return plan_departure(world, policy, now)
    inputs = gather(world, policy)
    verdict = admission_of(world, policy, inputs.blocked)
    drawn = _drawn(world, policy, inputs)
    held_first = finalizer_due(policy, drawn.scope if drawn is not None else None)
    if held_first is not None:
        return held_first
    if drawn is None and not verdict.due:
        return _report(world, policy, now, inputs, verdict)
    what = "a new epoch was drawn" if drawn is not None else "its guarantees were decided on"
    waiting = Decision(PolicyReason.NOT_COMMITTED, f"{what}; pods have not acknowledged it yet")
    findings = (
        *kstatus(inputs.blocked, waiting, waiting),
        false(ENFORCED, waiting.reason, waiting.message),
        *_declared(world, policy, inputs, verdict),
    )
    fields: dict[str, object] = {"admission": verdict.status(let_go=False)}
    if drawn is not None:
        fields |= {
            "scope": drawn.to_status(),
            "cacheGeneration": policy.spec.effective_cache_generation,
            "formerScopes": _former(world, policy),
            "usage": None,
        }
    return Plan(
        statuses=write_status(policy, now, applicable(world, policy, findings), fields),
        enqueue=(Key(policy.INFO.kind, world.namespace, policy.name), *_bundles(world)),
    )


def _drawn(world: World, policy: TenantCachePolicy, inputs: PolicyInputs) -> Epoch | None:
    """Return the epoch that this policy must write into its status, None if it has the one in force. A blocked policy
    stays in its scope if its last valid spec may be in force there."""
    due = _roll_is_due(world, policy)
    stays = policy.status.enforced_generation is not None or _is_held(world, policy)
    if inputs.blocked and policy.status.scope and stays and not due:
        return None
    shown = held(policy.status.scope, inputs.scope)
    if inputs.scope.kind is ScopeKind.TENANT:
        own = Key(policy.INFO.kind, world.namespace, policy.name)
        return fresh_epoch(world, inputs.scope, own, shown) if shown is None or due else None
    epoch = inputs.epoch
    moved = epoch is not None and (shown is None or shown.epoch != epoch.value or _generation_due(policy))
    return epoch if moved else None


def _generation_due(policy: TenantCachePolicy) -> bool:
    acted_on = policy.status.cache_generation
    return acted_on is not None and acted_on != policy.spec.effective_cache_generation


def _roll_is_due(world: World, policy: TenantCachePolicy) -> bool:
    own = held(policy.status.scope, tenant_scope(policy))
    return _generation_due(policy) or (own is not None and is_lost(world, own.epoch))


def _former(world: World, policy: TenantCachePolicy) -> list[dict[str, object]] | None:
    return [former.to_kubernetes() for former in former_scopes(world, policy)] or None


def _report(
    world: World, policy: TenantCachePolicy, now: datetime, inputs: PolicyInputs, verdict: AdmissionDecision
) -> Plan:
    compiled = compile_policy(world, inputs)
    blocked = compiled.blocked
    fields: dict[str, object] = {
        "enforcedGeneration": policy.status.enforced_generation,
        "usage": _usage(world, policy, compiled.entry, now),
    }
    if not blocked:
        fields["formerScopes"] = _former(world, policy)
    stalled = blocked or first(chain.ISOLATING, world, policy)
    none_enforces = unenforced(world, [name for name, model in world.models.items() if selects(policy, model)])
    if blocked:
        enforcement = Enforcement(_last_enforced(world, policy), committed=True, coverage=none_enforces)
    elif compiled.entry is None:
        enforcement = Enforcement(
            false(ENFORCED, PolicyReason.WAITING_FOR_DOMAIN, "the domain's key and epochs are being drawn"),
            committed=False,
            coverage=none_enforces,
        )
    else:
        enforcement = policy_enforcement(world, policy, compiled.entry)
        fields["digest"] = compiled.entry.content_digest()[:16]
        if enforcement.finding.status == "True":
            fields["enforcedGeneration"] = policy.generation
    shown = Decision(enforcement.finding.reason, enforcement.finding.message)
    pending = shown if enforcement.finding.status == "False" else None
    fields |= {
        "admission": verdict.status(let_go=enforcement.committed),
        "enforcedBy": enforcement.coverage.shown,
    }
    findings = (
        *kstatus(stalled, pending or verdict.waiting, shown),
        enforcement.finding,
        *_declared(world, policy, inputs, verdict),
    )
    bundles = _bundles(world) if not blocked and not enforcement.committed else ()
    # Status must not claim enforcement of this generation any longer than true.
    claims = policy.status.is_true(ENFORCED) and policy.status.observed_generation == policy.generation
    can_wait = pending is not None and stalled is None and not claims
    statuses = write_status(policy, now, applicable(world, policy, findings), fields, can_wait=can_wait)
    return Plan(statuses=statuses, enqueue=bundles, wake_after_s=LOOK_AGAIN_S if pending is not None else None)


def _usage(world: World, policy: TenantCachePolicy, entry: Entry | None, now: datetime) -> dict[str, object] | None:
    """Return the usage of the tenant's own scope; a group reports a shared one."""
    if entry is None or entry.scope.kind is not ScopeKind.TENANT:
        return None
    declared = {budget.tier for budget in policy.spec.budgets}
    budgets = [budget for budget in entry.budgets if budget.tier in declared]
    models = [name for name, model in world.models.items() if selects(policy, model)]
    return usage_status(world, entry.keyspace, budgets, models, policy.status.usage, now)


def _declared(
    world: World, policy: TenantCachePolicy, inputs: PolicyInputs, verdict: AdmissionDecision
) -> tuple[Finding, ...]:
    models, blocked = [model for model in world.models.values() if selects(policy, model)], inputs.blocked
    admitted = verdict.finding or true(ADMITTED, PolicyReason.ACCEPTED, "the policy is accepted")
    levels = levels_of(world, policy, inputs.scope)
    return (
        false(ADMITTED, blocked.reason, blocked.message) if blocked else admitted,
        within_budget(world, policy.spec.budgets, models, blocked),
        *tiers_admitted(world, levels, because_of_policy(policy, inputs.scope), models),
        pools_resolved(world, policy, blocked),
        erases(policy),
    )


def _last_enforced(world: World, policy: TenantCachePolicy) -> Finding:
    if _is_held(world, policy):
        return false(
            ENFORCED,
            PolicyReason.LAST_VALID_IN_FORCE,
            f"this spec is not in force; the one of generation {policy.status.enforced_generation or 0} still is",
        )
    return false(ENFORCED, PolicyReason.NEVER_ENFORCED, "no valid version of this policy was ever in force")


def _is_held(world: World, policy: TenantCachePolicy) -> bool:
    return any(holds(committed.bundle, policy) for committed in world.bundles.values())


def _bundles(world: World) -> tuple[Key, ...]:
    return tuple(Key(BUNDLE, world.namespace, model) for model in sorted(world.models))
