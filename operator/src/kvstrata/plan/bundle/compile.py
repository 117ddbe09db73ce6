"""From policies to bundle entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvstrata.api.cachedmodel import CachedModel, ReuseMode
from kvstrata.api.cachedomain import AuditNames
from kvstrata.api.cachetier import Medium
from kvstrata.api.common import TierBudget
from kvstrata.api.tenantcachepolicy import Isolation, TenantCachePolicy
from kvstrata.contract.policy.bundle import EnforcedBudget, Entry, Rules
from kvstrata.contract.policy.data_key import BundledKey
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.model.guarantees import Holder
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision
from kvstrata.plan.budgets.admission import admitted_inputs, admitted_part, is_undecided, key_of
from kvstrata.plan.budgets.classification import denied_tiers
from kvstrata.plan.bundle.paused import pauses
from kvstrata.plan.isolation import is_fenced
from kvstrata.plan.keys.data_keys import as_held, encrypts, keys_of
from kvstrata.plan.pools.readers import may_read, of_model, reading_inputs
from kvstrata.plan.rules import first
from kvstrata.plan.rules import model as model_chain
from kvstrata.plan.rules import policy as chain
from kvstrata.plan.scopes import current_epoch, epoch_of, scope_in_force


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of compiling a policy: its entry, None while its epoch is not drawn, or the problem that keeps the last
    one."""

    entry: Entry | None = None
    blocked: Decision | None = None


def compile_policy(world: World, policy: TenantCachePolicy) -> Compiled:
    """Return the bundle entry of a policy, without its `since`; memoized by `_inputs`."""
    return world.memo.get(TenantCachePolicy, policy.name, _inputs(world, policy), lambda: _compile(world, policy))


def _inputs(world: World, policy: TenantCachePolicy) -> tuple[Any, ...]:
    """Return all that `_compile` reads, as narrowly as possible."""
    spec = policy.spec
    budgets = spec.tiers
    shared: tuple[Any, ...] = ()
    if spec.isolation is Isolation.GROUP:
        group = world.groups.get(spec.group_name or "")
        if group is not None:
            shared = (group.spec, group.status.scope, group.status.admission, group.metadata.deleting)
            budgets += group.spec.tiers
    elif spec.isolation is Isolation.PUBLIC:
        told = (world.domain.status.scope, world.domain.status.admission) if world.domain else ()
        shared = (told, world.domain_spec.public_tiers)
        budgets += world.domain_spec.public_tiers
    tiers = tuple(tier.spec if (tier := world.tiers.get(budget.name)) else None for budget in budgets)
    rivals = world.policies_of_tenant.get(spec.tenant, ())
    return (
        policy,
        world.domain_key,
        _keys_now(world, policy),
        shared,
        tiers,
        _caps(world),
        denied_tiers(world, policy, scope_in_force(world, policy)),
        admitted_inputs(world, _holder(world, policy, scope_in_force(world, policy))),
        # A refusal message lists the existing tiers.
        tuple(sorted(world.tiers)) if None in tiers else (),
        tuple(world.policies[name] for name in rivals) if len(rivals) > 1 else (),
        tuple(name in world.models for name in spec.models.names or ()) if spec.models else (),
        pauses(world, current_epoch(world, policy)),
        reading_inputs(world, policy) if spec.pools else (),
    )


def _keys_now(world: World, policy: TenantCachePolicy) -> tuple[BundledKey, ...]:
    epoch = current_epoch(world, policy) if encrypts(world) else None
    return keys_of(world, epoch) if epoch is not None else ()


def _compile(world: World, policy: TenantCachePolicy) -> Compiled:
    blocked = first(chain.BLOCKING, world, policy)
    if blocked:
        return Compiled(blocked=blocked)
    epoch = current_epoch(world, policy)
    if epoch is None or world.domain_key is None or is_undecided(_holder(world, policy, epoch.scope)):
        return Compiled()
    return Compiled(
        Entry(
            tenant=policy.spec.tenant,
            keyspace=epoch.keyspace(world.domain_key),
            scope=epoch.scope,
            policy=policy.uid,
            suspended=policy.spec.is_suspended,
            budgets=budgets_of(world, policy, epoch.scope),
            keys=keys_of(world, epoch),
            pools=may_read(world, policy.spec.tenant, policy.spec.pool_names),
        ).paused(pauses(world, epoch))
    )


def entry_in(world: World, model: CachedModel, entry: Entry) -> Entry:
    """Return a policy's entry for the bundle of `model`: with its pools, and with data keys if its pods encrypt."""
    return of_model(world, model, as_held(world, model, entry))


def still_allowed(world: World, policy: TenantCachePolicy, kept: Entry) -> Entry:
    """Return the last valid entry of a policy with an invalid spec, limited to what is still allowed.

    An invalid spec must not protect its tenant from invalidations, retention limits, or a group, pool or tier that no
    longer admits it. It opens no closed tier either, because its new classification may be the invalid part.
    """
    holder = _holder(world, policy, kept.scope)
    budgets = admitted_part(world, key_of(holder), kept.budgets) if holder is not None else kept.budgets
    budgets = _shortened(world, budgets)
    kept = replace(kept, budgets=_without(budgets, denied_tiers(world, policy, kept.scope)))
    epoch = epoch_of(world, policy, kept.scope)
    pools = may_read(world, kept.tenant, kept.pools)
    if epoch is None or world.domain_key is None:
        return replace(kept, suspended=True, resumes=False, keys=(), pools=pools)
    kept = kept.paused(pauses(world, epoch))
    return replace(kept, keyspace=epoch.keyspace(world.domain_key), keys=keys_of(world, epoch), pools=pools)


def enforced(budget: TierBudget) -> EnforcedBudget:
    """Return a budget as pods enforce it, before admission, retention limits and classifications reduce it."""
    return EnforcedBudget(
        tier=budget.name,
        limit_bytes=budget.limit_bytes,
        guaranteed_bytes=budget.guaranteed_bytes or None,
        retention_s=budget.retention_s,
    )


def budgets_of(world: World, policy: TenantCachePolicy, scope: Scope) -> tuple[EnforcedBudget, ...]:
    match scope.kind:
        case ScopeKind.GROUP:
            declared: tuple[TierBudget, ...] = world.groups[scope.name].spec.tiers
        case ScopeKind.PUBLIC:
            declared = world.domain_spec.public_tiers
        case _:
            declared = policy.spec.tiers if policy.spec.isolation is Isolation.ISOLATED else ()
    budgets = tuple(map(enforced, declared))
    holder = _holder(world, policy, scope)
    admitted = admitted_part(world, key_of(holder), budgets) if holder else budgets
    return _without(_shortened(world, admitted), denied_tiers(world, policy, scope))


def _holder(world: World, policy: TenantCachePolicy, scope: Scope) -> Holder | None:
    match scope.kind:
        case ScopeKind.GROUP:
            return world.groups.get(scope.name)
        case ScopeKind.PUBLIC:
            return world.domain
        case _:
            return policy


def _without(budgets: tuple[EnforcedBudget, ...], denied: tuple[str, ...]) -> tuple[EnforcedBudget, ...]:
    if not denied:
        return budgets
    by_tier = {budget.tier: budget for budget in budgets}
    for name in denied:
        old = by_tier.get(name)
        by_tier[name] = EnforcedBudget.denying(name, old.retention_s if old is not None else None)
    return tuple(budget for _, budget in sorted(by_tier.items()))


def _caps(world: World) -> tuple[tuple[str, int], ...]:
    """Return the retention limits of CPU tiers; for Redis tiers pods have them as parameters."""
    return tuple(
        (name, tier.spec.max_retention_s)
        for name, tier in sorted(world.tiers.items())
        if tier.spec.medium is Medium.CPU and tier.spec.max_retention_s is not None
    )


def rules_of(world: World, model: CachedModel) -> Rules:
    """Return the rules for all tenants of a model. A model with an invalid spec keeps the reuse in force, except that
    Off always applies. A model fenced after a failed isolation probe has none."""
    domain = world.domain_spec
    committed = world.bundles.get(model.name)
    reuse = str(model.spec.reuse_mode)
    if reuse != ReuseMode.OFF and first(model_chain.RULES, world, model):
        reuse = committed.bundle.root.rules.reuse if committed else str(ReuseMode.OFF)
    if is_fenced(model):
        reuse = str(ReuseMode.OFF)
    return Rules(
        stale_after_s=domain.stale_after_s,
        drain_timeout_s=domain.drain_timeout_s,
        on_stale=str(domain.effective_on_stale),
        unknown_tenants=str(domain.effective_unknown_tenants),
        reuse=reuse,
        audit_tenants=domain.effective_audit_names is AuditNames.TENANTS,
    )


def selects(policy: TenantCachePolicy, model: CachedModel) -> bool:
    return policy.spec.covers(model.name, model.metadata.labels)


def _shortened(world: World, budgets: tuple[EnforcedBudget, ...]) -> tuple[EnforcedBudget, ...]:
    capped = {name: EnforcedBudget(tier=name, retention_s=longest_s) for name, longest_s in _caps(world)}
    named = {budget.tier: replace(budget, retention_s=_shorter(budget, world)) for budget in budgets}
    return tuple(budget for _, budget in sorted((capped | named).items()))


def _shorter(budget: EnforcedBudget, world: World) -> int | None:
    tier = world.tiers.get(budget.tier)
    longest_s = tier.spec.max_retention_s if tier else None
    bounds = [bound for bound in (budget.retention_s, longest_s) if bound is not None]
    return min(bounds) if bounds else None
