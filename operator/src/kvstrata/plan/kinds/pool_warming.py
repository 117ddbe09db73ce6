"""A pool's content after rendering: warmed, published, replaced, repaired.

Each step is one write of the pool's status, from which the bundle follows, so a new leader continues. Holdings of
pods are read repeatedly (`Case.inspections`) and not stored as intent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
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
from kvstrata.plan.pools.rendering import can_be_asked, newest_render_id
from kvstrata.plan.pools.shards import Slot, committed_version
from kvstrata.plan.rules import pool as chain

LOOK_AGAIN_S = 300.0
"""Interval of inspections of a warm pool."""

WATCH_S = 10.0
"""The same while chunks are missing."""

RETRY_S = 5.0
"""Pause of a pod that did not answer, or after its first failure."""

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
    pods, no_pod = _able(world, model, ref.since)
    if no_pod is not None:
        if no_pod.reason == PoolReason.NO_LIVE_PODS:
            reported = unknown(ConditionType.WARM, no_pod.reason, no_pod.message)
        else:
            reported = _cold(slot, pool, no_pod)
        return Step(reported, pending=None if slot.published else no_pod)
    case = Case(world, model, pool, slot, version, tuple(pods), content, now)
    questions, again_s = case.inspections()
    step = case.step()
    waits = [again_s] if step.again_s is None else [again_s, step.again_s]
    return replace(step, questions=(*questions, *step.questions), again_s=min(waits))


@dataclass(frozen=True)
class Case:
    """A version of a pool in the bundle, the part of status that it comes from (`slot`), and the pods that can compute
    it. `content` are its sources, None while they cannot be read."""

    world: World
    model: CachedModel
    pool: PrefixPool
    slot: Slot
    version: PoolVersion
    pods: tuple[Pod, ...]
    content: Content | None
    now: datetime

    @cached_property
    def reports(self) -> Mapping[str, PoolVersionState]:
        """The holdings of the version by UID of the pod that reports them."""
        found = {pod.uid: self._report(pod) for pod in self.pods}
        return {uid: report for uid, report in found.items() if report is not None}

    @cached_property
    def rows(self) -> Mapping[str, PoolTierState | None]:
        """The holdings by tier: the best report of a shared tier, the lowest of a per-pod tier; None if unknown."""
        rows: dict[str, PoolTierState | None] = {}
        for name in self.version.tiers:
            reported = [row for report in self.reports.values() for row in report.tiers if row.name == name]
            per_pod = self._is_per_pod(name)
            known = reported and not (per_pod and len(reported) < len(self.pods))
            choose = min if per_pod else max
            rows[name] = choose(reported, key=lambda row: (row.stored, -row.expected)) if known else None
        return rows

    @property
    def is_complete(self) -> bool:
        return bool(self.rows) and all(map(_is_whole, self.rows.values()))

    @property
    def can_be_computed(self) -> bool:
        """Whether the version's sources are known."""
        return self.content is not None and self.content.digest == self.slot.content_digest

    def inspections(self) -> tuple[tuple[InspectPool, ...], float]:
        """Return the pods to ask now for their holdings, and seconds until the next is due."""
        every_s = LOOK_AGAIN_S if self.is_complete else WATCH_S
        per_pod = any(map(self._is_per_pod, self.version.tiers))
        ages = {pod: self._age_s(pod) for pod in (self.pods if per_pod else self._best()[:1])}
        due = [pod for pod, age in ages.items() if age is None or age >= every_s]
        left_s = min((every_s - age for age in ages.values() if age is not None and age < every_s), default=every_s)
        return tuple(InspectPool(self.pool.name, self.pool.uid, pod) for pod in due), left_s

    def step(self) -> Step:
        slot, pool = self.slot, self.pool
        if None in self.rows.values():
            asking = Decision(PoolReason.WARMING, "pods are asked for their holdings of it")
            reported = _cold(slot, pool, asking)
            return Step(
                reported, pending=Decision(reported.reason, reported.message) if reported.status == "False" else None
            )
        sizes = {tier.name: tier.bytes for tier in slot.tiers} if slot.published else {}
        rows = {"tiers": [_row(row, sizes.get(row.name, 0)) for row in self.rows.values() if row is not None]}
        if not self.is_complete:
            return replace(self._warming(), fields=self._written(rows))
        warm = true(ConditionType.WARM, PoolReason.WARM, "every tier holds every chunk")
        if slot.published:
            return Step(warm, self._written(rows))
        if pool.spec.is_pinned and not is_whole_content(slot):
            # The measured size must be admitted before readers are directed to it.
            measured = Decision(PoolReason.WARMING, "every chunk is stored; their size is being recorded")
            own = Key(pool.INFO.kind, self.world.namespace, pool.name)
            return Step(warm, self._written(rows), pending=measured, enqueue=(own,))
        done = {**rows, "published": True, "warmedAt": format_timestamp(self.now)}
        publishing = Decision(PoolReason.NOT_COMMITTED, "every chunk is stored; pods have not acknowledged it yet")
        return Step(warm, self._written(done), pending=publishing)

    def _warming(self) -> Step:
        """Return the pods that compute missing chunks: one for shared tiers, and each that lacks some of its own."""
        refused = self._refusal()
        why = refused or self._why_cold()
        warm = false(ConditionType.WARM, why.reason, why.message)
        if refused is not None or self.content is None or not self.can_be_computed:
            return Step(warm, stalled=refused, pending=None if refused else why)
        shared = any(not (self._is_per_pod(name) or _is_whole(row)) for name, row in self.rows.items())
        chosen = dict.fromkeys(self._best()[:1] if shared else ())
        for pod in self.pods:
            report = self.reports.get(pod.uid)
            if report is not None and any(self._is_per_pod(r.name) and not _is_whole(r) for r in report.tiers):
                chosen[pod] = None
        warmup, orders, waits = self.pool.spec.effective_warmup, [], []
        for pod in chosen:
            missing = self._missing(pod, self.content)
            due = {digest: _wait_s(self._warmed(pod).get(digest), self.now) for digest in missing}
            waits += [wait_s for wait_s in due.values() if wait_s > 0]
            prefixes = tuple(missing[digest] for digest, wait_s in due.items() if wait_s <= 0)
            if prefixes:
                orders.append(
                    WarmPool(
                        self.pool.name,
                        self.pool.uid,
                        pod,
                        self.version.keyspace[:SCOPE_DIGITS],
                        self.version.manifest,
                        prefixes,
                        float(warmup.timeout_s),
                        warmup.effective_max_concurrent,
                    )
                )
        return Step(warm, pending=why, questions=tuple(orders), again_s=min(waits, default=None))

    def _report(self, pod: Pod) -> PoolVersionState | None:
        answer = self.world.holdings.get(pod.uid, {}).get(self.pool.uid)
        state = self.world.states[pod.uid].state
        if answer is None or answer.report is None:
            return None
        if (answer.report.gate_boot, answer.report.cache_boot) != (state.gate_boot, state.cache_boot):
            return None
        scope = self.version.keyspace[:SCOPE_DIGITS]
        return next((one for one in answer.report.versions if one.scope == scope and one.known), None)

    def _age_s(self, pod: Pod) -> float | None:
        """Return the seconds since a pod was asked; None to ask now."""
        answer = self.world.holdings.get(pod.uid, {}).get(self.pool.uid)
        if answer is None:
            return None
        age_s = (self.now - answer.at).total_seconds()
        return None if pod.uid not in self.reports and age_s >= RETRY_S else age_s

    def _warmed(self, pod: Pod) -> dict[str, WarmReport]:
        scope = self.version.keyspace[:SCOPE_DIGITS]
        return {
            digest: reported for (of, digest), reported in self.world.warmed.get(pod.uid, {}).items() if of == scope
        }

    def _best(self) -> list[Pod]:
        """Sort pods: fewest failures first, then by chunks held."""

        def rank(pod: Pod) -> tuple[int, int, str]:
            report = self.reports.get(pod.uid)
            failures = max((one.failures for one in self._warmed(pod).values()), default=0)
            return failures, -sum(row.stored for row in report.tiers) if report is not None else 0, pod.name

        return sorted(self.pods, key=rank)

    def _is_per_pod(self, tier: str) -> bool:
        return tier in self.world.tiers and self.world.tiers[tier].spec.per_pod

    def _missing(self, pod: Pod, content: Content) -> Mapping[str, PrefixSource]:
        """Return the prefixes with missing chunks, by digest; all if unknown."""
        lost = {bytes.fromhex(one) for report in self.reports.values() for one in report.missing}
        found = {}
        for digest, source in content.distinct.items():
            report = self.world.renders.get(pod.uid, {}).get(digest)
            hashes = report.rendered.hashes if report is not None and report.rendered is not None else b""
            chunks = {hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(hashes), CHUNK_HASH_BYTES)}
            if not chunks or chunks & lost:
                found[digest] = source
        return found or content.distinct

    def _refusal(self) -> Decision | None:
        named = {digest: name for name, digest in self.content.digests.items()} if self.content is not None else {}
        for pod in self.pods:
            for digest, reported in self._warmed(pod).items():
                prefix = f"prefix {named[digest]}" if digest in named else "a prefix"
                if reported.outcome is WarmOutcome.MISMATCH:
                    return Decision(
                        PoolReason.RENDER_MISMATCH,
                        f"pod {pod.name}: a real request with {prefix} begins with other tokens than it came to: the "
                        "engine renders chats in another way than it tokenises them; give the prefix as tokenIDs",
                    )
                if reported.outcome is WarmOutcome.DISAGREE:
                    return Decision(
                        PoolReason.REPLICAS_DISAGREE,
                        f"pod {pod.name} makes other tokens of {prefix} than all pods made of it before: the chat "
                        "template or the tokenizer changes by itself; when it is fixed, raise spec.cacheGeneration",
                    )
        return None

    def _why_cold(self) -> Decision:
        slot, pool = self.slot, self.pool
        lacking = [(name, row) for name, row in self.rows.items() if row is not None and not _is_whole(row)]
        counts = ", ".join(f"{row.stored} of {row.expected} on CacheTier {name}" for name, row in lacking)
        if slot.published:
            if not self.can_be_computed:
                return Decision(
                    PoolReason.CHUNKS_LOST,
                    f"chunks are stored: {counts}; lost chunks cannot be computed again before their source can be "
                    f"read",
                )
            newest = newest_render_id(self.world, self.model)
            if any(pod.render_id != newest for pod in self.world.serving_pods(self.model.name)):
                return Decision(PoolReason.ROLLING_OUT, f"pods of the newest template compute it again: {counts}")
            return Decision(PoolReason.CHUNKS_LOST, f"chunks were lost and are computed again: {counts}")
        if isinstance(slot, NextContent) and slot.manifest_digest == pool.status.manifest_digest:
            return Decision(PoolReason.RENEWING, f"pods compute its chunks again, readers keep the old ones: {counts}")
        reported, longest_s = pool.status.condition(ConditionType.WARM), pool.spec.effective_warmup.timeout_s
        is_cold = reported is not None and reported.status != "True"
        if reported is not None and is_cold and (self.now - reported.last_transition_time).total_seconds() > longest_s:
            return Decision(
                PoolReason.WARMING_TIMED_OUT, f"not warm within {longest_s} s, and tried again at times: {counts}"
            )
        return Decision(PoolReason.WARMING, f"pods compute its chunks: {counts}")

    def _written(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(self.slot, NextContent):
            return {"next": {**self.slot.to_kubernetes(), **fields}}
        return {**fields, "bytes": binary(max((row["bytes"] for row in fields["tiers"]), default=0))}


def _able(world: World, model: CachedModel, since: int) -> tuple[list[Pod], Decision | None]:
    serving = [pod for pod in world.serving_pods(model.name) if not pod.deleting]
    newest = [pod for pod in serving if pod.render_id == newest_render_id(world, model)]
    if not serving:
        return [], Decision(PoolReason.NO_LIVE_PODS, f"no pod of CachedModel {model.name} serves")
    if not newest:
        return [], Decision(
            PoolReason.ROLLING_OUT, f"no pod with the newest template of CachedModel {model.name} serves yet"
        )
    reported = [pod for pod in newest if world.acked_revision(pod) >= since]
    if not reported:
        return [], Decision(PoolReason.AWAITING_ACKS, f"waiting for {newest[0].name} to acknowledge it")
    able = [pod for pod in reported if can_be_asked(world, pod)]
    if not able:
        return [], Decision(PoolReason.WARMING, f"pod {reported[0].name} has no engine or no cache server at present")
    return able, None


def _wait_s(reported: WarmReport | None, now: datetime) -> float:
    """Return the pause before a pod computes a prefix again; longer after each failure."""
    if reported is None:
        return 0.0
    pause_s = min(MAX_RETRY_S, RETRY_S * 2.0 ** min(reported.failures - 1, 10)) if reported.failures else AGAIN_S
    return pause_s - (now - reported.at).total_seconds()


def _cold(slot: Slot, pool: PrefixPool, why: Decision) -> Finding:
    return as_recorded(pool) if slot.published else false(ConditionType.WARM, why.reason, why.message)


def as_recorded(pool: PrefixPool) -> Finding:
    reported = pool.status.condition(ConditionType.WARM)
    if reported is None:
        return unknown(ConditionType.WARM, PoolReason.WARMING, "pods are asked for their holdings of it")
    return Finding(reported.type, reported.status, reported.reason, reported.message)


def _is_whole(row: PoolTierState | None) -> bool:
    return row is not None and 0 < row.expected <= row.stored


def _row(row: PoolTierState, size: int) -> dict[str, Any]:
    """Return a tier's status row; `size` is its guaranteed size when complete."""
    measured = row.bytes if _is_whole(row) else max(row.bytes, size)
    return {"name": row.name, "stored": row.stored, "expected": row.expected, "bytes": measured}
