"""Facts of an erasure ordered by a deleted policy, because its namespace accepts no new objects.

There is no invalidation, and objects disappear meanwhile: `World.ending` has those that this process saw. If the policy
was deleted before this process began, a tier may have been lost unseen, and the record says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace
from kvstrata.contract.receipt.facts import Subject, Target
from kvstrata.contract.receipt.vocabulary import Hbm, Mode, ScopeForm, SubjectKind
from kvstrata.model.erasure.facts import Rolled, TierLost, Witness
from kvstrata.model.erasure.record import Erasure, ErasureOrder, ErasureRecord, LeftEpoch
from kvstrata.model.world import World
from kvstrata.plan.bundle.enforcement import bundles_lack
from kvstrata.plan.erasure import gather
from kvstrata.plan.erasure.next_step import ENDING_LIMIT_S
from kvstrata.plan.erasure.policy_deletion import reason_of
from kvstrata.plan.rules.invalidation import shared_by
from kvstrata.plan.witnesses import witnesses_now

UNKNOWN = ""
"""Represents tiers that may have been removed unseen."""


def begin(world: World, policy: TenantCachePolicy, now: datetime) -> ErasureRecord | None:
    """Return the record of the erasure; None if the names of the tenant's blocks are lost. The namespace waits for it,
    so it has a time limit and the rest is residue: no person remains to decide."""
    told, identity = policy.status.scope, world.identity
    if identity is None or told is None or told.kind != ScopeKind.TENANT:
        return None
    domain_key, domain = identity
    left = LeftEpoch(ScopeKind.TENANT, told.name, told.epoch, "")
    order = ErasureOrder(
        subject=_subject(policy),
        started=now,
        keyspaces=(derive_keyspace(domain_key, Scope(left.kind, left.name), left.old),),
        tiers=gather.shared_tiers(_tiers(world).values()),
        excluded_scopes=gather.left_out(shared_by(world, policy)),
        deadline_s=ENDING_LIMIT_S,
        allow_residue=True,
        versions=(gather.OPERATOR,),
    )
    erasure = Erasure(order).with_facts(*gather.servers_seen(world, order), *_lost(world, policy, now))
    keys = gather.keys_held(world, domain, (left,))
    return ErasureRecord(policy.namespace, policy.name, domain, (left,), keys, erasure)


def rolled(world: World, record: ErasureRecord, now: datetime) -> Rolled | None:
    """Return the fact that no bundle has the policy, once true."""
    if not bundles_lack(world, frozenset(record.erasure.order.keyspaces)):
        return None
    tiers, models = _tiers(world), {**world.ending.models, **world.models}
    pods = {witness.uid: witness for witness in witnesses_now(world, now)}
    return Rolled(
        now,
        gather.revoked(record),
        tuple(
            Target(name, committed.bundle.root.revision)
            for name, committed in sorted(world.bundles.items())
            if name in world.models
        ),
        tuple(
            Witness(one.model, uid, one.pod, gather.inside(models.get(one.model), tiers)) for uid, one in pods.items()
        ),
        record.keys,
    )


def _tiers(world: World) -> dict[str, CacheTier]:
    return {**world.ending.tiers, **world.tiers}


def _lost(world: World, policy: TenantCachePolicy, now: datetime) -> Iterator[TierLost]:
    for name, tier in sorted(world.ending.tiers.items()):
        if name not in world.tiers and tier.spec.outlives_pods:
            yield TierLost(name, now)
    if policy.uid not in world.ending.witnessed:
        yield TierLost(UNKNOWN, now)


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
