"""TenantGroup: the epoch that its members share, and its enforcement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from kvstrata.api.reasons import GroupReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.api.tenantgroup import Sharing, TenantGroup
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.keyspace import derive_keyspace
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, Plan
from kvstrata.plan.budgets.admission import admission_of, admitted_bytes
from kvstrata.plan.budgets.capacity import within_budget
from kvstrata.plan.budgets.classification import because_of, shared_levels, tiers_admitted
from kvstrata.plan.budgets.usage import usage_status
from kvstrata.plan.bundle.compile import as_admitted, compile_policy, enforced, entry_in, gather, selects
from kvstrata.plan.bundle.enforcement import (
    ENFORCED,
    Coverage,
    coverage,
    enforced_finding,
    needed_revision,
    unenforced,
)
from kvstrata.plan.conditions import Finding, false, kstatus, true, unknown, write_status
from kvstrata.plan.keys.data_keys import is_lost
from kvstrata.plan.kinds.applicable import applicable
from kvstrata.plan.rules.policy import budget_problem, member_policies
from kvstrata.plan.scopes import fresh_epoch, group_scope, held

MEMBERS_RESOLVED = "MembersResolved"


def plan_group(world: World, name: str, now: datetime) -> Plan:
    """Return the plan for one group; it draws an epoch if there is none or cacheGeneration changed."""
    group = world.groups.get(name)
    followers = _followers(world, name)
    if group is None or group.metadata.deleting:
        return Plan(enqueue=followers)
    scope = group_scope(name)
    previous = held(group.status.scope, scope)
    due = (
        group.status.cache_generation is not None
        and group.status.cache_generation != group.spec.effective_cache_generation
    )
    stalled = budget_problem(world, group.spec.budgets, "spec.budgets")
    due = due or (previous is not None and is_lost(world, previous.epoch))
    verdict = admission_of(world, group, stalled)
    if previous is None or due or verdict.due:
        of_epoch: dict[str, object] = {"admission": verdict.status(let_go=False)}
        what = "its guarantees were decided on"
        if previous is None or due:
            epoch = fresh_epoch(world, scope, Key(group.INFO.kind, world.namespace, name), previous)
            generation = group.spec.effective_cache_generation
            of_epoch |= {"scope": epoch.to_status(), "cacheGeneration": generation, "usage": None}
            what = "a new epoch was drawn"
        waiting = Decision(GroupReason.NOT_COMMITTED, f"{what}; pods have not acknowledged it yet")
        enforced = false(ENFORCED, waiting.reason, waiting.message)
        drawn = (
            *kstatus(stalled, waiting, waiting),
            *verdict.findings,
            enforced,
            _members(world, group),
            *_of_tiers(world, group, stalled),
        )
        return Plan(
            statuses=write_status(group, now, applicable(world, group, drawn), of_epoch),
            enqueue=(Key(group.INFO.kind, world.namespace, name), *followers),
        )
    enforced, total = _enforced(world, group)
    pending = Decision(enforced.reason, enforced.message) if enforced.status == "False" else None
    ready = Decision(enforced.reason, enforced.message)
    findings = (
        *kstatus(stalled, pending or verdict.waiting, ready),
        *verdict.findings,
        enforced,
        _members(world, group),
        *_of_tiers(world, group, stalled),
    )
    fields: dict[str, object] = {
        "joined": len(_joined(world, group)),
        "enforcedBy": total.shown if total is not None else unenforced(world, world.models).shown,
        "usage": _usage(world, group, now),
        "admission": verdict.status(let_go=total is not None),
    }
    if enforced.status == "True" and not stalled:
        fields["enforcedGeneration"] = group.generation
    claims = group.status.is_true(ENFORCED) and group.status.observed_generation == group.generation
    can_wait = pending is not None and stalled is None and not claims
    return Plan(
        statuses=write_status(group, now, applicable(world, group, findings), fields, can_wait=can_wait),
        enqueue=() if total is not None else followers,
    )


def _shares_blocks(group: TenantGroup) -> bool:
    return group.spec.effective_sharing is Sharing.FULL


def _enforced(world: World, group: TenantGroup) -> tuple[Finding, Coverage | None]:
    """Return the condition Enforced, and coverage, None while a bundle is out of date. With PoolsOnly, members are in
    scopes of their own: their entries hold the group's grants."""
    scope = group_scope(group.name)
    total = Coverage()
    members = member_policies(world, group)
    joined = {policy.uid for policy in members}
    in_scope = joined if _shares_blocks(group) else set()
    settled = group.status.enforced_generation == group.generation
    for model, committed in sorted(world.bundles.items()):
        root, entries = committed.bundle.root, committed.bundle.entries
        inside = {entry.policy for entry in entries.values() if entry.scope == scope}
        if (
            not committed.whole
            or inside - in_scope
            or not all(_is_committed(world, model, policy, entries) for policy in members)
        ):
            return false(
                ENFORCED, GroupReason.NOT_COMMITTED, f"the bundle of CachedModel {model} is being rewritten"
            ), None
        concerned = inside if _shares_blocks(group) else joined
        since = max((entry.since for entry in entries.values() if entry.policy in concerned), default=0)
        total += coverage(world, model, needed_revision(root, since, settled=settled))
    if not joined:
        return unknown(ENFORCED, GroupReason.NO_MEMBERS, _no_members(group)), total
    return enforced_finding(total), total


def _of_tiers(world: World, group: TenantGroup, stalled: Decision | None) -> tuple[Finding, ...]:
    scope, models = group_scope(group.name), world.models.values()
    levels = shared_levels(world, scope)
    budgets = within_budget(world, group.spec.budgets, models, stalled, levels)
    if not _shares_blocks(group):
        return (budgets,)
    return (budgets, *tiers_admitted(world, levels, because_of(world, scope), models))


def _no_members(group: TenantGroup) -> str:
    named = "no TenantCachePolicy of a member names this group"
    return named if _shares_blocks(group) else "no member has a TenantCachePolicy"


def _usage(world: World, group: TenantGroup, now: datetime) -> dict[str, object] | None:
    if not _shares_blocks(group):
        return None
    scope, reported = group_scope(group.name), group.status.scope
    keyspace = derive_keyspace(world.domain_key, scope, reported.epoch) if reported and world.domain_key else None
    admitted = admitted_bytes(world, group)
    budgets = [as_admitted(admitted, enforced(budget)) for budget in group.spec.budgets]
    return usage_status(world, keyspace, budgets, world.models, group.status.usage, now)


def _joined(world: World, group: TenantGroup) -> frozenset[str]:
    return frozenset(policy.spec.tenant for policy in member_policies(world, group))


def _is_committed(world: World, model: str, policy: TenantCachePolicy, entries: Mapping[str, Entry]) -> bool:
    """Whether a bundle holds a member's compiled policy; a blocked policy reports that itself."""
    selected = world.models.get(model)
    compiled = compile_policy(world, gather(world, policy))
    if selected is None or compiled.blocked or not selects(policy, selected):
        return True
    held_entry = entries.get(policy.spec.tenant)
    if held_entry is None or compiled.entry is None:
        return False
    return replace(held_entry, since=0) == entry_in(world, selected, compiled.entry)


def _members(world: World, group: TenantGroup) -> Finding:
    joined = _joined(world, group)
    absent = sorted(set(group.spec.members) - joined)
    if absent:
        named = ", ".join(absent[:5])
        sentence = f"no TenantCachePolicy names this group for {named}; they share nothing until one does"
        if not _shares_blocks(group):
            sentence = f"no TenantCachePolicy speaks for {named}; they read no pool until one does and lists it"
        return false(MEMBERS_RESOLVED, GroupReason.MEMBERS_WITHOUT_POLICY, sentence)
    return true(MEMBERS_RESOLVED, GroupReason.ALL_MEMBERS_JOINED, f"{len(joined)} members have joined")


def _followers(world: World, name: str) -> tuple[Key, ...]:
    policies = tuple(
        Key("TenantCachePolicy", world.namespace, policy.name)
        for policy in world.policies.values()
        if policy.spec.group_name == name
    )
    return (*policies, *(Key(BUNDLE, world.namespace, model) for model in sorted(world.models)))
