"""Tiers that a scope's data is kept off, because of its classification.

A tenant without a classification counts as the strictest. Blocks of a shared scope do not show their tenant, so a tier
must admit the classification of every tenant in it. A tenant that joins therefore opens no tier, not even one for
strict data alone. The engine's own memory is not restricted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.common import Classification
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import SharedReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.model.world import World
from kvstrata.plan.conditions import Finding, false, listed, true
from kvstrata.plan.scopes import is_member, scope_in_force


def restricted_tiers(world: World) -> tuple[CacheTier, ...]:
    """Return the tiers that admit some classifications only and can be closed to others, by name."""
    return tuple(tier for _, tier in sorted(world.tiers.items()) if tier.spec.allowed_classifications is not None)


def levels_of(world: World, policy: TenantCachePolicy, scope: Scope) -> tuple[Classification, ...]:
    """Return the classifications in `scope`, which includes the policy's tenant, strictest first."""
    shared = () if scope.kind is ScopeKind.TENANT else shared_levels(world, scope)
    return _strictest_first({policy.spec.effective_classification, *shared})


def shared_levels(world: World, scope: Scope) -> tuple[Classification, ...]:
    """Return the classifications of a shared scope's tenants, strictest first."""
    return _strictest_first(_shared(world).get(scope, {}))


def shared_classifications(world: World) -> tuple[Any, ...]:
    """Return all that `denied_tiers` reads of other policies, for any policy."""
    if not restricted_tiers(world):
        return ()
    return tuple(sorted((str(scope), _strictest_first(found)) for scope, found in _shared(world).items()))


def denied_tiers(world: World, policy: TenantCachePolicy, scope: Scope) -> tuple[str, ...]:
    tiers = restricted_tiers(world)
    levels = levels_of(world, policy, scope) if tiers else ()
    return tuple(tier.name for tier in tiers if refused_level(tier, levels) is not None)


def refused_level(tier: CacheTier, levels: Iterable[Classification]) -> Classification | None:
    """Return the first of `levels` that a tier does not admit, None if it admits all."""
    return next((level for level in levels if not tier.spec.admits(level)), None)


def affected_sharers(world: World, *policies: TenantCachePolicy) -> frozenset[str]:
    """Return the policies in shared scopes where a policy's change added or removed a classification. `policies` are
    its old and new version."""
    if not restricted_tiers(world):
        return frozenset()
    shared = _shared(world)
    touched = set()
    for policy in policies:
        for scope in shared_scopes(world, policy):
            now = shared.get(scope, {}).get(policy.spec.effective_classification)
            if now is None or len(now) == 1:
                touched.add(scope)
    if not touched:
        return frozenset()
    return frozenset(
        name for name, policy in world.policies.items() if not touched.isdisjoint(shared_scopes(world, policy))
    )


def tiers_admitted(
    world: World, scope: Scope, models: Iterable[CachedModel], policy: TenantCachePolicy | None = None
) -> Finding | None:
    """Return whether all tiers of `models` admit the classifications in `scope`, for its own status or that of a
    `policy` in it. None if no tier is restricted or there are no classifications."""
    restricted = restricted_tiers(world)
    levels = shared_levels(world, scope) if policy is None else levels_of(world, policy, scope)
    if not restricted or not levels:
        return None
    used = {name for model in models for name in model.tier_names}
    left_out = [
        (tier.name, refused)
        for tier in restricted
        if tier.name in used and (refused := refused_level(tier, levels)) is not None
    ]
    kind = ConditionType.TIERS_ADMITTED
    if not left_out:
        return true(kind, SharedReason.TIERS_ADMITTED, f"every tier of the models takes data of {levels[0]}")
    names, level = listed(name for name, _ in left_out), left_out[0][1]
    because = _because(world, scope, level) if policy is None else _because_to(policy, scope, level)
    message = f"pods keep this data off CacheTier {names}, because it is of classification {level}: {because}"
    return false(kind, SharedReason.CLASSIFICATION_NOT_ALLOWED, message)


def _because(world: World, scope: Scope, level: Classification) -> str:
    first = world.policies[_shared(world)[scope][level][0]]
    unsaid = "" if first.spec.classification else ", which sets none"
    return f"that of TenantCachePolicy {first.name}{unsaid}"


def _because_to(policy: TenantCachePolicy, scope: Scope, level: Classification) -> str:
    if level == policy.spec.effective_classification:
        unsaid = policy.spec.classification is None
        return "data counts as such while spec.classification is absent" if unsaid else "spec.classification"
    where = f"TenantGroup {scope.name}" if scope.kind is ScopeKind.GROUP else "the CacheDomain"
    return f"that of another tenant that shares blocks with this one; the status of {where} names it"


def _strictest_first(levels: Iterable[Classification]) -> tuple[Classification, ...]:
    return tuple(sorted(levels, key=lambda level: -level.level))


def _shared(world: World) -> Mapping[Scope, Mapping[Classification, Sequence[str]]]:
    """Return the policies in each shared scope, by classification."""

    def find() -> Mapping[Scope, Mapping[Classification, Sequence[str]]]:
        found: dict[Scope, dict[Classification, list[str]]] = {}
        for name, policy in sorted(world.policies.items()):
            for scope in shared_scopes(world, policy) if not policy.metadata.deleting else ():
                found.setdefault(scope, {}).setdefault(policy.spec.effective_classification, []).append(name)
        return found

    # Each plan has an entropy of its own, so this is found once for all policies of a plan.
    return world.memo.get(Classification, world.namespace, (world.entropy,), find)


def shared_scopes(world: World, policy: TenantCachePolicy) -> set[Scope]:
    """Return the shared scopes of a policy: by its spec, and by its status, because pods use the previous spec while a
    new one is invalid."""
    scopes, reported = {scope_in_force(world, policy)}, policy.status.scope
    if reported is not None and (reported.kind != ScopeKind.GROUP or is_member(world, policy, reported.name)):
        scopes.add(Scope(reported.kind, reported.name))
    return {scope for scope in scopes if scope.kind is not ScopeKind.TENANT}
