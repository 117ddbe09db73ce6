"""Tiers that a scope's data is kept off, because of its classification.

A tenant without a classification counts as the strictest. Blocks of a shared scope do not show their tenant, so a tier
must admit the classification of every tenant in it. A tenant that joins therefore opens no tier, not even one for
strict data alone. The engine's own memory is not restricted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.common import Classification
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import PolicyReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.model.world import World
from kvstrata.plan.conditions import Finding, false, true
from kvstrata.plan.scopes import is_member, scope_in_force

NAMED = 3


class Snapshot:
    """A world that equals only itself, to compute results of all policies once per plan."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self._world is other._world

    __hash__ = None  # type: ignore[assignment]


def restricted_tiers(world: World) -> tuple[CacheTier, ...]:
    """Return the tiers that admit some classifications only and can be closed to others, by name."""
    return tuple(tier for _, tier in sorted(world.tiers.items()) if _restricts(tier))


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
        for scope in _shared_scopes(world, policy):
            now = shared.get(scope, {}).get(policy.spec.effective_classification)
            if now is None or len(now) == 1:
                touched.add(scope)
    if not touched:
        return frozenset()
    return frozenset(
        name for name, policy in world.policies.items() if not touched.isdisjoint(_shared_scopes(world, policy))
    )


def tiers_admitted(
    world: World,
    levels: Sequence[Classification],
    because: Callable[[Classification], str],
    models: Iterable[CachedModel],
) -> tuple[Finding, ...]:
    """Return whether all tiers of `models` admit these classifications; `because` explains a classification. Empty if
    no tier is restricted or there are no classifications."""
    restricted = restricted_tiers(world)
    if not restricted or not levels:
        return ()
    listed = {name for model in models for name in model.spec.tier_names}
    left_out = [
        (tier.name, refused)
        for tier in restricted
        if tier.name in listed and (refused := refused_level(tier, levels)) is not None
    ]
    kind = ConditionType.TIERS_ADMITTED
    if not left_out:
        return (true(kind, PolicyReason.TIERS_ADMITTED, f"every tier of the models takes data of {levels[0]}"),)
    names, level = ", ".join(name for name, _ in left_out[:NAMED]), left_out[0][1]
    rest = f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
    return (
        false(
            kind,
            PolicyReason.CLASSIFICATION_NOT_ALLOWED,
            f"pods keep this data off CacheTier {names}{rest}, because it is of classification {level}: "
            f"{because(level)}",
        ),
    )


def because_of(world: World, scope: Scope) -> Callable[[Classification], str]:
    def explain(level: Classification) -> str:
        names = _shared(world)[scope][level]
        unsaid = "" if world.policies[names[0]].spec.classification else ", which sets none"
        return f"that of TenantCachePolicy {names[0]}{unsaid}"

    return explain


def because_of_policy(policy: TenantCachePolicy, scope: Scope) -> Callable[[Classification], str]:
    def explain(level: Classification) -> str:
        if level == policy.spec.effective_classification:
            unsaid = policy.spec.classification is None
            return "data counts as such while spec.classification is absent" if unsaid else "spec.classification"
        where = f"TenantGroup {scope.name}" if scope.kind is ScopeKind.GROUP else "the CacheDomain"
        return f"that of another tenant that shares blocks with this one; the status of {where} names it"

    return explain


def _restricts(tier: CacheTier) -> bool:
    return tier.spec.allowed_classifications is not None


def _strictest_first(levels: Iterable[Classification]) -> tuple[Classification, ...]:
    return tuple(sorted(levels, key=lambda level: -level.level))


def _shared(world: World) -> Mapping[Scope, Mapping[Classification, Sequence[str]]]:
    return world.memo.get(Classification, world.namespace, (Snapshot(world),), lambda: _of_shared_scopes(world))


def _of_shared_scopes(world: World) -> Mapping[Scope, Mapping[Classification, Sequence[str]]]:
    found: dict[Scope, dict[Classification, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, policy in sorted(world.policies.items()):
        if not policy.metadata.deleting:
            for scope in _shared_scopes(world, policy):
                found[scope][policy.spec.effective_classification].append(name)
    return {scope: dict(by_level) for scope, by_level in found.items()}


def _shared_scopes(world: World, policy: TenantCachePolicy) -> set[Scope]:
    """Return the shared scopes of a policy: by its spec, and by its status, because pods use the previous spec while a
    new one is invalid."""
    scopes, reported = {scope_in_force(world, policy)}, policy.status.scope
    if reported is not None and (reported.kind != ScopeKind.GROUP or is_member(world, policy, reported.name)):
        scopes.add(Scope(ScopeKind(reported.kind), reported.name))
    return {scope for scope in scopes if scope.kind is not ScopeKind.TENANT}
