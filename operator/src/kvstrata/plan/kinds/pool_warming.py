"""A pool's content after rendering: warmed, published, replaced, repaired.

Each step is one write of the pool's status, from which the bundle follows, so a new leader continues. Holdings of
pods are read repeatedly (`Case.inspections`) and not stored as intent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.conditions import ConditionType
from kvstrata.api.prefixpool import MAX_IDENTITIES, NextContent, PoolContent, PrefixPool
from kvstrata.api.reasons import PoolReason, SharedReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.messages.pools import PoolTierState, PoolVersionState, WarmOutcome
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import PoolVersion, split_hashes
from kvstrata.model.guarantees import is_whole as is_whole_content
from kvstrata.model.pods import Pod
from kvstrata.model.pools import WarmReport
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects.quantities import binary
from kvstrata.plan.actions import Decision, InspectPool, Question, WarmPool, key_of
from kvstrata.plan.conditions import Finding, false, repeated, true, unknown
from kvstrata.plan.keys.data_keys import seals
from kvstrata.plan.kinds.model_identity import identity_of, why_without_reuse
from kvstrata.plan.pools.content import Content
from kvstrata.plan.pools.rendering import can_be_asked, newest_render_id
from kvstrata.plan.pools.shards import committed_version, newest_of
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
    """The next step of a pool: its condition Warm, if known, why it waits or a person must act, the status fields in
    API form, and the rest of the plan."""

    warm: Finding | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    stalled: Decision | None = None
    pending: Decision | None = None
    questions: tuple[Question, ...] = ()
    enqueue: tuple[Key, ...] = ()
    again_s: float | None = None
    can_wait: bool = False


def live(world: World, model: CachedModel, pool: PrefixPool, content: Content | None, now: datetime) -> Step:
    slot = newest_of(pool)
    found = committed_version(world, model, pool, slot)
    # Holdings of other tiers do not apply to the present ones.
    if found is None or found[1].tiers != chain.tiers_of(world, pool):
        waiting = Decision(SharedReason.NOT_COMMITTED, f"the bundle of CachedModel {model.name} is being written")
        return Step(pending=waiting, enqueue=(Key(BUNDLE, world.namespace, model.name),))
    ref, version = found
    if seals(world, model) and not version.keys:
        return Step(pending=Decision(SharedReason.AWAITING_KEYS, "the data key of its epoch is being drawn"))
    pods, no_pod = _able(world, model, ref.since)
    if no_pod is not None:
        is_unread = no_pod.reason in (SharedReason.NO_LIVE_PODS, SharedReason.FINGERPRINT_MISSING)
        is_served = slot.published and no_pod.reason != SharedReason.FINGERPRINT_MISSING
        reported = unknown(ConditionType.WARM, *no_pod) if is_unread else cold(slot, pool, no_pod)
        return Step(reported, pending=None if is_served else no_pod)
    case = Case(world, model, pool, slot, version, tuple(pods), content, now)
    inspections, again_s = case.inspections()
    step = case.step()
    return replace(step, questions=(*inspections, *step.questions), again_s=min(again_s, step.again_s or again_s))


@dataclass(frozen=True)
class Case:
    """A version of a pool in the bundle, the part of status that it comes from (`slot`), and the pods that can compute
    it. `content` are its sources, None while they cannot be read."""

    world: World
    model: CachedModel
    pool: PrefixPool
    slot: PoolContent
    version: PoolVersion
    pods: tuple[Pod, ...]
    content: Content | None
    now: datetime

    @property
    def scope(self) -> str:
        """The digits of the version's scope."""
        return self.version.keyspace[:SCOPE_DIGITS]

    @cached_property
    def reports(self) -> Mapping[str, PoolVersionState]:
        """The holdings of the version by UID of the pod that reports them."""
        found = {pod.uid: self._report(pod) for pod in self.pods}
        return {uid: report for uid, report in found.items() if report is not None}

    @cached_property
    def groups(self) -> Mapping[str, Sequence[Pod]]:
        """The pods by resolved identity. Each has chunks of its own in every tier."""
        groups: dict[str, list[Pod]] = {}
        for pod in self.pods:
            groups.setdefault(identity_of(self.world, pod), []).append(pod)
        return dict(sorted(groups.items()))

    @cached_property
    def rows(self) -> Mapping[str, PoolTierState | None]:
        """The holdings by tier, of the identity with the fewest chunks; None if those of one are unknown."""
        rows: dict[str, PoolTierState | None] = {}
        for name in self.version.tiers:
            known = [row for row in (self._holding(name, pods) for pods in self.groups.values()) if row is not None]
            rows[name] = min(known, key=_held) if len(known) == len(self.groups) else None
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
        asked = self.pods if per_pod else [self._best(pods) for pods in self.groups.values()]
        ages = {pod: self._age_s(pod) for pod in asked}
        due = [pod for pod, age in ages.items() if age is None or age >= every_s]
        left_s = min((every_s - age for age in ages.values() if age is not None and age < every_s), default=every_s)
        return tuple(InspectPool(self.pool.name, self.pool.uid, pod) for pod in due), left_s

    def step(self) -> Step:
        slot, pool = self.slot, self.pool
        if None in self.rows.values():
            reported = cold(slot, pool, Decision(PoolReason.WARMING, "pods are asked for their holdings of it"))
            return Step(reported, pending=reported.failure)
        sizes = {tier.name: tier.bytes for tier in slot.tiers} if slot.published else {}
        known = [row for row in self.rows.values() if row is not None]
        rows: dict[str, Any] = {"tiers": [_row(row, sizes.get(row.name, 0)) for row in known]}
        if not self.is_complete:
            return replace(self._warming(), fields=self._written(rows))
        rows["identities"] = [*self.groups][:MAX_IDENTITIES]
        warm = true(ConditionType.WARM, PoolReason.WARM, "every tier holds every chunk")
        if slot.published:
            return Step(warm, self._written(rows))
        if pool.spec.pinned and not is_whole_content(slot):
            # The measured size must be admitted before readers are directed to it.
            measured = Decision(PoolReason.WARMING, "every chunk is stored; their size is being recorded")
            return Step(warm, self._written(rows), pending=measured, enqueue=(key_of(pool),))
        done = {**rows, "published": True, "warmedAt": format_timestamp(self.now)}
        publishing = Decision(SharedReason.NOT_COMMITTED, "every chunk is stored; pods have not acknowledged it yet")
        return Step(warm, self._written(done), pending=publishing)

    def _warming(self) -> Step:
        """Return the pods that compute missing chunks: one of each identity for shared tiers, and each that lacks some
        of its own."""
        refused = self._refusal()
        why = refused or self._why_cold()
        warm = false(ConditionType.WARM, *why)
        if refused is not None or self.content is None or not self.can_be_computed:
            return Step(warm, stalled=refused, pending=None if refused else why)
        shared = [name for name in self.rows if not self._is_per_pod(name)]
        lacking = (
            pods for pods in self.groups.values() if not all(_is_whole(self._holding(name, pods)) for name in shared)
        )
        chosen = dict.fromkeys(map(self._best, lacking))
        for pod in self.pods:
            report = self.reports.get(pod.uid)
            if report is not None and any(self._is_per_pod(r.name) and not _is_whole(r) for r in report.tiers):
                chosen[pod] = None
        pool, manifest, warmup = self.pool, self.version.manifest, self.pool.spec.warmup
        timeout_s, orders, waits = float(warmup.timeout.in_seconds), [], []
        for pod in chosen:
            missing = self._missing(pod, self.content)
            due = {digest: _wait_s(self._warmed(pod).get(digest), self.now) for digest in missing}
            waits += [wait_s for wait_s in due.values() if wait_s > 0]
            prefixes = tuple(missing[digest] for digest, wait_s in due.items() if wait_s <= 0)
            if prefixes:
                orders.append(
                    WarmPool(pool.name, pool.uid, pod, self.scope, manifest, prefixes, timeout_s, warmup.max_concurrent)
                )
        return Step(warm, pending=why, questions=tuple(orders), again_s=min(waits, default=None))

    def _report(self, pod: Pod) -> PoolVersionState | None:
        answer = self.world.holdings.get(pod.uid, {}).get(self.pool.uid)
        state = self.world.states[pod.uid].state
        if answer is None or answer.answer is None:
            return None
        report = answer.answer
        processes = report.gate_boot, report.cache_boot, report.fingerprint
        if processes != (state.gate_boot, state.cache_boot, state.fingerprint):
            return None
        return next((one for one in report.versions if one.scope == self.scope and one.known), None)

    def _age_s(self, pod: Pod) -> float | None:
        """Return the seconds since a pod was asked; None to ask now."""
        answer = self.world.holdings.get(pod.uid, {}).get(self.pool.uid)
        if answer is None:
            return None
        age_s = (self.now - answer.at).total_seconds()
        return None if pod.uid not in self.reports and age_s >= RETRY_S else age_s

    def _warmed(self, pod: Pod) -> dict[str, WarmReport]:
        known = self.world.warmed.get(pod.uid, {})
        return {digest: reported for (scope, digest), reported in known.items() if scope == self.scope}

    def _holding(self, tier: str, pods: Sequence[Pod]) -> PoolTierState | None:
        """Return a tier's holdings for pods of one identity: the best report of a shared tier, the lowest of a per-pod
        tier; None if unknown."""
        reports = [self.reports[pod.uid] for pod in pods if pod.uid in self.reports]
        rows = [row for report in reports for row in report.tiers if row.name == tier]
        per_pod = self._is_per_pod(tier)
        if not rows or (per_pod and len(rows) < len(pods)):
            return None
        return min(rows, key=_held) if per_pod else max(rows, key=_held)

    def _best(self, pods: Sequence[Pod]) -> Pod:
        """Return the pod with the fewest failures; of several the one that holds most chunks."""

        def rank(pod: Pod) -> tuple[int, int, str]:
            report = self.reports.get(pod.uid)
            failures = max((one.failures for one in self._warmed(pod).values()), default=0)
            return failures, -sum(row.stored for row in report.tiers) if report is not None else 0, pod.name

        return min(pods, key=rank)

    def _is_per_pod(self, tier: str) -> bool:
        return tier in self.world.tiers and self.world.tiers[tier].spec.per_pod

    def _missing(self, pod: Pod, content: Content) -> Mapping[str, PrefixSource]:
        """Return the prefixes of which pods of this one's identity miss chunks, by digest; all if unknown."""
        alike = (self.reports.get(one.uid) for one in self.groups[identity_of(self.world, pod)])
        lost = {bytes.fromhex(one) for report in alike if report is not None for one in report.missing}
        found = {}
        for digest, source in content.distinct.items():
            report = self.world.renders.get(pod.uid, {}).get(digest)
            hashes = report.answer.hashes if report is not None and report.answer is not None else b""
            if not hashes or not lost.isdisjoint(split_hashes(hashes)):
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
                    "read",
                )
            if slot.identities and (others := [one for one in self.groups if one not in slot.identities]):
                pods = self.groups[others[0]]
                return Decision(
                    PoolReason.FINGERPRINT_CHANGED,
                    f"pod {pods[0].name}, with identity {others[0]}, finds no chunk of {slot.identities[0]} and "
                    f"computes its own: {counts}",
                )
            newest = newest_render_id(self.world, self.model)
            if any(pod.render_id != newest for pod in self.world.serving_pods(self.model.name)):
                return Decision(SharedReason.ROLLING_OUT, f"pods of the newest template compute it again: {counts}")
            return Decision(PoolReason.CHUNKS_LOST, f"chunks were lost and are computed again: {counts}")
        if isinstance(slot, NextContent) and slot.manifest_digest == pool.status.manifest_digest:
            return Decision(PoolReason.RENEWING, f"pods compute its chunks again, readers keep the old ones: {counts}")
        reported, longest_s = pool.status.condition(ConditionType.WARM), pool.spec.warmup.timeout.in_seconds
        is_cold = reported is not None and reported.status != "True"
        if reported is not None and is_cold and (self.now - reported.last_transition_time).total_seconds() > longest_s:
            message = f"not warm within {longest_s} s, and tried again at times: {counts}"
            return Decision(PoolReason.WARMING_TIMED_OUT, message)
        return Decision(PoolReason.WARMING, f"pods compute its chunks: {counts}")

    def _written(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(self.slot, NextContent):
            return {"next": {**self.slot.to_kubernetes(), **fields}}
        return {**fields, "bytes": binary(max((row["bytes"] for row in fields["tiers"]), default=0))}


def _able(world: World, model: CachedModel, since: int) -> tuple[list[Pod], Decision | None]:
    serving = [pod for pod in world.serving_pods(model.name) if not pod.deleting]
    newest = [pod for pod in serving if pod.render_id == newest_render_id(world, model)]
    if not serving:
        return [], Decision(SharedReason.NO_LIVE_PODS, f"no pod of CachedModel {model.name} serves")
    if not newest:
        message = f"no pod with the newest template of CachedModel {model.name} serves yet"
        return [], Decision(SharedReason.ROLLING_OUT, message)
    reported = [pod for pod in newest if world.acked_revision(pod) >= since]
    if not reported:
        return [], Decision(SharedReason.AWAITING_ACKS, f"waiting for {newest[0].name} to acknowledge it")
    able = [pod for pod in reported if can_be_asked(world, pod)]
    if not able:
        return [], Decision(PoolReason.WARMING, f"pod {reported[0].name} has no engine or no cache server at present")
    reusing = [pod for pod in able if identity_of(world, pod)]
    if not reusing:
        state = world.states[able[0].uid].state
        why = f"pod {able[0].name} serves without reuse: {why_without_reuse(state)}"
        return [], Decision(SharedReason.FINGERPRINT_MISSING, why)
    return reusing, None


def _wait_s(reported: WarmReport | None, now: datetime) -> float:
    """Return the pause before a pod computes a prefix again; longer after each failure."""
    if reported is None:
        return 0.0
    pause_s = min(MAX_RETRY_S, RETRY_S * 2.0 ** min(reported.failures - 1, 10)) if reported.failures else AGAIN_S
    return pause_s - (now - reported.at).total_seconds()


def cold(slot: PoolContent, pool: PrefixPool, why: Decision) -> Finding:
    """Return condition Warm while holdings are unknown: published content stays as recorded."""
    return as_recorded(pool) if slot.published else false(ConditionType.WARM, *why)


def as_recorded(pool: PrefixPool) -> Finding:
    reported = pool.status.condition(ConditionType.WARM)
    if reported is None:
        return unknown(ConditionType.WARM, PoolReason.WARMING, "pods are asked for their holdings of it")
    return repeated(reported)


def _is_whole(row: PoolTierState | None) -> bool:
    return row is not None and 0 < row.expected <= row.stored


def _held(row: PoolTierState) -> tuple[int, int]:
    return row.stored, -row.expected


def _row(row: PoolTierState, size: int) -> dict[str, Any]:
    """Return a tier's status row; `size` is its guaranteed size when complete."""
    measured = row.bytes if _is_whole(row) else max(row.bytes, size)
    return {"name": row.name, "stored": row.stored, "expected": row.expected, "bytes": measured}
