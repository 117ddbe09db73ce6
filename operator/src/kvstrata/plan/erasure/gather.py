"""Facts of an erasure from the world: its order, facts to record before any roll, witnesses and their reports.

Scopes, revisions and pods come from the invalidation's status, written by the plan that rolls epochs for lazy ones too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from kvstrata import __version__
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cacheinvalidation import CacheInvalidation, InvalidationScope, RolledScope
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.scalars import format_timestamp
from kvstrata.api.status import Store
from kvstrata.contract.policy.data_key import key_id
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace
from kvstrata.contract.receipt.facts import IMAGE_OF, NOTHING, Component, Fence, Revoked, Subject, Target
from kvstrata.contract.receipt.vocabulary import (
    KeyCustody,
    Mode,
    PodMedium,
    RevokedKind,
    ScopeForm,
    Standing,
    SubjectKind,
    epoch_commitment,
    prefix_commitment,
)
from kvstrata.contract.store.block_file import ROOT
from kvstrata.contract.store.redis_keys import resolved
from kvstrata.model.erasure.evidence import (
    counts,
    files_left,
    has_acknowledged,
    standing_of,
    tiers_at_hand,
    unreachable_at,
    witnesses,
)
from kvstrata.model.erasure.facts import HeldKey, HeldTier, Look, PodSeen, Rolled, ServersSeen, TierLost, Witness
from kvstrata.model.erasure.record import ErasedPrefix, Erasure, ErasureOrder, ErasureRecord, LeftEpoch, SharedTier
from kvstrata.model.pods import Pod
from kvstrata.model.world import World
from kvstrata.plan.erasure.epoch_rolls import holder_of, leaves
from kvstrata.plan.erasure.prefix import chunks_of as prefix_chunks
from kvstrata.plan.pools.content import given_source
from kvstrata.plan.redis.backend import former_stores, places_of, report_of, stores_of
from kvstrata.plan.redis.cluster import never_used
from kvstrata.plan.rules.invalidation import scopes_to_leave
from kvstrata.plan.witnesses import FENCE_MARGIN_S, ended_pods, has_waited, is_fenced, not_started
from kvstrata.plan.witnesses import Witness as Awaited

_IN_PODS = {Medium.CPU: PodMedium.CPU, Medium.NVME: PodMedium.NVME}

MAX_IDENTITIES = 64
"""Most identities of models, and most images of pods, in a receipt."""

OWN_MEMORY = ""
"""Pods' name for the memory of a cache server without a CPU tier."""


def begin(world: World, invalidation: CacheInvalidation) -> ErasureRecord | None:
    """Return the record of an eager invalidation before its epochs are rolled. None while its intent is not in its
    status or the domain has no identity, and after its end."""
    status, started = invalidation.status, invalidation.status.start_time
    if invalidation.finished or started is None or not status.scopes or world.identity is None:
        return None
    domain_key, domain = world.identity
    prefix = invalidation.spec.scope.prefix
    erased_prefix: ErasedPrefix | None = None
    if prefix is not None:
        chunks = prefix_chunks(world, invalidation, started).made
        if not chunks:
            return None
        model = prefix.model_ref.name
        content = given_source(prefix.content).digest
        erased_prefix = ErasedPrefix(model, chunks, prefix_commitment(domain_key, model, content))
    epochs = tuple(
        LeftEpoch(ScopeKind(one.kind), one.name, one.old_epoch, _successor(world, one))
        for one in status.scopes
        if one.old_epoch
    )
    former = former_stores(world, (*status.stores, *stores_of(world, {one.old for one in epochs})))
    chosen = {tier.name for tier in invalidation.spec.tiers}
    meant = {name: tier for name, tier in world.tiers.items() if not chosen or name in chosen}
    keyspaces = {derive_keyspace(domain_key, Scope(one.kind, one.name), one.old) for one in epochs}
    order = ErasureOrder(
        subject=_subject(invalidation),
        started=started,
        keyspaces=tuple(sorted(keyspaces)),
        tiers=shared_tiers(meant.values()),
        excluded_tiers=tuple(sorted({*world.tiers, *(store.tier for store in former)} - chosen)) if chosen else (),
        excluded_scopes=left_out(scopes_to_leave(world, invalidation)),
        deadline_s=invalidation.spec.deadline_s,
        allow_residue=invalidation.spec.allow_residue,
        prefix=erased_prefix,
        versions=versions(world, invalidation.spec.scope.model),
        folders=tuple(sorted(name for name, tier in meant.items() if tier.spec.outlives_pods)),
    )
    # The rest of a keyspace stays readable with the same keys.
    keys = keys_held(world, domain, epochs if prefix is None else ())
    erasure = Erasure(order).with_facts(*servers_seen(world, order), *stores_lost(order, former))
    return ErasureRecord(invalidation.namespace, invalidation.name, domain, epochs, keys, erasure)


def shared_tiers(tiers: Iterable[CacheTier]) -> tuple[SharedTier, ...]:
    """Return the Redis tiers among these, whether or not a model lists them."""
    found = sorted((tier for tier in tiers if tier.spec.medium is Medium.REDIS), key=lambda tier: tier.name)
    return tuple(SharedTier(tier.name, tier.spec.encryption_required, places_of(tier)) for tier in found)


def stores_lost(order: ErasureOrder, former: Iterable[Store]) -> Iterator[TierLost]:
    """Yield the former stores of an order as lost tiers; each server of one, if a tier has its name."""
    named = {tier.name for tier in order.tiers}
    for store in former:
        if not order.subject.tiers or store.tier in order.subject.tiers:
            for server in store.places if store.tier in named else ("",):
                yield TierLost(store.tier, order.started, server=server)


def versions(world: World, model: str | None = None) -> tuple[Component, ...]:
    """Return the versions at the beginning of an erasure: the operator's, identities under which pods of the namespace
    serve, or which are kept for a rollback, and pods' images, those of `model` first. Keyspaces hold blocks of all."""
    models = sorted({**world.ending.models, **world.models}.values(), key=lambda one: (one.name != model, one.name))
    found: list[Component] = []
    for one in models:
        name, status = f"{one.INFO.kind} {one.name}", one.status
        found += [Component(name, resolved(row.identity, row.fingerprint), row.pods) for row in status.fingerprints]
        found += [Component(name, former.identity, 0) for former in status.former_identities]
    images = Counter((one, *image) for one in world.pods for pod in world.live_pods(one) for image in pod.images)
    pulled = [
        Component(f"{IMAGE_OF}{container} of {CachedModel.INFO.kind} {one}", image, count)
        for (one, container, image), count in sorted(images.items(), key=lambda row: (row[0][0] != model, row[0]))
    ]
    return (Component("operator", __version__, 1), *found[:MAX_IDENTITIES], *pulled[:MAX_IDENTITIES])


def servers_seen(world: World, order: ErasureOrder) -> Iterator[ServersSeen]:
    """Yield versions of the servers of an order's tiers. A new leader has asked none of them yet, so this is repeated
    while the erasure lasts."""
    for shared in order.tiers:
        tier = world.tiers.get(shared.name)
        report = report_of(world, tier) if tier is not None else None
        if report is not None and report.version:
            yield ServersSeen(shared.name, report.software, report.version, report.at)


def left_out(scopes: Iterable[Scope]) -> tuple[str, ...]:
    return tuple("Public" if scope.kind is ScopeKind.PUBLIC else scope.name for scope in scopes)


def keys_held(world: World, domain: str, epochs: Iterable[LeftEpoch]) -> tuple[HeldKey, ...]:
    found = ((one, world.data_keys[one.old]) for one in epochs if one.old in world.data_keys)
    return tuple(
        HeldKey(key, _commitment(domain, one), KeyCustody.KMS)
        if isinstance(key, str)
        else HeldKey(key_id(key), _commitment(domain, one), KeyCustody.SECRET)
        for one, key in found
    )


def lacks_keys(world: World, record: ErasureRecord) -> bool:
    """Whether keys to erase are still being unwrapped, so that their ids are unknown. Without its CacheDomain a
    namespace has no KMS, so none will come. The keys of a prefix stay."""
    if world.domain is None or record.erasure.order.prefix is not None:
        return False
    return any(left.old in world.keys_unwrapping and left.old not in world.data_keys for left in record.epochs)


def rolled(world: World, invalidation: CacheInvalidation, record: ErasureRecord) -> Rolled | None:
    """Return the fact that every bundle follows, once status shows it."""
    status = invalidation.status
    if status.rolled_time is None:
        return None
    prefix = record.erasure.order.prefix
    gone = (Revoked(RevokedKind.PREFIX, prefix.model, prefix.commitment, None),) if prefix else revoked(record)
    targets = tuple(Target(target.model, target.revision) for target in status.targets)
    pods = {pod.uid: (pod.model, pod.pod) for pod in status.awaiting}
    models = {target.model for target in targets}
    # Some may have been reported as running only after the status was written.
    pods |= {pod.uid: (model, pod.name) for model in sorted(models) for pod in world.live_pods(model)}
    return Rolled(status.rolled_time, gone, targets, as_witnesses(world, record, pods), record.keys)


def revoked(record: ErasureRecord) -> tuple[Revoked, ...]:
    """Return the scopes that become unreachable, as in receipts; only the ordered tenant is named."""
    subject = record.erasure.order.subject
    named = subject.scope_name if subject.scope is ScopeForm.TENANT else None
    return tuple(
        Revoked(
            RevokedKind(str(one.kind)),
            one.name if one.kind is not ScopeKind.TENANT or one.name == named else None,
            _commitment(record.domain, one),
            epoch_commitment(record.domain, one.kind, one.name, one.new) if one.new else None,
        )
        for one in record.epochs
    )


def reports(world: World, record: ErasureRecord, awaiting: tuple[Awaited, ...], now: datetime) -> Iterator[PodSeen]:
    """Yield new reports of witnesses, or facts about them."""
    erasure = record.erasure
    stated = erasure.only(Rolled)
    revisions = {target.model: target.revision for target in stated.targets} if stated else {}
    live = {pod.uid: pod for model in world.pods for pod in world.live_pods(model)}
    ended = ended_pods(world, waited=stated is not None and has_waited(world, stated.at, now))
    fences = {pod.uid: pod.fenced_by for pod in awaiting}
    for witness in witnesses(erasure):
        settled = standing_of(erasure, witness.uid)
        if settled is not None and settled.standing is Standing.ENDED:
            continue
        pod = live.get(witness.uid)
        if witness.uid in ended:
            yield PodSeen(witness.uid, Standing.ENDED, now)
        elif pod is not None and (word := _acknowledged(world, pod, revisions.get(witness.model))):
            if not has_acknowledged(erasure, witness.uid, word.boots):
                yield word
        elif settled is None and (fence := _fence(world, witness, pod, fences.get(witness.uid), now)):
            yield PodSeen(witness.uid, Standing.FENCED, now, fence=fence)
    yield from _joining(world, record, revisions)


def _joining(world: World, record: ErasureRecord, revisions: Mapping[str, int]) -> Iterator[PodSeen]:
    """Yield pods that acknowledged and use a folder in which a witness that ended left files."""
    left, known = files_left(record.erasure), {one.uid for one in witnesses(record.erasure)}
    for model, needed in revisions.items() if left else ():
        live = {pod.uid: pod for pod in world.live_pods(model) if pod.uid not in known}
        for new in as_witnesses(world, record, {uid: (model, pod.name) for uid, pod in live.items()}):
            seen = _acknowledged(world, live[new.uid], needed)
            if seen is not None and not left.isdisjoint(new.tiers):
                yield replace(seen, joins=new)


def pods_at_hand(world: World, erasure: Erasure) -> dict[str, tuple[str, str]]:
    live = {pod.uid: pod for model in world.pods for pod in world.live_pods(model)}
    found = {}
    for witness in witnesses(erasure):
        seen_state = world.states.get(witness.uid)
        if witness.uid in live and seen_state is not None and seen_state.in_contact and seen_state.state.cache_boot:
            found[witness.uid] = (seen_state.state.gate_boot, seen_state.state.cache_boot)
    return found


def tiers_lost(world: World, erasure: Erasure, now: datetime) -> Iterator[TierLost]:
    """Yield tiers that are gone, tiers that held nothing, and servers that vanished. It follows the new epochs, so a
    tier that pods begin to use later gets nothing of the old ones once every pod is settled."""
    settled, since = unreachable_at(erasure) is not None, erasure.order.started.replace(microsecond=0)
    for tier in tiers_at_hand(erasure):
        known = world.tiers.get(tier.name) or world.ending.tiers.get(tier.name)
        if known is not None and tier.places and set(tier.places).isdisjoint(places_of(known)):
            known = None  # the name is another store's now
        gone = known is None or known.metadata.deleting or tier.name not in world.tiers
        unused = known is not None and never_used(world, known)
        if gone or (unused and settled):
            yield TierLost(tier.name, now, unused=unused)
            continue
        for lost in world.lost_servers.get(tier.name, ()):
            if lost.at >= since and not _verified_before(erasure, tier.name, lost.at):
                yield TierLost(tier.name, lost.at, server=lost.name)


def _verified_before(erasure: Erasure, tier: str, at: datetime) -> bool:
    look = erasure.only(Look, tier)
    return look is not None and look.ended <= at and counts(erasure, look) and set(look.left.values()) == {NOTHING}


def tier_away(world: World, tier: CacheTier) -> str:
    """Return why a tier's servers do not answer the regular checks; empty if they do."""
    report = report_of(world, tier)
    if report is None:
        ready = tier.status.condition(ConditionType.READY)
        return ready.message if ready is not None and ready.message else "its servers have not been asked yet"
    return "" if report.reachable else report.message


def epoch_of(record: ErasureRecord, fingerprint: str) -> LeftEpoch | None:
    revoked = next((key.revoked for key in record.keys if key.fingerprint == fingerprint), None)
    return next((one for one in record.epochs if _commitment(record.domain, one) == revoked), None)


def _acknowledged(world: World, pod: Pod, needed: int | None) -> PodSeen | None:
    seen_state = world.states.get(pod.uid)
    if seen_state is None or needed is None or world.acked_revision(pod) < needed:
        return None
    state = seen_state.state
    if not (state.gate_boot and state.cache_boot):
        return None
    return PodSeen(pod.uid, Standing.ACKED, seen_state.at, state.gate_boot, state.cache_boot, state.acked)


def _fence(world: World, witness: Witness, pod: Pod | None, fenced_by: datetime | None, now: datetime) -> Fence | None:
    committed = world.bundles.get(witness.model)
    one = Awaited(witness.model, witness.name, witness.uid, fenced_by)
    if committed is None or not committed.whole or fenced_by is None or not is_fenced(world, one, pod, now):
        return None
    root = committed.bundle.root
    # Of a pod that may have had earlier rules the longest counts.
    whole_s, stale_s = max(root.rules.longest_s, root.end_s or 0), root.rules.stale_after_s
    last_fresh = fenced_by - timedelta(seconds=whole_s + FENCE_MARGIN_S)
    return Fence(format_timestamp(last_fresh), stale_s, whole_s - stale_s, format_timestamp(now))


def _subject(invalidation: CacheInvalidation) -> Subject:
    spec = invalidation.spec
    form, name = _form(spec.scope)
    return Subject(
        kind=SubjectKind.INVALIDATION,
        name=invalidation.name,
        uid=invalidation.uid,
        scope=form,
        scope_name=name,
        tenants=spec.scope.named_tenants if spec.scope.prefix is not None else (),
        mode=Mode.EAGER,
        hbm=spec.hbm,
        tiers=tuple(tier.name for tier in spec.tiers),
        reason=spec.reason or "",
    )


def _successor(world: World, rolled: RolledScope) -> str:
    """Return a scope's new epoch; empty if it ends, also if that was decided after the draw."""
    holder = holder_of(world, Scope(ScopeKind(rolled.kind), rolled.name))
    return "" if leaves(holder) else rolled.new_epoch or ""


def _form(scope: InvalidationScope) -> tuple[ScopeForm, str]:
    if scope.prefix is not None:
        return ScopeForm.PREFIX, scope.prefix.model_ref.name
    for form in (ScopeForm.TENANT, ScopeForm.GROUP, ScopeForm.POOL, ScopeForm.MODEL):
        if (name := getattr(scope, str(form))) is not None:
            return form, name
    return ScopeForm.ALL, ""


def _commitment(domain: str, left: LeftEpoch) -> str:
    return epoch_commitment(domain, left.kind, left.name, left.old)


def as_witnesses(world: World, record: ErasureRecord, pods: Mapping[str, tuple[str, str]]) -> tuple[Witness, ...]:
    """Return pods, given model and name by uid, with their tiers that the order includes."""
    tiers, models = {**world.ending.tiers, **world.tiers}, {**world.ending.models, **world.models}
    chosen, empty = frozenset(record.erasure.order.subject.tiers), not_started(world)
    nodes = {pod.uid: pod.node for own in world.pods.values() for pod in own.values() if pod.node}

    def inside(uid: str, name: str) -> Iterator[HeldTier]:
        model = models.get(name)
        listed = [tiers[tier] for tier in (model.tier_names if model else ()) if tier in tiers]
        for tier in listed:
            medium = _IN_PODS.get(tier.spec.medium)
            if medium is not None and (not chosen or tier.name in chosen):
                folder, node = tier.spec.nvme and tier.spec.nvme.host_path, nodes.get(uid, f"node of {uid}")
                place = f"{node}:{folder.path}/{ROOT}/{record.domain}/{tier.name}/{name}" if folder else ""
                yield HeldTier(tier.name, medium, tier.spec.encryption_required, folder is not None, place)
        if not chosen and all(tier.spec.medium is not Medium.CPU for tier in listed):
            yield HeldTier(OWN_MEMORY, PodMedium.CPU, False, False)

    return tuple(
        Witness(model, uid, name, () if uid in empty else tuple(inside(uid, model)))
        for uid, (model, name) in pods.items()
    )
