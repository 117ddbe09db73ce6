"""Which keys a change affects: as few as possible, because every status write and acknowledgement comes here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.common import Classification
from kvstrata.api.conditions import ConditionType
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.api.tenantgroup import Sharing, TenantGroup
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.model.guarantees import claims_of
from kvstrata.model.pods import CommittedBundle, Pod, VerifiedState
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects.labels import ERASES
from kvstrata.plan.actions import CommitBundle
from kvstrata.plan.budgets.capacity import BUDGETED, keeps_budgets, overcommitted
from kvstrata.plan.budgets.classification import sharers_to_tell
from kvstrata.plan.budgets.usage import holders_of_news
from kvstrata.plan.pools.readers import narrowed_anew
from kvstrata.plan.pools.shards import changed_pools, leftovers
from kvstrata.plan.redis.backend import servers_held


def concerned_by_object(world: World, key: Key, before: Resource | None, after: Resource | None) -> frozenset[Key]:
    own = {key}
    if before is not None and after is not None and _meaning(before) == _meaning(after):
        return frozenset(own)
    own.add(Key("CacheDomain", world.namespace, "default"))
    own |= _claimed(world, key, before)
    match key.kind:
        case "CacheDomain":
            everyone = (*_policies(world), *_groups(world), *_pools(world), *_models(world))
            return frozenset({*own, *everyone, *_bundles(world)})
        case "CacheTier":
            models = {
                Key("CachedModel", world.namespace, m.name)
                for m in world.models.values()
                if key.name in m.spec.tier_names
            }
            policies = {
                Key("TenantCachePolicy", world.namespace, policy.name)
                for policy in world.policies.values()
                if any(budget.name == key.name for budget in policy.spec.tiers)
            }
            groups = {
                Key("TenantGroup", world.namespace, group.name)
                for group in world.groups.values()
                if any(budget.name == key.name for budget in group.spec.tiers)
            }
            whole = {*_pools(world), *_bundles(world)}
            if before is None or after is None or _admits(before) != _admits(after):
                whole |= {*_policies(world), *_groups(world)}
            return frozenset(own | models | policies | groups | whole | _neighbours(world, before, after))
        case "CachedModel":
            bundle = Key(BUNDLE, world.namespace, key.name)
            was, now = (set(one.spec.tier_names) if isinstance(one, CachedModel) else set() for one in (before, after))
            tiers = {Key("CacheTier", world.namespace, name) for name in was ^ now}
            return frozenset({*own, bundle, *tiers, *_policies(world), *_groups(world), *_pools(world, key.name)})
        case "TenantCachePolicy":
            told = {*_rivals(world, before, after), *_groups_of(world, before, after), *_sharers(world, before, after)}
            return frozenset({*own, *told, *_bundles(world)})
        case "TenantGroup":
            # Members may read the group's pools, whether or not their policy names it.
            listed = {t for group in (before, after) if isinstance(group, TenantGroup) for t in group.spec.members}
            followers = {
                Key("TenantCachePolicy", world.namespace, policy.name)
                for policy in world.policies.values()
                if policy.spec.group_name == key.name or (policy.spec.pools and policy.spec.tenant in listed)
            }
            return frozenset({*own, *followers, *_bundles(world)})
        case "PrefixPool":
            named = {pool.spec.model_ref.name for pool in (before, after) if isinstance(pool, PrefixPool)}
            bundles = {Key(BUNDLE, world.namespace, name) for name in named if name in world.models}
            if before is not None and after is not None and _declared(before) == _declared(after):
                return frozenset({*own, *bundles})
            models = {Key("CachedModel", world.namespace, name) for name in named if name in world.models}
            readers = {
                Key("TenantCachePolicy", world.namespace, policy.name)
                for policy in world.policies.values()
                if key.name in policy.spec.pool_names
            }
            others = {key for name in named for key in _pools(world, name)}  # a pool that goes makes room for another
            return frozenset({*own, *readers, *models, *bundles, *others})
        case "CacheInvalidation":
            return frozenset({*own, *_leaving(world, before, after)})
        case _:
            return frozenset(own)


def concerned_by_pod(world: World, before: Pod | None, after: Pod | None, model: str | None = None) -> frozenset[Key]:
    if before == after:
        return frozenset()
    pod = after or before
    name = pod.model if pod else model or ""
    keys = {Key("CachedModel", world.namespace, name), Key("CacheDomain", world.namespace, "default")}
    keys |= set(_pools(world, name))
    if (before is None or not before.live) != (after is None or not after.live):
        keys |= set(_open_invalidations(world))
    ended = before is not None and before.live and (after is None or not after.live)
    if ended or (before is None or not before.ready) != (after is None or not after.ready):
        keys |= _waiting_policies(world, name, world.acked_revision(after) if after else 0)
        keys |= set(_groups(world))
        found = world.models.get(name)
        keys |= {Key("CacheTier", world.namespace, tier) for tier in (found.spec.tier_names if found else ())}
        said = world.states.get(pod.uid) if pod else None
        tiers = _budgeted(world, name)
        if not all(keeps_budgets(said.state if said else None, tier) for tier in tiers):
            keys |= _with_budgets_in(world, tiers)
    return frozenset(keys)


def concerned_by_state(world: World, pod: Pod, before: VerifiedState | None, after: VerifiedState) -> frozenset[Key]:
    old, new = before.state if before else None, after.state
    same_use = old is not None and (old.usage, old.tier_usage) == (new.usage, new.tier_usage)
    news = frozenset() if same_use else holders_of_news(world, pod.model, after.at)
    if before is None or not before.in_contact or _renders_as(before.state) != _renders_as(new):
        news |= frozenset(_pools(world, pod.model))
    if after.contradicted:
        news |= {Key("CacheDomain", world.namespace, "default"), Key(BUNDLE, world.namespace, pod.model)}
    if before is not None and _said(before) == _said(after):
        return news
    keys = {*news, Key("CachedModel", world.namespace, pod.model), Key("CacheDomain", world.namespace, "default")}
    told_before = old.tiers if old and old.acked else ()
    if told_before != new.tiers:
        keys |= {Key("CacheTier", world.namespace, tier.name) for tier in (*told_before, *new.tiers)}
    counted, counts = (
        verified.state.acked if verified and not verified.contradicted else 0 for verified in (before, after)
    )
    if before is None or counted != counts:
        # An acknowledgement that no longer counts is missed by everything that relied on it.
        keys |= _waiting(world, pod.model, min(counted, counts))
    changed = [t for t in _budgeted(world, pod.model) if keeps_budgets(old, t) != keeps_budgets(new, t)]
    return frozenset(keys | _with_budgets_in(world, changed))


def concerned_by_commit(world: World, commit: CommitBundle, before: CommittedBundle | None) -> frozenset[Key]:
    entries = before.bundle.entries if before is not None else {}
    held, stay = ({entry.policy for entry in some.values()} for some in (entries, commit.entries))
    changed = {entry.policy for entry in commit.entries.values() if entry.since == commit.root.revision}
    changed |= (held - stay) | narrowed_anew(entries, commit.entries)
    everyone = commit.root.rules_since == commit.root.revision
    policies = {
        Key("TenantCachePolicy", world.namespace, name)
        for name, policy in world.policies.items()
        if everyone or policy.uid in changed
    }
    own = {Key("CachedModel", world.namespace, commit.model), Key("CacheDomain", world.namespace, "default")}
    named = changed_pools(before.bundle.pools if before is not None else {}, commit.pools)
    pools = {Key("PrefixPool", world.namespace, name) for name in named if name in world.pools}
    keys = {*own, *policies, *_groups(world), *pools, *_open_invalidations(world)}
    revision = commit.root.revision
    if any(world.acked_revision(pod) >= revision for pod in world.live_pods(commit.model)):
        # A pod was faster than the API server's answer: what waits for acknowledgements was planned without them.
        keys |= _waiting(world, commit.model, revision - 1)
    return frozenset(keys)


def _said(verified: VerifiedState) -> tuple[Any, ...]:
    said = verified.state
    return said.acked, said.problem, said.fresh, said.tiers, verified.contradicted


def _budgeted(world: World, model: str) -> list[CacheTier]:
    found = world.models.get(model)
    listed = found.spec.tier_names if found is not None else ()
    return [world.tiers[name] for name in listed if name in world.tiers and world.tiers[name].spec.medium in BUDGETED]


def _with_budgets_in(world: World, tiers: Iterable[CacheTier]) -> set[Key]:
    """Return the holders of budgets on these tiers, except the domain, which sees every state."""
    names = {tier.name for tier in tiers}
    if not names:
        return set()
    declared = (
        *(("TenantCachePolicy", name, policy.spec.tiers) for name, policy in world.policies.items()),
        *(("TenantGroup", name, group.spec.tiers) for name, group in world.groups.items()),
    )
    return {
        Key(kind, world.namespace, name)
        for kind, name, budgets in declared
        if any(budget.name in names for budget in budgets)
    }


def _waiting(world: World, model: str, enforced: int) -> set[Key]:
    """Return what waits for pods of a model to enforce more than revision `enforced`."""
    return {
        *_waiting_policies(world, model, enforced),
        *_waiting_pools(world, model, enforced),
        *_waiting_slots(world, model),
        *_open_invalidations(world),
        *_groups(world),
    }


def _waiting_policies(world: World, model: str, enforced: int) -> set[Key]:
    """Return the policies of a model that changed after revision `enforced`; all of them while at most one pod
    serves. Those whose generation was never enforced wait for the newest revision."""
    committed = world.bundles.get(model)
    if committed is None:
        return set()
    uids = {entry.policy for entry in committed.bundle.entries.values() if entry.since > enforced}
    if committed.bundle.root.rules_since > enforced or len(world.serving_pods(model)) <= 1:
        return set(_policies(world))
    names = world.unsettled | {world.policy_names[uid] for uid in uids if uid in world.policy_names}
    return {Key("TenantCachePolicy", world.namespace, name) for name in names}


def _waiting_slots(world: World, model: str) -> set[Key]:
    found, committed = world.models.get(model), world.bundles.get(model)
    if found is None or committed is None or not leftovers(world, found, committed):
        return set()
    return {Key(BUNDLE, world.namespace, model)}


def _waiting_pools(world: World, model: str, enforced: int) -> set[Key]:
    committed = world.bundles.get(model)
    if committed is None:
        return set()
    changed = {ref.index for ref in committed.bundle.root.pools if ref.since > enforced}
    named = (name for name, index in committed.pool_indexes.items() if index in changed)
    return {Key("PrefixPool", world.namespace, name) for name in named if name in world.pools}


def _declared(resource: Resource) -> tuple[Any, ...]:
    """The parts of an object that its users set."""
    metadata = resource.metadata
    return metadata.uid, metadata.generation, metadata.labels, metadata.deleting


def _meaning(resource: Resource) -> tuple[Any, ...]:
    """The parts of an object that other plans use: spec, labels, deletion and parts of its status."""
    status: Any = getattr(resource, "status")  # noqa: B009  (declared by each kind)
    scope = getattr(status, "scope", None)
    extra = (
        getattr(status, "domain_id", None),
        getattr(status, "phase", None),
        _usable(resource),
        _compiled(resource),
        getattr(status, "admission", None),
        _broken(resource),
    )
    return (*_declared(resource), scope, *extra)


def _broken(resource: Resource) -> object:
    if not isinstance(resource, CachedModel):
        return None
    return resource.status.probe.failure if resource.status.probe is not None else None


def _compiled(resource: Resource) -> tuple[Any, ...] | None:
    if not isinstance(resource, PrefixPool):
        return None
    status = resource.status
    return status.manifest_digest, status.render_id, status.published, status.tiers, status.next


def _usable(resource: Resource) -> tuple[object, ...] | None:
    """A tier's readiness, which its models report, whether it is overcommitted, and its external servers."""
    if not isinstance(resource, CacheTier):
        return None
    status = resource.status
    return status.is_true(ConditionType.READY), overcommitted(resource), status.external


def _claimed(world: World, key: Key, before: Resource | None) -> set[Key]:
    """Return the tiers on which an object's guarantees changed: their plans enqueue the waiting objects."""
    was, now = claims_of(before), world.claimants.get(key, {})
    touched = {tier for tier in {**was, **now} if was.get(tier) != now.get(tier)}
    return {Key("CacheTier", world.namespace, tier) for tier in touched}


def _rivals(world: World, *policies: Resource | None) -> set[Key]:
    tenants = {policy.spec.tenant for policy in policies if policy is not None}  # type: ignore[attr-defined]
    return {
        Key("TenantCachePolicy", world.namespace, name)
        for tenant in tenants
        for name in world.policies_of_tenant.get(tenant, ())
    }


def _leaving(world: World, *invalidations: Resource | None) -> set[Key]:
    uids = {found.metadata.annotations.get(ERASES, "") for found in invalidations if found is not None}
    names = {world.policy_names[uid] for uid in uids if uid in world.policy_names}
    return {Key("TenantCachePolicy", world.namespace, name) for name in names}


def _sharers(world: World, *policies: Resource | None) -> set[Key]:
    edited = [policy for policy in policies if isinstance(policy, TenantCachePolicy)]
    return {Key("TenantCachePolicy", world.namespace, name) for name in sharers_to_tell(world, *edited)}


def _admits(tier: Resource | None) -> tuple[Classification, ...] | None:
    """The classifications that a tier allows, None for all or without a tier."""
    return tier.spec.allowed_classifications if isinstance(tier, CacheTier) else None


def _neighbours(world: World, before: Resource | None, after: Resource | None) -> set[Key]:
    """Return the tiers whose conflict over servers may have changed, and the models that list them."""
    named = [servers_held(tier) if isinstance(tier, CacheTier) else frozenset() for tier in (before, after)]
    touched = {name for name, tier in world.tiers.items() if servers_held(tier) & (named[0] ^ named[1])}
    models = (model for model in world.models.values() if touched.intersection(model.spec.tier_names))
    return {
        *(Key("CacheTier", world.namespace, name) for name in touched),
        *(Key("CachedModel", world.namespace, model.name) for model in models),
    }


def _groups_of(world: World, *policies: Resource | None) -> set[Key]:
    edited = [policy.spec for policy in policies if isinstance(policy, TenantCachePolicy)]
    named, tenants = {spec.group_name for spec in edited}, {spec.tenant for spec in edited}
    return {
        Key("TenantGroup", world.namespace, name)
        for name, group in world.groups.items()
        if name in named or (group.spec.effective_sharing is Sharing.POOLS_ONLY and tenants & set(group.spec.members))
    }


def _policies(world: World) -> tuple[Key, ...]:
    return tuple(Key("TenantCachePolicy", world.namespace, name) for name in world.policies)


def _groups(world: World) -> tuple[Key, ...]:
    return tuple(Key("TenantGroup", world.namespace, name) for name in world.groups)


def _models(world: World) -> tuple[Key, ...]:
    return tuple(Key("CachedModel", world.namespace, name) for name in world.models)


def _pools(world: World, model: str | None = None) -> tuple[Key, ...]:
    return tuple(
        Key("PrefixPool", world.namespace, name)
        for name, pool in world.pools.items()
        if model is None or pool.spec.model_ref.name == model
    )


def _renders_as(state: PodState) -> tuple[object, ...]:
    """The parts of a pod's state that decide whether it can render prefixes, and whether its answers still hold."""
    return state.gate_boot, state.cache_boot, state.engine_ready, state.acked > 0


def _bundles(world: World) -> tuple[Key, ...]:
    return tuple(Key(BUNDLE, world.namespace, name) for name in world.models)


def _open_invalidations(world: World) -> tuple[Key, ...]:
    return tuple(
        Key("CacheInvalidation", world.namespace, invalidation.name)
        for invalidation in world.invalidations.values()
        if invalidation.status.phase is None or not invalidation.status.phase.finished
    )
