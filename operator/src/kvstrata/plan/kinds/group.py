"""TenantGroup: the epoch that its members share, and its enforcement."""

from __future__ import annotations

from datetime import datetime

from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import GroupReason, SharedReason
from kvstrata.api.status import MAX_REACHED, ScopeStatus
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.api.tenantgroup import Sharing, TenantGroup
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, Plan, bundle_keys, key_of
from kvstrata.plan.budgets.admission import AdmissionDecision, admission_of, admitted_bytes
from kvstrata.plan.budgets.capacity import within_budget
from kvstrata.plan.budgets.classification import shared_levels, tiers_admitted
from kvstrata.plan.budgets.usage import usage_status
from kvstrata.plan.bundle.compile import as_admitted, compile_policy, enforced, gather, selects
from kvstrata.plan.bundle.enforcement import ENFORCED, Coverage, coverage, enforced_finding, is_committed, unenforced
from kvstrata.plan.conditions import Finding, false, kstatus, true, unknown, write_status
from kvstrata.plan.keys.data_keys import is_lost
from kvstrata.plan.redis.backend import with_stores
from kvstrata.plan.rules.policy import budget_problem, member_policies
from kvstrata.plan.scopes import fresh_epoch, generation_due, group_scope, held, keyspace_of


def plan_group(world: World, name: str, now: datetime) -> Plan:
    """Return the plan for one group; it draws an epoch if there is none or cacheGeneration changed."""
    group = world.groups.get(name)
    followers = _followers(world, name)
    if group is None or group.metadata.deleting:
        return Plan(enqueue=followers)
    previous = held(group.status.scope, group_scope(name))
    draws = previous is None or generation_due(group) or is_lost(world, previous.epoch)
    stalled = budget_problem(world, group.spec.budgets, "spec.budgets")
    verdict = admission_of(world, group, stalled)
    epoch = fresh_epoch(world, group_scope(name), previous) if previous is None or draws else previous
    scope = epoch.model_copy(update={"models": _reached(world, group, epoch)})
    if draws or scope != previous or verdict.due:
        what = "a new epoch was drawn" if draws else "its CachedModels or guarantees were recorded"
        waiting = Decision(SharedReason.NOT_COMMITTED, f"{what}; pods have not acknowledged it yet")
        fields: dict[str, object] = {"admission": verdict.status(let_go=False), "scope": with_stores(world, scope)}
        if draws:
            fields |= {"cacheGeneration": group.spec.cache_generation, "usage": None}
        judged = _findings(world, group, stalled, verdict, false(ENFORCED, *waiting))
        statuses = write_status(group, now, (*kstatus(stalled, waiting), *judged), fields)
        return Plan(statuses=statuses, enqueue=(key_of(group), *followers))
    enforcement, total = _enforced(world, group)
    pending = enforcement.failure
    fields = {
        "scope": with_stores(world, previous),
        "joined": len(_joined(world, group)),
        "enforcedBy": total.shown if total is not None else unenforced(world, world.models).shown,
        "usage": _usage(world, group, now),
        "admission": verdict.status(let_go=total is not None),
    }
    if enforcement.status == "True" and not stalled:
        fields["enforcedGeneration"] = group.generation
    findings = (
        *kstatus(stalled, pending or verdict.waiting, enforcement.cause),
        *_findings(world, group, stalled, verdict, enforcement),
    )
    claims = group.status.is_true(ENFORCED) and group.status.observed_generation == group.generation
    can_wait = pending is not None and stalled is None and not claims
    statuses = write_status(group, now, findings, fields, can_wait=can_wait)
    return Plan(statuses=statuses, enqueue=() if total is not None else followers)


def _reached(world: World, group: TenantGroup, epoch: ScopeStatus) -> tuple[str, ...] | None:
    """Return the models with pods that may ever have this epoch, None for all. Those of a member that left stay."""
    members = member_policies(world, group) if _shares_blocks(group) else ()
    listed = (policy.status.models for policy in members if policy.status.scope is not None)
    found = set(epoch.models or ()).union(*(world.models if models is None else models for models in listed))
    return tuple(sorted(found)) if epoch.models is not None and len(found) <= MAX_REACHED else None


def _shares_blocks(group: TenantGroup) -> bool:
    return group.spec.sharing is Sharing.FULL


def _enforced(world: World, group: TenantGroup) -> tuple[Finding, Coverage | None]:
    """Return the condition Enforced, and coverage, None while a bundle is out of date. With PoolsOnly, members are in
    scopes of their own: their entries hold the group's grants."""
    total, scope = Coverage(), group_scope(group.name)
    members = member_policies(world, group)
    joined = {policy.uid for policy in members}
    in_scope = joined if _shares_blocks(group) else set()
    settled = group.status.enforced_generation == group.generation
    for model, committed in sorted(world.bundles.items()):
        root, entries = committed.bundle.root, committed.bundle.entries
        inside = {entry.policy for entry in entries.values() if entry.scope == scope}
        in_force = all(_is_in_force(world, model, policy) for policy in members)
        if not committed.whole or inside - in_scope or not in_force:
            message = f"the bundle of CachedModel {model} is being rewritten"
            return false(ENFORCED, SharedReason.NOT_COMMITTED, message), None
        concerned = inside if _shares_blocks(group) else joined
        since = max((entry.since for entry in entries.values() if entry.policy in concerned), default=0)
        # An entry that the present generation removed leaves no `since`.
        total += coverage(world, model, max(since, root.rules_since) if settled else root.revision)
    if not joined:
        named = "no TenantCachePolicy of a member names this group"
        message = named if _shares_blocks(group) else "no member has a TenantCachePolicy"
        return unknown(ENFORCED, GroupReason.NO_MEMBERS, message), total
    return enforced_finding(total), total


def _findings(
    world: World, group: TenantGroup, stalled: Decision | None, verdict: AdmissionDecision, enforcement: Finding
) -> tuple[Finding | None, ...]:
    """Return the conditions besides Ready. Enforced applies while a member has a policy and a pod serves."""
    scope, models = group_scope(group.name), world.models.values()
    keyspace = keyspace_of(world.domain_key, group.status.scope)
    acts = bool(member_policies(world, group)) and any(map(world.serving_pods, world.models))
    return (
        verdict.finding,
        enforcement if acts else None,
        _members(world, group),
        within_budget(world, group.spec.budgets, models, stalled, shared_levels(world, scope), keyspace),
        tiers_admitted(world, scope, models) if _shares_blocks(group) else None,
    )


def _usage(world: World, group: TenantGroup, now: datetime) -> dict[str, object] | None:
    if not _shares_blocks(group):
        return None
    admitted, keyspace = admitted_bytes(world, group), keyspace_of(world.domain_key, group.status.scope)
    budgets = [as_admitted(admitted, enforced(budget)) for budget in group.spec.budgets]
    return usage_status(world, keyspace, budgets, world.models, group.status.usage, now)


def _joined(world: World, group: TenantGroup) -> frozenset[str]:
    return frozenset(policy.spec.tenant for policy in member_policies(world, group))


def _is_in_force(world: World, model: str, policy: TenantCachePolicy) -> bool:
    """Whether a bundle holds a member's compiled policy; a blocked policy reports that itself."""
    selected, inputs = world.models.get(model), gather(world, policy)
    if selected is None or inputs.blocked or not selects(policy, selected):
        return True
    entry = compile_policy(world, inputs)
    return entry is not None and is_committed(world, selected, entry)


def _members(world: World, group: TenantGroup) -> Finding:
    kind, joined = ConditionType.MEMBERS_RESOLVED, _joined(world, group)
    absent = sorted(set(group.spec.members) - joined)
    if not absent:
        return true(kind, GroupReason.ALL_MEMBERS_JOINED, f"{len(joined)} members have joined")
    named = ", ".join(absent[:5])
    message = f"no TenantCachePolicy names this group for {named}; they share nothing until one does"
    if not _shares_blocks(group):
        message = f"no TenantCachePolicy speaks for {named}; they read no pool until one does and lists it"
    return false(kind, GroupReason.MEMBERS_WITHOUT_POLICY, message)


def _followers(world: World, name: str) -> tuple[Key, ...]:
    members = (policy for policy in world.policies.values() if policy.spec.group_name == name)
    return (*map(key_of, members), *bundle_keys(world))
