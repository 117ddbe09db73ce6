"""Which keys a change affects: as few as possible, because every status write and acknowledgement comes here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from kvstrata.api.base import Resource
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.conditions import ConditionType
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.api.tenantgroup import Sharing, TenantGroup
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.model.guarantees import claims_of
from kvstrata.model.pods import CommittedBundle, Pod, VerifiedState
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects.labels import ERASES
from kvstrata.plan.actions import CommitBundle
from kvstrata.plan.budgets.capacity import keeps_budgets, overcommitted
from kvstrata.plan.budgets.classification import affected_sharers
from kvstrata.plan.budgets.retention import retention_sharers
from kvstrata.plan.budgets.usage import holders_of_news
from kvstrata.plan.pools.readers import with_narrowed_pools
from kvstrata.plan.pools.shards import changed_pools, leftovers
from kvstrata.plan.redis.backend import places_of, servers_held

DOMAIN, TIER, MODEL, POLICY, GROUP, POOL, INVALIDATION = (
    "CacheDomain", "CacheTier", "CachedModel", "TenantCachePolicy", "TenantGroup", "PrefixPool", "CacheInvalidation",
)  # fmt: skip


def affected_by_object(world: World, key: Key, before: Resource | None, after: Resource | None) -> frozenset[Key]:
    """Return the keys of an object and of the plans that read the changed part; None is an absent object."""
    kind = KINDS[key.kind]
    if before is not None and after is not None:
        seen = [(*_declared(one), *kind.watched(one.status)) for one in (before, after)]
        if seen[0] == seen[1]:
            return frozenset({key})
    claimed = claims_of(before), world.claims.by_holder.get(key, {})
    # Plans of tiers enqueue the objects that wait for room.
    tiers = {tier for one in claimed for tier in one if claimed[0].get(tier) != claimed[1].get(tier)}
    own = {key, Key(DOMAIN, world.namespace, "default")}
    return frozenset(own | _named(world, TIER, tiers) | kind.targets(world, key, before, after))


def _of_domain(world: World, _key: Key, _before: Any, _after: Any) -> set[Key]:
    return _keys(world, POLICY) | _keys(world, GROUP) | _keys(world, POOL) | _keys(world, MODEL) | _keys(world, BUNDLE)


def _of_tier(world: World, key: Key, before: CacheTier | None, after: CacheTier | None) -> set[Key]:
    keys = _keys(world, MODEL, lambda model: key.name in model.tier_names) | _neighbours(world, before, after)
    keys |= _keys(world, POOL) | _keys(world, BUNDLE)
    seen = [(one.spec.allowed_classifications, places_of(one)) for one in (before, after) if one]
    if seen[1:] != seen[:1]:
        return keys | _keys(world, POLICY) | _keys(world, GROUP)
    return keys | _with_budgets_in(world, {key.name})


def _of_model(world: World, key: Key, before: Any, after: Any) -> set[Key]:
    was, now = (set(one.tier_names) if one is not None else set() for one in (before, after))
    keys = {Key(BUNDLE, world.namespace, key.name), *_named(world, TIER, was ^ now), *_pools_of(world, key.name)}
    return keys | _keys(world, POLICY) | _keys(world, GROUP)


def _of_policy(world: World, _key: Key, before: Any, after: Any) -> set[Key]:
    edited = [one for one in (before, after) if one is not None]
    tenants, named = {one.spec.tenant for one in edited}, {one.spec.group_name for one in edited}
    rivals = (name for tenant in tenants for name in world.policies_of_tenant.get(tenant, ()))

    def is_theirs(group: TenantGroup) -> bool:
        shared = group.spec.sharing is Sharing.POOLS_ONLY and not tenants.isdisjoint(group.spec.members)
        return shared or group.name in named

    sharers = affected_sharers(world, *edited) | retention_sharers(world, *edited)
    reported = _named(world, POLICY, (*rivals, *sharers))
    return _keys(world, GROUP, is_theirs) | reported | _keys(world, BUNDLE)


def _of_group(world: World, key: Key, before: Any, after: Any) -> set[Key]:
    # Members may read the group's pools, whether or not their policy names it.
    members = {tenant for group in (before, after) if group is not None for tenant in group.spec.members}

    def may_read(policy: TenantCachePolicy) -> bool:
        return policy.spec.group_name == key.name or bool(policy.spec.pools and policy.spec.tenant in members)

    return _keys(world, BUNDLE) | _keys(world, POLICY, may_read)


def _of_pool(world: World, key: Key, before: Any, after: Any) -> set[Key]:
    models = {pool.spec.model_ref.name for pool in (before, after) if pool is not None}
    keys = _named(world, BUNDLE, models & world.models.keys())
    if before is not None and after is not None and _declared(before) == _declared(after):
        return keys
    keys |= _named(world, MODEL, models & world.models.keys())
    keys |= _keys(world, POLICY, lambda policy: key.name in policy.spec.pool_names)
    return keys.union(*(_pools_of(world, model) for model in models))  # a pool that goes makes room for another


def _of_invalidation(world: World, _key: Key, before: Any, after: Any) -> set[Key]:
    uids = {one.metadata.annotations.get(ERASES, "") for one in (before, after) if one is not None}
    return _named(world, POLICY, [world.policy_names[uid] for uid in uids if uid in world.policy_names])


def _usable(status: Any) -> tuple[object, ...]:
    return status.is_true(ConditionType.READY), overcommitted(status), status.external


class Kind(NamedTuple):
    """Dependencies on a kind's objects: the part of their status that other plans read beside users' settings
    (`watched`), and the keys of these plans (`targets`)."""

    watched: Callable[[Any], tuple[object, ...]]
    targets: Callable[[World, Key, Any, Any], set[Key]]


KINDS: Mapping[str, Kind] = {
    DOMAIN: Kind(attrgetter("domain_id", "served_by", "scope", "admission"), _of_domain),
    TIER: Kind(_usable, _of_tier),
    MODEL: Kind(lambda status: (status.probe.failure if status.probe is not None else None,), _of_model),
    POLICY: Kind(attrgetter("scope", "models", "admission"), _of_policy),
    GROUP: Kind(attrgetter("scope", "admission"), _of_group),
    POOL: Kind(
        attrgetter("scope", "admission", "manifest_digest", "render_id", "published", "tiers", "next"), _of_pool
    ),
    INVALIDATION: Kind(lambda status: (status.phase,), _of_invalidation),
}


def affected_by_pod(world: World, before: Pod | None, after: Pod | None) -> frozenset[Key]:
    pod = after or before
    if pod is None or before == after:
        return frozenset()
    name = pod.model
    keys = _reporting(world, name) | _pools_of(world, name)
    was_live, is_live = (one is not None and one.live for one in (before, after))
    was_ready, is_ready = (one is not None and one.ready for one in (before, after))
    if was_live != is_live or after is None or after.finished:
        keys |= _open_invalidations(world)
    if (was_live and not is_live) or was_ready != is_ready:
        keys |= _waiting_policies(world, name, world.acked_revision(after) if after else 0) | _keys(world, GROUP)
        tiers, found = _tiers_of(world, name), world.models.get(name)
        keys |= _named(world, TIER, found.tier_names if found is not None else ())
        answer = world.states.get(pod.uid)
        if not all(keeps_budgets(answer.state if answer else None, tier) for tier in tiers):
            keys |= _with_budgets_in(world, {tier.name for tier in tiers})
    return frozenset(keys)


def affected_by_state(world: World, pod: Pod, before: VerifiedState | None, after: VerifiedState) -> frozenset[Key]:
    old, new = before.state if before else None, after.state
    keys: set[Key] = set()
    if old is None or (old.usage, old.tier_usage) != (new.usage, new.tier_usage):
        keys |= holders_of_news(world, pod.model, after.at)
    if before is None or not before.in_contact or _renders_as(before.state) != _renders_as(new):
        keys |= _pools_of(world, pod.model)
    if after.contradicted:
        keys |= {Key(DOMAIN, world.namespace, "default"), Key(BUNDLE, world.namespace, pod.model)}
    if before is not None and _answer_of(before) == _answer_of(after):
        return frozenset(keys)
    keys |= _reporting(world, pod.model)
    tiers_before = old.tiers if old and old.acked else ()
    if tiers_before != new.tiers:
        keys |= _named(world, TIER, (tier.name for tier in (*tiers_before, *new.tiers)))
    counted, counts = (one.state.acked if one and not one.contradicted else 0 for one in (before, after))
    if before is None or counted != counts:
        # An acknowledgement that no longer counts is missed by everything that relied on it.
        keys |= _waiting(world, pod.model, min(counted, counts))
    changed = {t.name for t in _tiers_of(world, pod.model) if keeps_budgets(old, t) != keeps_budgets(new, t)}
    return frozenset(keys | _with_budgets_in(world, changed))


def affected_by_commit(world: World, commit: CommitBundle, before: CommittedBundle | None) -> frozenset[Key]:
    entries = before.bundle.entries if before is not None else {}
    held, stay = ({entry.policy for entry in some.values()} for some in (entries, commit.entries))
    revision = commit.root.revision
    changed = {entry.policy for entry in commit.entries.values() if entry.since == revision}
    changed |= (held - stay) | with_narrowed_pools(entries, commit.entries)
    everyone = commit.root.rules_since == revision
    pools = changed_pools(before.bundle.pools if before is not None else {}, commit.pools)
    keys = _reporting(world, commit.model) | _open_invalidations(world) | _keys(world, GROUP)
    keys |= _keys(world, POLICY, lambda policy: everyone or policy.uid in changed)
    keys |= _named(world, POOL, pools & world.pools.keys())
    if any(world.acked_revision(pod) >= revision for pod in world.live_pods(commit.model)):
        # A pod was faster than the API server's answer: keys that wait for acknowledgements were planned without them.
        keys |= _waiting(world, commit.model, revision - 1)
    return frozenset(keys)


def _declared(resource: Resource) -> tuple[Any, ...]:
    """The parts of an object that its users set."""
    metadata = resource.metadata
    return metadata.uid, metadata.generation, metadata.labels, metadata.deleting


def _answer_of(verified: VerifiedState) -> tuple[Any, ...]:
    answer = verified.state
    return (
        answer.acked, answer.problem, answer.fingerprint, answer.unresolved, answer.withheld, answer.fresh,
        answer.tiers, answer.certificate, verified.contradicted,
    )  # fmt: skip


def _renders_as(state: PodState) -> tuple[object, ...]:
    """The parts of a pod's state that decide whether it can render prefixes and read pools, and whether its answers
    still hold."""
    processes = state.gate_boot, state.cache_boot, state.fingerprint
    return *processes, state.engine_ready, state.acked > 0, state.unresolved


def _neighbours(world: World, *tiers: CacheTier | None) -> set[Key]:
    """Return the tiers whose conflict over servers may have changed, and the models that list them."""
    before, after = (servers_held(tier) if tier is not None else frozenset() for tier in tiers)
    touched = {name for name, tier in world.tiers.items() if servers_held(tier) & (before ^ after)}
    listing = _keys(world, MODEL, lambda model: not touched.isdisjoint(model.tier_names))
    return _named(world, TIER, touched) | listing


def _waiting(world: World, model: str, enforced: int) -> set[Key]:
    """Return the keys that wait for pods of a model to enforce more than revision `enforced`."""
    keys = _waiting_policies(world, model, enforced) | _open_invalidations(world) | _keys(world, GROUP)
    found, committed = world.models.get(model), world.bundles.get(model)
    if committed is None:
        return keys
    changed = {ref.index for ref in committed.bundle.root.pools if ref.since > enforced}
    pools = {name for name, index in committed.pool_indexes.items() if index in changed}
    keys |= _named(world, POOL, pools & world.pools.keys())
    if found is not None and leftovers(world, found, committed):
        keys.add(Key(BUNDLE, world.namespace, model))
    return keys


def _waiting_policies(world: World, model: str, enforced: int) -> set[Key]:
    """Return the policies of a model that changed after revision `enforced`; all of them while at most one pod
    serves. Those whose generation was never enforced wait for the newest revision."""
    committed = world.bundles.get(model)
    if committed is None:
        return set()
    if committed.bundle.root.rules_since > enforced or len(world.serving_pods(model)) <= 1:
        return _keys(world, POLICY)
    uids = {entry.policy for entry in committed.bundle.entries.values() if entry.since > enforced}
    names = {world.policy_names[uid] for uid in uids if uid in world.policy_names}
    return _named(world, POLICY, world.unsettled | names)


def _with_budgets_in(world: World, tiers: Collection[str]) -> set[Key]:
    """Return the holders of budgets on these tiers, except the domain, which sees every state."""
    if not tiers:
        return set()

    def declares(holder: Any) -> bool:
        return any(budget.tier in tiers for budget in holder.spec.budgets)

    return _keys(world, POLICY, declares) | _keys(world, GROUP, declares)


def _reporting(world: World, model: str) -> set[Key]:
    """Return the keys whose status reports each pod of a model."""
    return {Key(MODEL, world.namespace, model), Key(DOMAIN, world.namespace, "default")}


def _open_invalidations(world: World) -> set[Key]:
    return _keys(world, INVALIDATION, lambda one: one.status.phase is None or not one.status.phase.finished)


def _pools_of(world: World, model: str) -> set[Key]:
    return _keys(world, POOL, lambda pool: pool.spec.model_ref.name == model)


def _tiers_of(world: World, model: str) -> list[CacheTier]:
    found = world.models.get(model)
    return [world.tiers[name] for name in found.tier_names if name in world.tiers] if found is not None else []


def _keys(world: World, kind: str, chosen: Callable[[Any], object] = lambda _: True) -> set[Key]:
    """Return the objects of a kind that are `chosen`."""
    return {Key(kind, world.namespace, name) for name, found in world.objects(kind).items() if chosen(found)}


def _named(world: World, kind: str, names: Iterable[str]) -> set[Key]:
    return {Key(kind, world.namespace, name) for name in names}
