"""From policies to bundle entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvstrata.api.cachedmodel import CachedModel, ReuseMode
from kvstrata.api.cachedomain import AuditNames
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.common import Budget, RateLimit
from kvstrata.api.status import ScopeStatus
from kvstrata.api.tenantcachepolicy import Isolation, TenantCachePolicy, TenantCachePolicySpec
from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.bundle import Bundle, Entry, Rules
from kvstrata.contract.policy.data_key import BundledKey
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.contract.policy.rate import UNLIMITED
from kvstrata.contract.policy.rate import RateLimit as EnforcedRateLimit
from kvstrata.contract.policy.tiers import Server, TierAccess, TierRules
from kvstrata.model.guarantees import Holder
from kvstrata.model.refs import BUNDLE
from kvstrata.model.world import World
from kvstrata.objects.sizing import stored_bytes
from kvstrata.objects.tier_link import RedisLink, redis_link
from kvstrata.plan.actions import Decision
from kvstrata.plan.budgets.admission import admitted_bytes, is_undecided, lost_everywhere
from kvstrata.plan.budgets.classification import denied_tiers, shared_classifications
from kvstrata.plan.budgets.retention import retentions_in, shared_retentions
from kvstrata.plan.isolation import is_fenced
from kvstrata.plan.keys.data_keys import keys_of, seals
from kvstrata.plan.pools.readers import may_read
from kvstrata.plan.redis.backend import in_force
from kvstrata.plan.rules import first
from kvstrata.plan.rules import model as model_chain
from kvstrata.plan.rules import policy as chain
from kvstrata.plan.rules import tier as tier_chain
from kvstrata.plan.scopes import epoch_of, keyspace_of, scope_in_force


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """All inputs of a policy's entry, gathered once; equal inputs give equal entries.

    `declared` are the budgets of `scope`, by the policy, its group or the domain, and `admitted_bytes` the guarantees
    of that object; `undecided`: these are not decided yet. `longest_s` are retention limits by tier; those of the tiers
    `aged` apply without a budget, too. `denied` are the tiers that the scope's data is kept off. `epoch` and `keyspace`
    are None while not drawn, or if the tenant may no longer use the scope.
    """

    name: str
    uid: str
    spec: TenantCachePolicySpec
    blocked: Decision | None
    scope: Scope
    epoch: ScopeStatus | None
    keyspace: str | None
    declared: tuple[Budget, ...]
    longest_s: dict[str, int]
    aged: tuple[str, ...]
    denied: tuple[str, ...]
    keys: tuple[BundledKey, ...]
    paused: bool
    pools: tuple[str, ...]
    undecided: bool
    admitted_bytes: dict[str, int]


def gather(world: World, policy: TenantCachePolicy, scope: Scope | None = None) -> PolicyInputs:
    """Read the inputs of a policy's entry in `scope`, by default its scope in force."""
    scope = scope or scope_in_force(world, policy)
    epoch = epoch_of(world, policy, scope)
    holder, declared = _declaring(world, policy, scope)
    shared_s = retentions_in(world, policy, scope)
    limits = {name: (tier.spec.max_retention_s, shared_s.get(name)) for name, tier in world.tiers.items()}
    longest_s = {name: min(filter(None, both)) for name, both in limits.items() if any(both)}
    return PolicyInputs(
        name=policy.name,
        uid=policy.uid,
        spec=policy.spec,
        blocked=first(chain.BLOCKING, world, policy),
        scope=scope,
        epoch=epoch,
        keyspace=keyspace_of(world.domain_key, epoch),
        declared=declared,
        longest_s=longest_s,
        aged=tuple(name for name in longest_s if world.tiers[name].spec.medium is Medium.CPU or name in shared_s),
        denied=denied_tiers(world, policy, scope),
        keys=keys_of(world, epoch) if epoch is not None else (),
        paused=epoch is not None and epoch.epoch in paused_epochs(world),
        pools=may_read(world, policy.spec.tenant, policy.spec.pool_names),
        undecided=is_undecided(holder),
        admitted_bytes=admitted_bytes(world, holder),
    )


def inputs_of_all(world: World, model: CachedModel) -> tuple[Any, ...]:
    """Return all that `gather` and `entry_in` read besides the policy and its data key, for any policy."""
    domain = world.domain
    return (
        world.domain_key,
        domain.status.scope if domain else None,
        domain.status.admission if domain else None,
        world.domain_spec.public_budgets,
        lost_everywhere(world),
        tuple((name, tier.spec) for name, tier in sorted(world.tiers.items())),
        tuple(
            (name, g.spec, g.status.scope, g.status.admission, g.metadata.deleting)
            for name, g in sorted(world.groups.items())
        ),
        tuple((name, p.spec.readers, p.spec.model_ref, p.metadata.deleting) for name, p in sorted(world.pools.items())),
        frozenset(world.models),
        model.metadata.labels,
        model.tier_names,
        shared_classifications(world),
        shared_retentions(world),
        paused_epochs(world),
        # Policies for the same tenant read each other.
        tuple([tuple(world.policies[name] for name in names) for _, names in sorted(world.contested.items())]),
    )


def compile_policy(world: World, inputs: PolicyInputs) -> Entry | None:
    """Return the bundle entry of a policy, without its `since`; None while it is blocked, or its epoch or guarantees
    are not decided."""
    return world.memo.get(PolicyInputs, inputs.name, (inputs,), lambda: _compile(inputs))


def _compile(inputs: PolicyInputs) -> Entry | None:
    if inputs.blocked or inputs.keyspace is None or inputs.undecided:
        return None
    return Entry(
        tenant=inputs.spec.tenant,
        keyspace=inputs.keyspace,
        scope=inputs.scope,
        policy=inputs.uid,
        suspended=inputs.spec.suspend,
        budgets=_reduced(inputs, map(enforced, inputs.declared)),
        keys=inputs.keys,
        pools=inputs.pools,
        rate=enforced_rate(inputs.spec.rate_limit),
    ).paused(inputs.paused)


def desired_entries(world: World, model: CachedModel, current: Bundle | None) -> tuple[Entry, ...]:
    """Return the desired entries by tenant; an unchanged one is the same object. A blocked policy keeps its entry:
    while a new spec is invalid, the last enforced one stands."""
    entries: dict[str, Entry] = {}
    committed = current.entries if current else {}
    for share in _shares(world, model):
        tenant = share.policy.spec.tenant
        if share.entry is not None:
            # Of several policies for a tenant, the one that is not blocked counts.
            entries[tenant] = share.as_committed(committed.get(tenant), share.entry)
        elif not share.absent and (kept := held_entry(current, share.policy)) is not None:
            if share.blocked:
                kept = share.as_committed(kept, entry_in(world, model, still_allowed(world, model, share.policy, kept)))
            entries.setdefault(tenant, kept)
    return tuple([entries[tenant] for tenant in sorted(entries)])


@dataclass(slots=True)
class _Share:
    """The part of one policy in a model's bundle. `entry` is set if it follows from the policy alone; `absent`: there
    is none, regardless of committed ones. `secret` is the data key of `epoch`, or its id, at compile time."""

    policy: TenantCachePolicy
    blocked: bool
    entry: Entry | None
    absent: bool
    epoch: str
    secret: bytes | str | None = field(repr=False)
    _same: Entry | None = None

    def stands(self, world: World, policy: TenantCachePolicy) -> bool:
        return self.policy is policy and world.data_keys.get(self.epoch) == self.secret

    def as_committed(self, old: Entry | None, entry: Entry) -> Entry:
        """Return `old` if it enforces the same as `entry`; the comparison is cached."""
        if old is None:
            return entry
        if old is self._same and entry is self.entry:
            return old
        if not old.enforces_the_same_as(entry):
            return entry
        self._same = old
        return old


def _shares(world: World, model: CachedModel) -> list[_Share]:
    """Return the policies' shares, reused from the last plan where nothing changed. Most plans follow an edit of one
    policy among thousands: common inputs are compared once, policies by identity."""
    before: dict[str, _Share] = world.memo.get(BUNDLE, model.name, inputs_of_all(world, model), dict)
    shares = [
        share
        if (share := before.get(policy_name)) is not None and share.stands(world, policy)
        else _share(world, model, policy)
        for policy_name, policy in world.policies.items()
    ]
    before.clear()
    before.update(zip(world.policies, shares, strict=True))
    return shares


def _share(world: World, model: CachedModel, policy: TenantCachePolicy) -> _Share:
    inputs = gather(world, policy)
    compiled = compile_policy(world, inputs)
    absent = policy.metadata.deleting or not (inputs.blocked or selects(policy, model))
    has_entry = not absent and reaches(policy, inputs.epoch, model)
    entry = entry_in(world, model, compiled) if has_entry and compiled is not None else None
    epoch = inputs.epoch.epoch if inputs.epoch is not None else ""
    return _Share(policy, inputs.blocked is not None, entry, absent, epoch, world.data_keys.get(epoch))


def held_entry(bundle: Bundle | None, policy: TenantCachePolicy) -> Entry | None:
    """Return the entry of a policy in a bundle; its tenant never changes."""
    own = bundle.entries.get(policy.spec.tenant) if bundle else None
    return own if own is not None and own.policy == policy.uid else None


def entry_in(world: World, model: CachedModel, entry: Entry) -> Entry:
    """Return a policy's entry for the bundle of `model`: with its pools, and with data keys if its pods encrypt."""
    pools = (world.pools.get(name) for name in entry.pools)
    own = tuple(pool.name for pool in pools if pool is not None and pool.spec.model_ref.name == model.name)
    keys = entry.keys if seals(world, model) else ()
    return entry if (own, keys) == (entry.pools, entry.keys) else replace(entry, pools=own, keys=keys)


def still_allowed(world: World, model: CachedModel, policy: TenantCachePolicy, kept: Entry) -> Entry:
    """Return the last valid entry of a policy with an invalid spec, limited to keyspaces and budgets that are still
    allowed.

    An invalid spec must not protect its tenant from invalidations, retention limits, or a group, pool or tier that no
    longer admits it. It opens no closed tier either, because its new classification may be the invalid part.
    """
    inputs = gather(world, policy, kept.scope)
    kept = replace(kept, budgets=_reduced(inputs, kept.budgets), pools=may_read(world, kept.tenant, kept.pools))
    if inputs.keyspace is None or not reaches(policy, inputs.epoch, model):
        return replace(kept, suspended=True, resumes=False, keys=())
    return replace(kept.paused(inputs.paused), keyspace=inputs.keyspace, keys=inputs.keys)


def enforced(budget: Budget) -> EnforcedBudget:
    """Return a budget as pods enforce it, before admission, retention limits and classifications reduce it."""
    return EnforcedBudget(
        tier=budget.tier,
        limit_bytes=budget.limit_bytes,
        guaranteed_bytes=budget.guaranteed_bytes or None,
        retention_s=budget.retention_s,
    )


def enforced_rate(limit: RateLimit | None) -> EnforcedRateLimit:
    """Return rate limits as gates enforce them."""
    return EnforcedRateLimit(limit.requests_per_minute, limit.tokens_per_minute) if limit is not None else UNLIMITED


def as_admitted(admitted_bytes: Mapping[str, int], budget: EnforcedBudget) -> EnforcedBudget:
    """Return a budget with its guarantee as far as it is admitted."""
    if not budget.guaranteed_bytes:
        return budget
    admitted = min(budget.guaranteed_bytes, admitted_bytes.get(budget.tier, 0))
    return replace(budget, guaranteed_bytes=admitted or None)


def _reduced(inputs: PolicyInputs, budgets: Iterable[EnforcedBudget]) -> tuple[EnforcedBudget, ...]:
    """Reduce budgets by admission, retention limits and closed tiers. The limits of CPU tiers, and those set by tenants
    of a shared scope, apply without a budget too; the `maxRetention` of Redis tiers is in the bundle's rules."""
    by_tier = {name: EnforcedBudget(name) for name in inputs.aged}
    by_tier |= {budget.tier: as_admitted(inputs.admitted_bytes, budget) for budget in budgets}
    for name, budget in by_tier.items():
        longest_s = inputs.longest_s.get(name)
        if longest_s is not None and (budget.retention_s is None or budget.retention_s > longest_s):
            by_tier[name] = replace(budget, retention_s=longest_s)
    for name in inputs.denied:
        by_tier[name] = EnforcedBudget.denying(name, by_tier[name].retention_s if name in by_tier else None)
    return tuple(budget for _, budget in sorted(by_tier.items()))


def _declaring(world: World, policy: TenantCachePolicy, scope: Scope) -> tuple[Holder | None, tuple[Budget, ...]]:
    """Return the object that declares the budgets of a scope, if it exists, and these budgets."""
    match scope.kind:
        case ScopeKind.GROUP:
            group = world.groups.get(scope.name)
            return group, group.spec.budgets if group is not None else ()
        case ScopeKind.PUBLIC:
            return world.domain, world.domain_spec.public_budgets
        case _:
            return policy, policy.spec.budgets if policy.spec.isolation is Isolation.ISOLATED else ()


def rules_of(world: World, model: CachedModel) -> Rules:
    """Return the rules for all tenants of a model. A model with an invalid spec keeps the reuse in force, except that
    Disabled always applies. A model fenced after a failed isolation probe has none."""
    domain = world.domain_spec
    committed = world.bundles.get(model.name)
    reuse = str(model.spec.reuse.mode)
    if reuse != ReuseMode.DISABLED and first(model_chain.RULES, world, model):
        reuse = committed.bundle.root.rules.reuse if committed else str(ReuseMode.DISABLED)
    if is_fenced(model):
        reuse = str(ReuseMode.DISABLED)
    return Rules(
        stale_after_s=domain.stale_after.in_seconds,
        drain_timeout_s=domain.drain_timeout.in_seconds,
        on_stale=str(domain.on_stale),
        unknown_tenants=str(domain.unknown_tenants),
        reuse=reuse,
        audit_tenants=domain.audit_names is AuditNames.TENANTS,
        rate=enforced_rate(model.spec.gate.rate_limit),
        max_request_s=domain.max_request_duration.in_seconds,
    )


def usable_tiers(world: World, model: CachedModel) -> tuple[CacheTier, ...]:
    """Return the tiers that a model's pods use, from fast to slow, with the servers in force."""
    listed = (world.tiers[name] for name in model.tier_names if name in world.tiers)
    valid = (tier for tier in listed if not first(tier_chain.RULES, world, tier))
    return tuple(using for tier in valid if (using := in_force(tier)) is not None)


def tiers_of(world: World, model: CachedModel) -> tuple[TierRules, ...]:
    """Return the rules of a model's Redis tiers, from fast to slow."""
    return tuple(
        TierRules(
            tier.name,
            tuple(Server(host, port) for host, port in link.endpoints),
            stored_bytes(tier.spec),
            tier.spec.max_retention_s,
            cluster=tier.spec.is_cluster,
            username=link.username,
            password=link.password is not None,
            tls=link.ca is not None,
            encrypts=tier.spec.encryption_required,
            allowed=None if tier.spec.managed else world.allowed_servers,
        )
        for tier, link in _linked(world, model)
    )


def access_of(world: World, model: CachedModel, current: Bundle | None) -> dict[str, TierAccess]:
    """Return the access to a model's Redis tiers. The bundle keeps values that this process has not read."""
    held, found = current.root.access if current else {}, dict[str, TierAccess]()
    for tier, link in _linked(world, model):
        known, before = world.access.get(tier.name, {}), held.get(tier.name, TierAccess())
        password = known.get(link.password, before.password) if link.password is not None else None
        authority = known.get(link.ca, before.authority) if link.ca is not None else None
        if password or authority:
            found[tier.name] = TierAccess(password or None, authority or None)
    return found


def _linked(world: World, model: CachedModel) -> Iterator[tuple[CacheTier, RedisLink]]:
    for tier in usable_tiers(world, model):
        if (link := redis_link(tier)) is not None:
            yield tier, link


def selects(policy: TenantCachePolicy, model: CachedModel) -> bool:
    return policy.spec.covers(model.name, model.metadata.labels)


def reaches(policy: TenantCachePolicy, epoch: ScopeStatus | None, model: CachedModel) -> bool:
    """Whether the models on record allow a policy's entry with this epoch in a bundle: pods of others never had it."""
    recorded = (policy.status.models, epoch.models if epoch is not None else None)
    return all(models is None or model.name in models for models in recorded)


def paused_epochs(world: World) -> frozenset[str]:
    """Return the epochs of scopes that pause: while one of their prefixes is erased, no pod reuses or stores anything
    under them.

    They are treated as suspended: pods drop and erase their copies. Data on servers stays, except for the prefix, and
    is used again afterwards. The invalidation's status lists the paused scopes, so that a new leader knows them before
    it writes a bundle.
    """

    def find() -> frozenset[str]:
        return frozenset(
            scope.old_epoch
            for invalidation in world.invalidations.values()
            if invalidation.spec.scope.prefix is not None and not invalidation.finished
            for scope in invalidation.status.scopes
            if scope.old_epoch
        )

    return world.memo.get(paused_epochs, world.namespace, (world.entropy,), find)
