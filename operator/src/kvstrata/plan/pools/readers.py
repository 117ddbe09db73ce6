"""Readers of PrefixPools: a tenant reads a pool if its policy lists the pool and the pool lists the tenant.

Pods see keyspaces, not tenants, so tenants that share one read only pools that all of them may read. Gates compute that
too (`effective_pools`); here affected tenants get a condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvstrata.api.conditions import ConditionType
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.reasons import PolicyReason, SharedReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.cache_view import effective_pools
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision
from kvstrata.plan.conditions import Finding, false, listed, true

KIND = ConditionType.POOLS_RESOLVED

Lacking = Mapping[str, Mapping[str, list[str]]]
"""By keyspace and pool: the tenants that may not read it, so that no tenant of the keyspace does."""


def present(world: World, name: str) -> PrefixPool | None:
    """Return the pool of that name, unless it is under deletion."""
    pool = world.pools.get(name)
    return pool if pool is not None and not pool.metadata.deleting else None


def lists(world: World, pool: PrefixPool, tenant: str) -> bool:
    readers = pool.spec.readers
    groups = (world.groups.get(name) for name in readers.groups)
    members = (group.spec.members for group in groups if group is not None and not group.metadata.deleting)
    return bool(readers.public) or tenant in readers.tenants or any(tenant in listed for listed in members)


def may_read(world: World, tenant: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if (pool := present(world, name)) and lists(world, pool, tenant))


def pools_resolved(world: World, policy: TenantCachePolicy, blocked: Decision | None) -> Finding | None:
    """Return whether the tenant may read the pools of its policy; None without pools."""
    names = policy.spec.pool_names
    if not names:
        return None
    if blocked:
        return false(KIND, *blocked)
    for rule in (_exists, _is_of_a_model_of_the_policy, _lists_the_tenant, _is_read_by_all_of_the_scope):
        found = next((reported for name in names if (reported := rule(world, policy, name)) is not None), None)
        if found is not None:
            return false(KIND, *found)
    message = f"the tenant may read {len(names)} {'pool' if len(names) == 1 else 'pools'}"
    return true(KIND, PolicyReason.POOLS_RESOLVED, message)


def with_narrowed_pools(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> frozenset[str]:
    """Return the UIDs of policies with pools in a scope where other entries changed the readable pools."""
    touched = {entry.keyspace for entry in _changed_readers(before, after)}
    if not touched:
        return frozenset()
    return frozenset(entry.policy for entry in after.values() if entry.pools and entry.keyspace in touched)


def _changed_readers(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> Iterator[Entry]:
    """Yield entries of shared scopes that came, went or changed their pools, old and new."""
    for one, other in ((before, after), (after, before)):
        for tenant, entry in one.items():
            twin = other.get(tenant)
            if twin is entry or entry.scope.kind is ScopeKind.TENANT:
                continue
            if twin is None or _reads(twin) != _reads(entry):
                yield entry


def _reads(entry: Entry) -> tuple[Any, ...]:
    return entry.keyspace, entry.suspended, entry.pools


def _exists(world: World, _policy: TenantCachePolicy, name: str) -> Decision | None:
    if present(world, name) is not None:
        return None
    known = ", ".join(sorted(world.pools)[:8]) or "none"
    return Decision(
        SharedReason.POOL_NOT_FOUND,
        f"PrefixPool {name} does not exist in namespace {world.namespace} (there: {known}): create it or correct "
        "spec.pools; the tenant computes its prefixes itself",
    )


def _is_of_a_model_of_the_policy(world: World, policy: TenantCachePolicy, name: str) -> Decision | None:
    of = world.pools[name].spec.model_ref.name
    model = world.models.get(of)
    if policy.spec.covers(of, model.metadata.labels if model is not None else {}):
        return None
    return Decision(
        PolicyReason.POOL_OF_OTHER_MODEL,
        f"PrefixPool {name} is of CachedModel {of}, which spec.models does not choose: add it there, or take the pool "
        "out of spec.pools",
    )


def _lists_the_tenant(world: World, policy: TenantCachePolicy, name: str) -> Decision | None:
    if lists(world, world.pools[name], policy.spec.tenant):
        return None
    return Decision(
        PolicyReason.NOT_A_READER,
        f"PrefixPool {name} does not list tenant {policy.spec.tenant}: add it to spec.readers of the pool, itself or a "
        "TenantGroup of which it is a member",
    )


def _is_read_by_all_of_the_scope(world: World, policy: TenantCachePolicy, name: str) -> Decision | None:
    of = world.pools[name].spec.model_ref.name
    committed = world.bundles.get(of)
    own = committed.bundle.entries.get(policy.spec.tenant) if committed is not None else None
    if own is None or own.policy != policy.uid or own.suspended or name not in own.pools:
        return None  # Enforced shows whether the bundle follows.
    tenants = _lacking(world, of).get(own.keyspace, {}).get(name, ())
    if not tenants:
        return None
    return Decision(
        PolicyReason.NARROWED_BY_SCOPE,
        f"no tenant of scope {own.scope} reads PrefixPool {name}, because {listed(tenants)} of the same "
        "scope may not: let every tenant of the scope read it, or isolate those that may not",
    )


def _lacking(world: World, model: str) -> Lacking:
    committed = world.bundles[model]

    def find() -> Lacking:
        entries = [entry for entry in committed.bundle.entries.values() if not entry.suspended]
        effective = effective_pools(entries)
        wished: dict[str, set[str]] = {}
        for entry in entries:
            if entry.pools:
                wished.setdefault(entry.keyspace, set()).update(entry.pools)
        narrowed = {keyspace: names.difference(effective.get(keyspace, ())) for keyspace, names in wished.items()}
        found: dict[str, dict[str, list[str]]] = {}
        for entry in entries:
            for name in narrowed.get(entry.keyspace, set()).difference(entry.pools):
                found.setdefault(entry.keyspace, {}).setdefault(name, []).append(entry.tenant)
        return found

    return world.memo.get(KIND, model, (committed.resource_version,), find)
