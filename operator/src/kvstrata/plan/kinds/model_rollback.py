"""Former identities of a model: kept for a rollback, then their blocks are deleted from Redis tiers.

A declared identity is former once the model has another one, and stands for all of its blocks; a fingerprint of the
present one once every serving pod has another one.
Every name in a tier holds the identity that computed the block, so pods of another identity never find it; deletion
only frees space. Therefore it waits for `rollbackWindow`, and blocks that it cannot find may expire. Status records
each step first, so that a new leader continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedmodel_status import MAX_FORMER_IDENTITIES, FormerIdentity, FormerPhase
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.store.redis_keys import declared, resolved
from kvstrata.model.erasure.facts import JobState
from kvstrata.model.pods import CommittedBundle
from kvstrata.model.reclaim import FormerCache, ReclaimReport
from kvstrata.model.world import World
from kvstrata.objects import labels, names
from kvstrata.plan.actions import Action, EndReclaim, ReclaimFormer
from kvstrata.plan.kinds.model_identity import fingerprints, left_fingerprints
from kvstrata.plan.redis.backend import in_force

FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 1800.0

LOOK_AGAIN_S = 60.0

SOON_S = 1.0
_NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class FormerCaches:
    """Former identities for status, in API form, and the resulting actions. `urgent`: status has something on which
    others depend."""

    fields: Mapping[str, Any]
    actions: tuple[Action, ...]
    wake_after_s: float | None
    urgent: bool


@dataclass(frozen=True, slots=True)
class _Judged:
    """The result for one former identity. Without `phase` it is finished, or in use again."""

    identity: str
    phase: FormerPhase | None
    message: str = ""
    since: datetime | None = None
    round: int = 1
    blocks: int = 0
    bytes: int = 0
    question: ReclaimFormer | None = None
    wake_after_s: float | None = None

    def to_kubernetes(self) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "phase": str(self.phase),
            **({"message": self.message} if self.message else {}),
            **({"unusedSince": format_timestamp(self.since)} if self.since is not None else {}),
            **({"round": self.round} if self.round > 1 else {}),
            **({"blocks": self.blocks, "bytes": self.bytes} if self.blocks else {}),
        }


def former_caches(world: World, model: CachedModel, identity: str, now: datetime, *, rolled_out: bool) -> FormerCaches:
    """Return the state of the identities that a model had before `identity`. `rolled_out`: its pods run the newest
    template, and by the Deployment no others are left."""
    reported = {one.identity: one for one in model.status.former_identities}
    shared = any(tier.spec.medium is Medium.REDIS for tier in world.tiers.values())
    rows = fingerprints(world, model)
    left = left_fingerprints(world, model, rows) if rolled_out else []
    used = [row for row in rows if row not in left]
    known = (_known(world, model, reported) | {_resolved(row) for row in left}) - {identity, *map(_resolved, used)}
    known = {name for name in known if shared and declared(name) in (name, identity)}
    judged = [_judge(world, model, name, reported.get(name), now, rolled_out) for name in sorted(known)]
    stays = [one for one in judged if one.phase is not None]
    stays = sorted(stays, key=lambda one: one.since or _NEVER, reverse=True)[:MAX_FORMER_IDENTITIES]
    entries = [one.to_kubernetes() for one in sorted(stays, key=lambda one: one.identity)]
    done = [one for one in judged if one.phase is None]
    fields: dict[str, Any] = {"formerIdentities": entries, "fingerprints": used}
    if done:
        fields["reclaimed"] = {
            "identity": done[-1].identity,
            "time": format_timestamp(now),
            "blocks": done[-1].blocks,
            "bytes": done[-1].bytes,
        }
    ends = (EndReclaim(cache) for cache in _ends(world, model, reported.values(), judged))
    questions = (one.question for one in stays if one.question is not None)
    wakes = [one.wake_after_s for one in judged if one.wake_after_s is not None]
    urgent = _marks(entries) != _marks(one.to_kubernetes() for one in reported.values())
    return FormerCaches(fields, (*ends, *questions), min(wakes, default=None), urgent)


def reclaimable_tiers(tiers: Iterable[CacheTier]) -> tuple[CacheTier, ...]:
    shared = (tier for tier in tiers if tier.spec.medium is Medium.REDIS and not tier.metadata.deleting)
    using = (found for tier in shared if (found := in_force(tier)) is not None)
    return tuple(sorted(using, key=lambda tier: tier.name))


def keyspaces_in_force(bundles: Iterable[CommittedBundle]) -> tuple[str, ...]:
    found = set[str]()
    for committed in bundles:
        found |= {entry.keyspace for entry in committed.bundle.entries.values()}
        found |= committed.bundle.pool_keyspaces
    return tuple(sorted(found))


def _known(world: World, model: CachedModel, reported: Mapping[str, FormerIdentity]) -> set[str]:
    deployment = world.children.get(("Deployment", names.model_child(model.name)))
    template = deployment["spec"]["template"]["metadata"] if deployment is not None else {}
    deployed = (template.get("labels") or {}).get(labels.IDENTITY)
    found = {*reported, *_of_pods(world, model.name), model.status.identity, deployed}
    return {name for name in found if name}


def _judge(
    world: World, model: CachedModel, name: str, reported: FormerIdentity | None, now: datetime, rolled_out: bool
) -> _Judged:
    if name in _of_pods(world, model.name):
        return _Judged(name, FormerPhase.IN_USE, "pods of this model still have it")
    since = reported.unused_since if reported is not None else None
    if since is None:
        if not rolled_out:
            return _Judged(name, FormerPhase.IN_USE, "the rollout that replaces it is not over")
        since = now
    holder = _holder(world, model, name, now)
    if holder is not None:
        message = f"CachedModel {holder} has it, too"
        return _Judged(name, FormerPhase.IN_USE, message, since, wake_after_s=LOOK_AGAIN_S)
    until = since + timedelta(seconds=model.spec.rollback_window.in_seconds)
    if now < until:
        left_s = max(SOON_S, (until - now).total_seconds())
        message = f"a rollback finds it until {format_timestamp(until)}"
        return _Judged(name, FormerPhase.KEPT, message, since, wake_after_s=left_s)
    if reported is None or reported.unused_since is None or model.name not in world.bundles:
        return _Judged(name, FormerPhase.RECLAIMING, "its deletion begins", since, wake_after_s=SOON_S)
    return _reclaim(world, reported, FormerCache(model.name, model.uid, name, since), now)


def _reclaim(world: World, reported: FormerIdentity, cache: FormerCache, now: datetime) -> _Judged:
    """Return the next state of the deletion. A round is in status before it begins."""
    turn, blocks, size = reported.round or 1, reported.blocks or 0, reported.bytes or 0

    def going_on(message: str, question: ReclaimFormer | None, wake_after_s: float | None = None) -> _Judged:
        return _Judged(
            cache.identity, FormerPhase.RECLAIMING, message, cache.since, turn, blocks, size, question, wake_after_s
        )

    report, before = world.reclaims.get((cache.order, turn)), world.reclaims.get((cache.order, turn - 1))
    if report is None:
        left_s = _pause_left_s(before, turn, now)
        if left_s > 0:
            return going_on(reported.message or "", None, left_s)
        return going_on(reported.message or "its deletion begins", ReclaimFormer(cache, turn))
    if report.state is JobState.RUNNING:
        return going_on(report.message or "its blocks are being deleted", ReclaimFormer(cache, turn))
    blocks, size = blocks + report.deleted.keys, size + report.deleted.bytes
    if report.state is JobState.DONE:
        return _Judged(cache.identity, None, blocks=blocks, bytes=size, wake_after_s=SOON_S)
    turn += 1
    return going_on(f"its deletion is tried again: {report.message}"[:1024], None, SOON_S)


def _pause_left_s(before: ReclaimReport | None, turn: int, now: datetime) -> float:
    if before is None:
        return 0.0
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(turn - 2, 10))
    return max(0.0, pause_s - (now - before.at).total_seconds())


def _ends(
    world: World, model: CachedModel, reported: Iterable[FormerIdentity], judged: Iterable[_Judged]
) -> Iterable[FormerCache]:
    phases = {one.identity: one.phase or FormerPhase.RECLAIMING for one in judged}
    orders = set[str]()
    for one in reported:
        if one.unused_since is None:
            continue
        cache = FormerCache(model.name, model.uid, one.identity, one.unused_since)
        orders.add(cache.order)
        if one.phase is FormerPhase.RECLAIMING and phases.get(one.identity) is not FormerPhase.RECLAIMING:
            yield cache
    mine = {report.cache for report in world.reclaims.values() if report.cache.model == model.name}
    yield from sorted((cache for cache in mine if cache.order not in orders), key=lambda cache: cache.order)


def _holder(world: World, model: CachedModel, name: str, now: datetime) -> str | None:
    for other in world.models.values():
        if other.uid == model.uid or other.metadata.deleting:
            continue
        kept = [one for one in other.status.former_identities if one.identity in (name, declared(name))]
        window = timedelta(seconds=other.spec.rollback_window.in_seconds)
        waits = any(one.unused_since is None or now < one.unused_since + window for one in kept)
        serving = {resolved(row.identity, row.fingerprint) for row in other.status.fingerprints}
        if waits or name in {other.status.identity, *serving, *_of_pods(world, other.name)}:
            return other.name
    return None


def _resolved(row: Mapping[str, Any]) -> str:
    return resolved(row["identity"], row["fingerprint"])


def _of_pods(world: World, model: str) -> set[str]:
    return {pod.identity for pod in (world.pods.get(model) or {}).values() if pod.identity and not pod.finished}


def _marks(entries: Iterable[Mapping[str, Any]]) -> set[tuple[Any, ...]]:
    return {(one["identity"], one["phase"], one.get("unusedSince"), one.get("round")) for one in entries}
