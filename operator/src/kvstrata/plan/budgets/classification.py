"""Which tiers a scope's data is kept off, because of how sensitive its tenants say that it is.

A tenant that says nothing counts as the strictest. Whoever shares a scope shares blocks, and a block tells nobody whose
it is: a tier has to admit the strictest of a shared scope's tenants, and every other. So nobody who joins opens a tier,
also not one that is for strict data alone. The engine's own memory holds every request and keeps nobody off it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier, Medium
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
    """A world that equals itself alone: what follows from all of its policies is found once in each plan."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self._world is other._world

    __hash__ = None  # type: ignore[assignment]


def restricted_tiers(world: World) -> tuple[CacheTier, ...]:
    """Return the tiers that take data of some classifications only, and of which pods keep the rest off, by name."""
    return tuple(tier for _, tier in sorted(world.tiers.items()) if _restricts(tier))


def levels_of(world: World, policy: TenantCachePolicy, scope: Scope) -> tuple[Classification, ...]:
    """Return how sensitive data in `scope` is, which the policy's tenant is in, the strictest first."""
    shared = () if scope.kind is ScopeKind.TENANT else shared_levels(world, scope)
    return _strictest_first({policy.spec.effective_classification, *shared})


def shared_levels(world: World, scope: Scope) -> tuple[Classification, ...]:
    """Return the classifications of those who share a scope, the strictest first; none if nobody does."""
    return _strictest_first(_shared(world).get(scope, {}))


def shared_classifications(world: World) -> tuple[Any, ...]:
    """Return all that `denied_tiers` reads of other policies, for any policy there may be."""
    if not restricted_tiers(world):
        return ()
    return tuple(sorted((str(scope), _strictest_first(found)) for scope, found in _shared(world).items()))


def denied_tiers(world: World, policy: TenantCachePolicy, scope: Scope) -> tuple[str, ...]:
    """Return the tiers that data in `scope`, which the policy's tenant is in, must not be on."""
    tiers = restricted_tiers(world)
    levels = levels_of(world, policy, scope) if tiers else ()
    return tuple(tier.name for tier in tiers if refused_level(tier, levels) is not None)


def refused_level(tier: CacheTier, levels: Iterable[Classification]) -> Classification | None:
    """Return the first of `levels` that a tier does not admit, None if it admits all."""
    return next((level for level in levels if not tier.spec.admits(level)), None)


def sharers_to_tell(world: World, *policies: TenantCachePolicy) -> frozenset[str]:
    """Return the policies in whose shared scope a classification came or went with one policy's coming or changing.

    `policies` are what that one was and is.
    """
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
    """Return whether data of these classifications may be on all tiers of `models`; `because` says why it has one.

    Where no tier asks for a classification, or nobody has any data, there is nothing to say.
    """
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
    """Return what tells where a classification of a shared scope comes from."""

    def tell(level: Classification) -> str:
        names = _shared(world)[scope][level]
        unsaid = "" if world.policies[names[0]].spec.classification else ", which says none"
        return f"that of TenantCachePolicy {names[0]}{unsaid}"

    return tell


def because_of_policy(policy: TenantCachePolicy, scope: Scope) -> Callable[[Classification], str]:
    """Return what tells where a classification of a policy's data comes from."""

    def tell(level: Classification) -> str:
        if level == policy.spec.effective_classification:
            unsaid = policy.spec.classification is None
            return "data counts as such while spec.classification is absent" if unsaid else "spec.classification"
        where = f"TenantGroup {scope.name}" if scope.kind is ScopeKind.GROUP else "the CacheDomain"
        return f"that of another tenant who shares blocks with this one; the status of {where} says whose"

    return tell


def _restricts(tier: CacheTier) -> bool:
    return tier.spec.allowed_classifications is not None and tier.spec.medium is not Medium.HBM


def _strictest_first(levels: Iterable[Classification]) -> tuple[Classification, ...]:
    return tuple(sorted(levels, key=lambda level: -level.level))


def _shared(world: World) -> Mapping[Scope, Mapping[Classification, Sequence[str]]]:
    """Return, by shared scope and classification, the policies that have it, by name."""
    return world.memo.get((Classification, world.namespace), (Snapshot(world),), lambda: _of_shared_scopes(world))


def _of_shared_scopes(world: World) -> Mapping[Scope, Mapping[Classification, Sequence[str]]]:
    found: dict[Scope, dict[Classification, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, policy in sorted(world.policies.items()):
        if not policy.metadata.deleting:
            for scope in _shared_scopes(world, policy):
                found[scope][policy.spec.effective_classification].append(name)
    return {scope: dict(by_level) for scope, by_level in found.items()}


def _shared_scopes(world: World, policy: TenantCachePolicy) -> set[Scope]:
    """Return the shared scopes that a policy counts in: where its spec puts the tenant, and where its status says that
    the tenant is, because while a new spec is invalid pods go by the one before.
    """
    scopes, told = {scope_in_force(world, policy)}, policy.status.scope
    if told is not None and (told.kind != ScopeKind.GROUP or is_member(world, policy, told.name)):
        scopes.add(Scope(ScopeKind(told.kind), told.name))
    return {scope for scope in scopes if scope.kind is not ScopeKind.TENANT}
