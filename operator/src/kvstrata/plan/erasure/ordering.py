"""The order of an erasure in the world: an invalidation, or a deleted policy whose namespace accepts no new objects.

There is no invalidation then, and objects disappear meanwhile: `World.ending` has those that this process saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace
from kvstrata.contract.receipt.facts import Subject, Target
from kvstrata.contract.receipt.vocabulary import Hbm, Mode, ScopeForm, SubjectKind
from kvstrata.model.erasure.facts import Fact, Rolled
from kvstrata.model.erasure.record import Erasure, ErasureOrder, ErasureRecord, LeftEpoch, Observed
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects.labels import ERASES
from kvstrata.plan.bundle.enforcement import bundles_lack
from kvstrata.plan.erasure import gather
from kvstrata.plan.erasure.advance import Woken
from kvstrata.plan.erasure.next_step import ENDING_LIMIT_S
from kvstrata.plan.erasure.policy_deletion import ABANDON, overdue, reason_of
from kvstrata.plan.redis.backend import former_stores
from kvstrata.plan.rules.invalidation import shared_by
from kvstrata.plan.witnesses import awaited, witnesses_now

Ordering = CacheInvalidation | TenantCachePolicy


def begin(world: World, key: Key, found: Ordering | None, now: datetime) -> ErasureRecord | None:
    """Return the initial record, stored before anything is done; None while it is incomplete. It waits for missing
    data keys, so that they are revoked with their data, unless the erasure is abandoned or overdue."""
    if found is None:
        return None
    record = _begin_of_policy(world, found, now) if isinstance(found, TenantCachePolicy) else gather.begin(world, found)
    waits = (
        record is not None
        and gather.lacks_keys(world, record)
        and not (_abandoned(world, key, found) or _overdue(world, found, now))
    )
    return None if waits else record


def is_over(world: World, key: Key, found: Ordering | None) -> bool:
    return key not in world.unreadable if found is None else _has_finished(found)


def woken(
    world: World, key: Key, found: Ordering | None, record: ErasureRecord, elsewhere: int, now: datetime
) -> Woken:
    """Return the present facts of the world. `elsewhere` counts running Jobs of other erasures. The namespace is known
    to be going when its domain is gone and the order is deleted, too."""
    going = found is not None and found.metadata.deleting and world.domain is None
    observed = Observed(
        pods=gather.pods_at_hand(world, record.erasure),
        deletions_elsewhere=elsewhere,
        abandoned=_abandoned(world, key, found),
        overdue=_overdue(world, found, now, record.erasure.order.started),
        unattended=now if going else None,
    )
    return Woken(tuple(_news(world, found, record, now)), observed)


def _news(world: World, found: Ordering | None, record: ErasureRecord, now: datetime) -> Iterator[Fact]:
    if found is None:
        return
    if record.erasure.only(Rolled) is None and (rolled := _rolled(world, found, record, now)) is not None:
        # Acknowledgements are compared with it, so it comes first and alone.
        yield rolled
        return
    yield from gather.reports(world, record, awaited(world, found) if isinstance(found, CacheInvalidation) else (), now)
    yield from gather.servers_seen(world, record.erasure.order)
    yield from gather.tiers_lost(world, record.erasure, now)


def _abandoned(world: World, key: Key, found: Ordering | None) -> str:
    """Return why the erasure is abandoned: by an annotation of the order or of the deleted policy, or because the order
    was removed or has finished. Empty if it is not."""
    if found is None:
        return "" if key in world.unreadable else "the object that ordered it was removed"
    policy = _deleted_policy(world, found)
    reported = [one.metadata.annotations.get(ABANDON, "").strip() for one in (found, policy) if one is not None]
    failed = "the object that ordered it had failed before the kept blocks were known"
    return next(filter(None, reported), failed if _has_finished(found) else "")


def _deleted_policy(world: World, found: Ordering) -> TenantCachePolicy | None:
    """Return the policy that waits for the order, if any."""
    if isinstance(found, TenantCachePolicy):
        return found
    return world.policies.get(world.policy_names.get(found.metadata.annotations.get(ERASES, ""), ""))


def _overdue(world: World, found: Ordering | None, now: datetime, began: datetime | None = None) -> str:
    """Return why the erasure ends unproven: the order, or the policy that waits for it, was deleted too long ago."""
    waiting = (found, _deleted_policy(world, found)) if found is not None else ()
    late = (overdue(one, world.domain_spec.deletion_deadline, now, began) for one in waiting if one is not None)
    return next(filter(None, late), "")


def _has_finished(found: Ordering) -> bool:
    return isinstance(found, CacheInvalidation) and found.finished


def _begin_of_policy(world: World, policy: TenantCachePolicy, now: datetime) -> ErasureRecord | None:
    """Return the record of the erasure; None if the names of the tenant's blocks are lost. The namespace waits for it,
    so it has a time limit and the rest is residue: no person remains to decide."""
    reported, identity = policy.status.scope, world.identity
    if identity is None or reported is None or reported.kind != ScopeKind.TENANT:
        return None
    domain_key, domain = identity
    left = LeftEpoch(ScopeKind.TENANT, reported.name, reported.epoch, "")
    order = ErasureOrder(
        subject=_subject(policy),
        started=now,
        keyspaces=(derive_keyspace(domain_key, Scope(left.kind, left.name), left.old),),
        tiers=gather.shared_tiers(world.tiers.values()),
        excluded_scopes=gather.left_out(shared_by(world, policy)),
        deadline_s=ENDING_LIMIT_S,
        allow_residue=True,
        versions=gather.versions(world),
        folders=tuple(sorted(name for name, tier in world.tiers.items() if tier.spec.outlives_pods)),
    )
    lost = gather.stores_lost(order, former_stores(world, reported.stores))
    erasure = Erasure(order).with_facts(*gather.servers_seen(world, order), *lost)
    keys = gather.keys_held(world, domain, (left,))
    return ErasureRecord(policy.namespace, policy.name, domain, (left,), keys, erasure)


def _rolled(world: World, found: Ordering, record: ErasureRecord, now: datetime) -> Rolled | None:
    """Return the fact that every bundle follows, or that none has the policy, once true."""
    if isinstance(found, CacheInvalidation):
        return gather.rolled(world, found, record)
    reached = found.status.models
    if not bundles_lack(world, frozenset(record.erasure.order.keyspaces), reached):
        return None
    pods = {one.uid: (one.model, one.pod) for one in witnesses_now(world, now, models=reached)}
    return Rolled(
        now,
        gather.revoked(record),
        tuple(
            Target(name, committed.bundle.root.revision)
            for name, committed in sorted(world.bundles.items())
            if name in world.models and (reached is None or name in reached)
        ),
        gather.as_witnesses(world, record, pods),
        record.keys,
    )


def _subject(policy: TenantCachePolicy) -> Subject:
    return Subject(
        kind=SubjectKind.POLICY,
        name=policy.name,
        uid=policy.uid,
        scope=ScopeForm.TENANT,
        scope_name=policy.spec.tenant,
        tenants=(),
        mode=Mode.EAGER,
        hbm=Hbm.ROLL_SCOPES,
        tiers=(),
        reason=reason_of(policy),
    )
