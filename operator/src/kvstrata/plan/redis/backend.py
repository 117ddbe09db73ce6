"""The last answer of a Redis tier's server, earlier conditions, and the servers that pods use or used."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from kvstrata.api.cachetier import CacheTier, Redis, RedisExternal
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.api.status import MAX_STORES, Condition, ScopeStatus, Store
from kvstrata.model.pods import BackendAccess, BackendReport
from kvstrata.model.world import World
from kvstrata.objects.tier_link import redis_link, servers
from kvstrata.plan.conditions import Finding, unknown
from kvstrata.plan.keys.data_keys import scopes_in_use


def report_of(world: World, tier: CacheTier) -> BackendReport | None:
    """Return the last answer, if it came from a server in the present spec with the same parameters."""
    report = world.backends.get(tier.name)
    return report if report is not None and report.access in accesses(tier) else None


def accesses(tier: CacheTier) -> list[BackendAccess]:
    """Return how the operator asks each server that the spec of a Redis tier names; nothing for another medium."""
    link = redis_link(tier)
    if link is None:
        return []
    user = (link.username, link.password)
    if link.operator_username is not None:
        user = (link.operator_username, link.operator_password)
    is_cluster = tier.spec.is_cluster
    return [BackendAccess(address(host, port), host, *user, link.ca, is_cluster) for host, port in link.endpoints]


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def previous_condition(tier: CacheTier, condition: str = ConditionType.BACKEND_REACHABLE) -> Condition | None:
    """Return the last condition of this spec's generation."""
    found = tier.status.condition(condition)
    return found if found is not None and found.observed_generation == tier.generation else None


def as_recorded(tier: CacheTier, otherwise: Finding) -> Finding:
    """Return the last condition of this type and generation, which a new leader repeats until it has an answer."""
    before = previous_condition(tier, otherwise.type)
    return Finding(before.type, before.status, before.reason, before.message) if before is not None else otherwise


def not_asked(tier: CacheTier, kind: str, message: str = "the server has not been asked yet") -> Finding:
    return as_recorded(tier, unknown(kind, TierReason.PROGRESSING, message))


def external_of(tier: CacheTier) -> RedisExternal | None:
    return tier.spec.redis.external if tier.spec.redis is not None else None


def is_external(tier: CacheTier) -> bool:
    return external_of(tier) is not None


def in_force(tier: CacheTier) -> CacheTier | None:
    """Return the tier with the servers that pods use, None if there are none yet. A tier that was ready before external
    servers were checked is in use."""
    declared, taken = external_of(tier), tier.status.external
    if declared is None or taken == declared:
        return tier
    if taken is None:
        ready = previous_condition(tier, ConditionType.READY)
        return tier if ready is not None and ready.status == "True" else None
    spec = tier.spec.model_copy(update={"redis": Redis(external=taken)})
    return tier.model_copy(update={"spec": spec})


def servers_held(tier: CacheTier) -> frozenset[tuple[tuple[str, ...], int]]:
    using = in_force(tier)
    return servers(tier) | (servers(using) if using is not None else frozenset())


def places_of(tier: CacheTier) -> tuple[str, ...]:
    """Return the identity of the store of a tier whose blocks outlive pods; empty for others, and before pods can use
    it. Stores with a place in common are one."""
    using, nvme = in_force(tier), tier.spec.nvme
    if nvme is not None and nvme.host_path is not None:
        return (f"{nvme.host_path.path} {tier.name}",)
    external = external_of(using) if using is not None else None
    managed = (tier.uid,) if tier.spec.managed is not None else ()
    return external.endpoints if external is not None else managed


def with_stores(world: World, scope: ScopeStatus | None) -> dict[str, Any] | None:
    """Return a scope, in API form, with all stores that may have its blocks; None before one is drawn. Bundles name
    servers and epochs together, so nothing is stored under a new epoch but in the present stores."""
    if scope is None:
        return None
    found = ((name, places_of(tier)) for name, tier in sorted(world.tiers.items()))
    now = (Store(tier=name, places=places) for name, places in found if places)
    # If there are too many, the former ones stay: one of them is enough to leave an erasure unproven.
    stores = (*former_stores(world, scope.stores), *now)[:MAX_STORES]
    # Patches merge: a list of models that ends is removed explicitly.
    return {"models": None, **scope.model_copy(update={"stores": stores}).to_kubernetes()}


def stores_of(world: World, epochs: Collection[str]) -> list[Store]:
    """Return stores on record that may have blocks of these epochs, as `with_stores` does if there are too many."""
    found = {store: None for scope in scopes_in_use(world) if scope.epoch in epochs for store in scope.stores}
    return list(dict.fromkeys((*former_stores(world, found), *found)))[:MAX_STORES]


def former_stores(world: World, stores: Iterable[Store]) -> list[Store]:
    """Return the stores on record that are no tier's, without deleted managed tiers of which this process saw that no
    pod used them, or that all servers ended."""
    gone = world.ending.tiers.items()
    ended = {tier.uid for name, tier in gone if world.servers.get(name) == {} and not world.lost_servers.get(name)}
    known = ended.union(world.ending.untouched, *map(places_of, world.tiers.values()))
    return [store for store in stores if known.isdisjoint(store.places)]
