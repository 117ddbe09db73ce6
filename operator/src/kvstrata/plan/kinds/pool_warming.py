"""A pool's content after rendering: warmed, published, replaced, repaired.

Each step is one write of the pool's status, from which the bundle follows, so a new leader continues. What pods hold is
read repeatedly (`inspections`) and not stored as intent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.conditions import ConditionType
from kvstrata.api.prefixpool import NextContent, PrefixPool
from kvstrata.api.reasons import PoolReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.messages.pools import PoolTierState, PoolVersionState, WarmOutcome
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, PoolVersion
from kvstrata.model.guarantees import is_whole as is_whole_content
from kvstrata.model.pods import Pod
from kvstrata.model.pools import WarmReport
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects.quantities import binary
from kvstrata.plan.actions import Decision, InspectPool, WarmPool
from kvstrata.plan.conditions import Finding, false, true, unknown
from kvstrata.plan.keys.data_keys import seals
from kvstrata.plan.pools.content import Content
from kvstrata.plan.pools.rendering import newest_render_id
from kvstrata.plan.pools.shards import Slot, committed_version
from kvstrata.plan.rules import pool as chain

LOOK_AGAIN_S = 300.0
"""Interval of inspections of a warm pool."""

WATCH_S = 10.0
"""The same while chunks are missing."""

RETRY_S = 5.0
"""Pause of a pod that did not answer, or after its first failure."""


@dataclass(frozen=True, slots=True)
class Held:
    rows: Mapping[str, PoolTierState | None]
    words: Mapping[str, PoolVersionState]

    @property
    def known(self) -> bool:
        return all(row is not None for row in self.rows.values())

    @property
    def complete(self) -> bool:
        return bool(self.rows) and all(is_whole(row) for row in self.rows.values())


def held_of(world: World, pods: Sequence[Pod], pool: PrefixPool, version: PoolVersion) -> Held:
    """Return the holdings: the best report of a shared tier, the lowest of a per-pod tier."""
    words = {pod.uid: word for pod in pods if (word := _word(world, pod, pool, version)) is not None}
    rows: dict[str, PoolTierState | None] = {}
    for name in version.tiers:
        told = [row for word in words.values() for row in word.tiers if row.name == name]
        if not told or (is_per_pod(world, name) and len(told) < len(pods)):
            rows[name] = None
        elif is_per_pod(world, name):
            rows[name] = min(told, key=lambda row: (row.stored, -row.expected))
        else:
            rows[name] = max(told, key=lambda row: (row.stored, -row.expected))
    return Held(rows, words)


def _word(world: World, pod: Pod, pool: PrefixPool, version: PoolVersion) -> PoolVersionState | None:
    said = world.holdings.get(pod.uid, {}).get(pool.uid)
    state = world.states[pod.uid].state
    if said is None or said.report is None:
        return None
    if (said.report.gate_boot, said.report.cache_boot) != (state.gate_boot, state.cache_boot):
        return None
    scope = version.keyspace[:SCOPE_DIGITS]
    return next((one for one in said.report.versions if one.scope == scope and one.known), None)


def inspections(
    world: World, pods: Sequence[Pod], pool: PrefixPool, version: PoolVersion, held: Held, now: datetime
) -> tuple[tuple[InspectPool | WarmPool, ...], float]:
    every_s = LOOK_AGAIN_S if held.complete else WATCH_S
    per_pod = any(is_per_pod(world, name) for name in version.tiers)
    concerned = pods if per_pod else sort_by_chunks_held(world, pods, version, held)[:1]
    ages = {pod.uid: _age_s(world, pod, pool, held, now) for pod in concerned}
    due = [pod for pod in concerned if (age := ages[pod.uid]) is None or age >= every_s]
    left_s = min((every_s - age for age in ages.values() if age is not None and age < every_s), default=every_s)
    return tuple(InspectPool(pool.name, pool.uid, pod) for pod in due), left_s


def _age_s(world: World, pod: Pod, pool: PrefixPool, held: Held, now: datetime) -> float | None:
    """Return the seconds since a pod was asked; None to ask now."""
    said = world.holdings.get(pod.uid, {}).get(pool.uid)
    if said is None:
        return None
    age_s = (now - said.at).total_seconds()
    return None if pod.uid not in held.words and age_s >= RETRY_S else age_s


def warmed(world: World, pod: Pod, version: PoolVersion) -> dict[str, WarmReport]:
    scope = version.keyspace[:SCOPE_DIGITS]
    return {digest: told for (of, digest), told in world.warmed.get(pod.uid, {}).items() if of == scope}


def sort_by_chunks_held(world: World, pods: Iterable[Pod], version: PoolVersion, held: Held) -> list[Pod]:
    """Sort pods: fewest failures first, then by chunks held."""

    def rank(pod: Pod) -> tuple[int, int, str]:
        word = held.words.get(pod.uid)
        failures = max((one.failures for one in warmed(world, pod, version).values()), default=0)
        return failures, -sum(row.stored for row in word.tiers) if word is not None else 0, pod.name

    return sorted(pods, key=rank)


def is_per_pod(world: World, tier: str) -> bool:
    return tier in world.tiers and world.tiers[tier].spec.per_pod


def is_whole(row: PoolTierState | None) -> bool:
    return row is not None and 0 < row.expected <= row.stored


MAX_RETRY_S = 600.0
"""Maximum pause of a pod after failures; it doubles from RETRY_S."""

AGAIN_S = 30.0
"""Pause of a pod that computed everything, when a tier lost or evicted some."""


@dataclass(frozen=True, slots=True)
class Step:
    warm: Finding
    fields: Mapping[str, Any] = field(default_factory=dict)
    stalled: Decision | None = None
    pending: Decision | None = None
    questions: tuple[InspectPool | WarmPool, ...] = ()
    enqueue: tuple[Key, ...] = ()
    again_s: float | None = None


def live(world: World, model: CachedModel, pool: PrefixPool, content: Content | None, now: datetime) -> Step:
    slot = pool.status.next or pool.status
    found = committed_version(world, model, pool, slot)
    # Holdings of other tiers do not apply to the present ones.
    if found is None or found[1].tiers != chain.tiers_of(world, pool):
        waiting = Decision(PoolReason.NOT_COMMITTED, f"the bundle of CachedModel {model.name} is being written")
        return Step(_cold(slot, pool, waiting), pending=waiting, enqueue=(Key(BUNDLE, world.namespace, model.name),))
    ref, version = found
    if seals(world, model) and not version.keys:
        waiting = Decision(PoolReason.AWAITING_KEYS, "the data key of its epoch is being drawn")
        return Step(_cold(slot, pool, waiting), pending=waiting)
    pods, nobody = _able(world, model, ref.since)
    if nobody is not None:
        if nobody.reason == PoolReason.NO_LIVE_PODS:
            told = unknown(ConditionType.WARM, nobody.reason, nobody.message)
        else:
            told = _cold(slot, pool, nobody)
        return Step(told, pending=None if slot.published else nobody)
    held = held_of(world, pods, pool, version)
    questions, again_s = inspections(world, pods, pool, version, held, now)
    step = _judged(world, model, pool, slot, version, held, pods, content, now)
    waits = [again_s] if step.again_s is None else [again_s, step.again_s]
    return replace(step, questions=(*questions, *step.questions), again_s=min(waits))


def _judged(
    world: World,
    model: CachedModel,
    pool: PrefixPool,
    slot: Slot,
    version: PoolVersion,
    held: Held,
    pods: Sequence[Pod],
    content: Content | None,
    now: datetime,
) -> Step:
    if not held.known:
        asking = Decision(PoolReason.WARMING, "pods are asked what they hold of it")
        told = _cold(slot, pool, asking)
        return Step(told, pending=Decision(told.reason, told.message) if told.status == "False" else None)
    sizes = {tier.name: tier.bytes for tier in slot.tiers} if slot.published else {}
    rows = {"tiers": [_row(row, sizes.get(row.name, 0)) for row in held.rows.values() if row is not None]}
    if not held.complete:
        step = _warming(world, model, pool, slot, version, held, pods, content, now)
        return replace(step, fields=written(slot, rows))
    warm = true(ConditionType.WARM, PoolReason.WARM, "every tier holds every chunk")
    if slot.published:
        return Step(warm, written(slot, rows))
    if pool.spec.is_pinned and not is_whole_content(slot):
        # The measured size must be admitted before readers are directed to it.
        measured = Decision(PoolReason.WARMING, "every chunk is stored; what they take is written down")
        own = Key(pool.INFO.kind, world.namespace, pool.name)
        return Step(warm, written(slot, rows), pending=measured, enqueue=(own,))
    done = {**rows, "published": True, "warmedAt": format_timestamp(now)}
    publishing = Decision(PoolReason.NOT_COMMITTED, "every chunk is stored; pods are being told")
    return Step(warm, written(slot, done), pending=publishing)


def written(slot: Slot, fields: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(slot, NextContent):
        return {**fields, "bytes": _size(fields["tiers"])}
    return {"next": {**slot.to_kubernetes(), **fields}}


def _size(rows: Iterable[Mapping[str, Any]]) -> str | None:
    return binary(max((row["bytes"] for row in rows), default=0))


def _able(world: World, model: CachedModel, since: int) -> tuple[list[Pod], Decision | None]:
    serving = [pod for pod in world.serving_pods(model.name) if not pod.deleting]
    newest = [pod for pod in serving if pod.render_id == newest_render_id(world, model)]
    if not serving:
        return [], Decision(PoolReason.NO_LIVE_PODS, f"no pod of CachedModel {model.name} serves")
    if not newest:
        return [], Decision(
            PoolReason.ROLLING_OUT, f"no pod with the newest template of CachedModel {model.name} serves yet"
        )
    told = [pod for pod in newest if world.acked_revision(pod) >= since]
    if not told:
        return [], Decision(PoolReason.AWAITING_ACKS, f"waiting for {newest[0].name} to acknowledge it")
    able = [pod for pod in told if _answers(world, pod)]
    if not able:
        return [], Decision(PoolReason.WARMING, f"pod {told[0].name} has no engine or no cache server at present")
    return able, None


def _answers(world: World, pod: Pod) -> bool:
    verified = world.states.get(pod.uid)
    if verified is None or not verified.in_contact or pod.ip is None:
        return False
    return verified.state.engine_ready and bool(verified.state.cache_boot)


def _warming(
    world: World,
    model: CachedModel,
    pool: PrefixPool,
    slot: Slot,
    version: PoolVersion,
    held: Held,
    pods: Sequence[Pod],
    content: Content | None,
    now: datetime,
) -> Step:
    """Return the pods that compute missing chunks: one for shared tiers, and each that lacks some of its own."""
    refused = _refusal(world, pods, version, content)
    why = _why_cold(world, model, pool, slot, held, content, now)
    warm = false(ConditionType.WARM, (refused or why).reason, (refused or why).message)
    if refused is not None or content is None or content.digest != slot.content_digest:
        return Step(warm, stalled=refused, pending=None if refused else why)
    chosen: dict[str, Pod] = {}
    if any(not (is_per_pod(world, name) or is_whole(row)) for name, row in held.rows.items()):
        chosen |= {pod.uid: pod for pod in sort_by_chunks_held(world, pods, version, held)[:1]}
    for pod in pods:
        word = held.words.get(pod.uid)
        if word is not None and any(is_per_pod(world, row.name) and not is_whole(row) for row in word.tiers):
            chosen[pod.uid] = pod
    orders, waits = [], []
    for pod in chosen.values():
        missing = _missing(world, pod, held, content)
        due = {digest: _wait_s(warmed(world, pod, version).get(digest), now) for digest in missing}
        waits += [wait_s for wait_s in due.values() if wait_s > 0]
        prefixes = tuple(missing[digest] for digest, wait_s in due.items() if wait_s <= 0)
        if prefixes:
            orders.append(_order(pool, pod, version, prefixes))
    return Step(warm, pending=why, questions=tuple(orders), again_s=min(waits, default=None))


def _order(pool: PrefixPool, pod: Pod, version: PoolVersion, prefixes: tuple[PrefixSource, ...]) -> WarmPool:
    warmup = pool.spec.effective_warmup
    return WarmPool(
        pool.name,
        pool.uid,
        pod,
        version.keyspace[:SCOPE_DIGITS],
        version.manifest,
        prefixes,
        float(warmup.timeout_s),
        warmup.effective_max_concurrent,
    )


def _missing(world: World, pod: Pod, held: Held, content: Content) -> Mapping[str, PrefixSource]:
    """Return the prefixes with missing chunks, by digest; all if unknown."""
    lost = {bytes.fromhex(one) for word in held.words.values() for one in word.missing}
    found = {}
    for digest, source in content.distinct.items():
        report = world.renders.get(pod.uid, {}).get(digest)
        hashes = report.rendered.hashes if report is not None and report.rendered is not None else b""
        chunks = {hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(hashes), CHUNK_HASH_BYTES)}
        if not chunks or chunks & lost:
            found[digest] = source
    return found or content.distinct


def _refusal(world: World, pods: Sequence[Pod], version: PoolVersion, content: Content | None) -> Decision | None:
    named = {digest: name for name, digest in content.digests.items()} if content is not None else {}
    for pod in pods:
        for digest, told in warmed(world, pod, version).items():
            prefix = f"prefix {named[digest]}" if digest in named else "a prefix"
            if told.outcome is WarmOutcome.MISMATCH:
                return Decision(
                    PoolReason.RENDER_MISMATCH,
                    f"pod {pod.name}: a real request with {prefix} begins with other tokens than it came to: the "
                    "engine renders chats in another way than it tokenises them; give the prefix as tokenIDs",
                )
            if told.outcome is WarmOutcome.DISAGREE:
                return Decision(
                    PoolReason.REPLICAS_DISAGREE,
                    f"pod {pod.name} makes other tokens of {prefix} than all pods made of it before: the chat template "
                    "or the tokenizer changes by itself; when it is fixed, raise spec.cacheGeneration",
                )
    return None


def _why_cold(
    world: World, model: CachedModel, pool: PrefixPool, slot: Slot, held: Held, content: Content | None, now: datetime
) -> Decision:
    lacking = [(name, row) for name, row in held.rows.items() if row is not None and not is_whole(row)]
    counts = ", ".join(f"{row.stored} of {row.expected} on CacheTier {name}" for name, row in lacking)
    if slot.published:
        if content is None or content.digest != slot.content_digest:
            return Decision(
                PoolReason.CHUNKS_LOST,
                f"chunks are stored: {counts}; what is lost cannot be computed again before its source can be read",
            )
        newest = newest_render_id(world, model)
        if any(pod.render_id != newest for pod in world.serving_pods(model.name)):
            return Decision(PoolReason.ROLLING_OUT, f"pods of the newest template compute it anew: {counts}")
        return Decision(PoolReason.CHUNKS_LOST, f"chunks were lost and are computed again: {counts}")
    if isinstance(slot, NextContent) and slot.manifest_digest == pool.status.manifest_digest:
        return Decision(PoolReason.RENEWING, f"pods compute its chunks anew, readers keep the old: {counts}")
    told = pool.status.condition(ConditionType.WARM)
    cold_s = (now - told.last_transition_time).total_seconds() if told is not None and told.status != "True" else 0.0
    if cold_s > pool.spec.effective_warmup.timeout_s:
        return Decision(
            PoolReason.WARMING_TIMED_OUT,
            f"not warm within {pool.spec.effective_warmup.timeout_s} s, and tried again at times: {counts}",
        )
    return Decision(PoolReason.WARMING, f"pods compute its chunks: {counts}")


def _wait_s(told: WarmReport | None, now: datetime) -> float:
    """Return the pause before a pod computes a prefix again; longer after each failure."""
    if told is None:
        return 0.0
    pause_s = min(MAX_RETRY_S, RETRY_S * 2.0 ** min(told.failures - 1, 10)) if told.failures else AGAIN_S
    return pause_s - (now - told.at).total_seconds()


def _cold(slot: Slot, pool: PrefixPool, why: Decision) -> Finding:
    return as_told(pool) if slot.published else false(ConditionType.WARM, why.reason, why.message)


def as_told(pool: PrefixPool) -> Finding:
    told = pool.status.condition(ConditionType.WARM)
    if told is None:
        return unknown(ConditionType.WARM, PoolReason.WARMING, "pods are asked what they hold of it")
    return Finding(told.type, told.status, told.reason, told.message)


def _row(row: PoolTierState, size: int) -> dict[str, Any]:
    """Return a tier's status row; `size` is its guaranteed size when complete."""
    measured = row.bytes if is_whole(row) else max(row.bytes, size)
    return {"name": row.name, "stored": row.stored, "expected": row.expected, "bytes": measured}
