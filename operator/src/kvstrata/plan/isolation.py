"""Isolation: which pods to probe, and the meaning of their results.

A failure stands in the model's status until its cacheGeneration is raised, which alone makes wrongly shared blocks
unreachable. A later probe without findings may have read other scopes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from typing import Any

from kvstrata.api.cachedmodel import CachedModel, ReuseMode
from kvstrata.api.cachedmodel_status import OnProbeFailure, ProbeMode
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import ModelReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.messages.probe import Probed, ProbeOutcome
from kvstrata.model.pods import Pod
from kvstrata.model.probe import ProbeReport, Shown
from kvstrata.model.world import World
from kvstrata.plan.actions import ProbePod
from kvstrata.plan.conditions import Finding, false, true, unknown

KIND = ConditionType.ISOLATION_VERIFIED
READERS = 8

SOON_S = 60.0
"""Delay of the next probe after changed keyspaces or an inconclusive probe."""

LATE_INTERVALS = 3
"""Intervals without an answer after which a result is too old."""

_REASONS = {
    ProbeOutcome.FOREIGN_HIT: ModelReason.FOREIGN_HIT,
    ProbeOutcome.WRONG_HIT: ModelReason.WRONG_HIT,
}


@dataclass(frozen=True, slots=True)
class Isolation:
    """The condition IsolationVerified, None where it does not apply, and the probe status in API form, None to omit it.
    `failed_now`: the failure is not in status yet."""

    finding: Finding | None
    status: dict[str, Any] | None = None
    failed_now: bool = False


def failure_stands(model: CachedModel) -> bool:
    """Whether a failure was found in the declared cache generation."""
    reported = model.status.probe
    return bool(reported and reported.failure and reported.failure.cache_generation >= model.spec.cache_generation)


def is_fenced(model: CachedModel) -> bool:
    return failure_stands(model) and model.spec.probe.on_failure is OnProbeFailure.FENCE_REUSE


def probes_due(world: World, model: CachedModel, now: datetime) -> tuple[tuple[ProbePod, ...], float | None]:
    """Return the pods to ask now, and the seconds until the next is due; None if no pod can be asked.

    A pod is due if its present processes were never asked, after the interval, and soon after changed keyspaces or an
    inconclusive probe. It must have acknowledged the bundle.
    """
    committed, never = world.bundles.get(model.name), model.spec.probe.mode is ProbeMode.NEVER or is_fenced(model)
    if never or committed is None or committed.bundle.root.rules.reuse == "Disabled":
        return (), None
    keyspaces, revision = _keyspaces(world, model), committed.bundle.root.revision
    due, next_s = list[ProbePod](), list[float]()
    for pod in world.serving_pods(model.name):
        if not _can_be_asked(world, pod, revision):
            # Its acknowledgement triggers another plan.
            continue
        left_s = _left_s(world, model, pod, keyspaces, now)
        if left_s <= 0:
            due.append(ProbePod(model.name, pod, revision, keyspaces, READERS))
        else:
            next_s.append(left_s)
    return tuple(due), min(next_s, default=None)


def isolation(world: World, model: CachedModel, now: datetime) -> Isolation:
    """Return the proven isolation of a model, in this order: a standing or new failure; no reuse; no pods; a pod that
    cannot be probed, was not yet, or not recently; a missed control, or a single scope; success."""
    found = _isolation(world, model, now)
    probed = model.spec.probe.mode is not ProbeMode.NEVER and model.spec.reuse.mode is not ReuseMode.DISABLED
    applies = failure_stands(model) or (probed and bool(world.serving_pods(model.name)))
    return found if applies else replace(found, finding=None)


def _isolation(world: World, model: CachedModel, now: datetime) -> Isolation:
    reported = model.status.probe
    before = reported.to_kubernetes() if reported is not None else None
    if failure_stands(model) and reported is not None and reported.failure is not None:
        failure = reported.failure
        return Isolation(false(KIND, failure.reason, failure.message), before)
    pods = world.serving_pods(model.name)
    reports = ((pod.name, _report(world, pod)) for pod in pods)
    results = {name: one.shown for name, one in reports if one is not None and one.shown is not None}
    failed = next(((pod, one) for pod, one in results.items() if one.probed.outcome.failed), None)
    # While pods of an earlier cache generation run, their findings are not new.
    if failed is not None and (model.status.cache_generation or 0) == model.spec.cache_generation:
        pod, found = failed
        reason, message = _REASONS[found.probed.outcome], failure_message(pod, found.probed)
        stands = {
            "time": format_timestamp(found.at),
            "reason": str(reason),
            "message": message,
            "cacheGeneration": model.spec.cache_generation,
        }
        return Isolation(false(KIND, reason, message), {**(before or {}), "failure": stands}, failed_now=True)
    objection = _objection(world, model, [pod.name for pod in pods], results, now)
    if objection is not None:
        return Isolation(objection, before)
    return _shown(model, len(pods), [*results.values()], before, now)


def failure_message(pod: str, answer: Probed) -> str:
    where = ", ".join(row.tier or row.medium for row in answer.tiers if row.foreign_hits or row.altered_hits)
    if answer.outcome is ProbeOutcome.WRONG_HIT:
        found = "blocks of one prompt were found for another"
    else:
        writer, *others = (*answer.culprits, "a scope", "another scope")
        found = f"blocks of {writer} were found for {others[0]}"
        found += ", which have one keyspace" if answer.clashes else ""
    return f"pod {pod}: {found}{f' in {where}' if where else ''}; raise cacheGeneration once the cause is known"


def _objection(
    world: World, model: CachedModel, pods: Sequence[str], results: Mapping[str, Shown], now: datetime
) -> Finding | None:
    """Return why isolation is neither shown nor broken, or None."""
    committed = world.bundles.get(model.name)
    if committed is not None and committed.bundle.root.rules.reuse == "Disabled":
        return unknown(KIND, ModelReason.REUSE_OFF, "nothing is reused, so there is nothing to probe")
    if not pods:
        return unknown(KIND, ModelReason.NOT_PROBED, "no pod serves")
    missing = next((pod for pod in pods if pod not in results), None)
    if missing is not None and not _shown_lately(model, now):
        asked = f"{len(results)} of {len(pods)} pods were probed"
        return unknown(KIND, ModelReason.NOT_PROBED, f"{asked}; waiting for {missing}")
    late = next((name for name, one in results.items() if _is_late(model, one.at, now)), None)
    if late is not None:
        return unknown(KIND, ModelReason.PROBE_UNANSWERED, f"pod {late} has not answered a probe for too long")
    for name, one in results.items():
        probed = one.probed
        if probed.outcome is ProbeOutcome.NO_REUSE:
            return unknown(KIND, ModelReason.REUSE_OFF, f"pod {name} reuses nothing now: its policy is stale")
        if probed.outcome is ProbeOutcome.ONE_SCOPE:
            message = "one scope uses this model, so there is no other scope to isolate it from"
            return unknown(KIND, ModelReason.ONE_SCOPE, message)
        if probed.unproven:
            where = ", ".join(probed.unproven)
            message = f"pod {name}: in {where} the same scope found nothing, or no other scope may look there"
            return unknown(KIND, ModelReason.CONTROL_MISSED, message)
    return None


def _shown(
    model: CachedModel, pods: int, shown: Sequence[Shown], before: dict[str, Any] | None, now: datetime
) -> Isolation:
    """Return success; status and message change once per interval, not with each pod."""
    condition = model.status.condition(KIND)
    reported = model.status.probe
    age_s = (now - reported.time).total_seconds() if reported is not None and reported.time is not None else inf
    fresh = age_s < model.spec.probe.interval.in_seconds
    if condition is not None and condition.status == "True" and (fresh or len(shown) < pods):
        return Isolation(true(KIND, condition.reason, condition.message or ""), before)
    lookups, controls = sum(one.probed.lookups for one in shown), sum(one.probed.controls for one in shown)
    oldest, revision = min(one.at for one in shown), min(one.probed.revision for one in shown)
    tiers = sorted({name for one in shown for name in one.probed.proven})
    counts = f"{lookups} lookups that had to miss did, between {controls} controls that hit"
    message = f"{len(shown)} of {pods} pods at {format_timestamp(oldest)}: {counts}, in {', '.join(tiers)}"
    status = {
        "time": format_timestamp(oldest),
        "revision": revision,
        "pods": len(shown),
        "lookups": lookups,
        "controls": controls,
    }
    # Keep the failure of an earlier cache generation on record.
    failure = {"failure": before["failure"]} if before and "failure" in before else {}
    return Isolation(true(KIND, ModelReason.ISOLATION_SHOWN, message), status | failure)


def _report(world: World, pod: Pod) -> ProbeReport | None:
    """Return a pod's last report, if the same processes still run."""
    report, reported = world.probes.get(pod.uid), world.states.get(pod.uid)
    if report is None or report.shown is None or reported is None:
        return report
    answer = report.shown.probed
    # An absent cache server has not changed yet.
    same = answer.gate_boot == reported.state.gate_boot and answer.cache_boot in (reported.state.cache_boot, "")
    return report if same or not reported.state.cache_boot else None


def _can_be_asked(world: World, pod: Pod, revision: int) -> bool:
    reported = world.states.get(pod.uid)
    if reported is None or not reported.in_contact:
        return False
    return reported.state.engine_ready and world.acked_revision(pod) >= revision


def _left_s(world: World, model: CachedModel, pod: Pod, keyspaces: str, now: datetime) -> float:
    """Return the seconds until a pod is due, 0 or less for now."""
    report = _report(world, pod)
    if report is None:
        return 0.0
    interval_s = float(model.spec.probe.interval.in_seconds)
    shown = report.shown
    is_current = shown is not None and shown.keyspaces == keyspaces and shown.probed.outcome is ProbeOutcome.ISOLATED
    wait_s = interval_s if is_current and not report.passing else min(SOON_S, interval_s)
    return wait_s - (now - report.at).total_seconds()


def _is_late(model: CachedModel, at: datetime, now: datetime) -> bool:
    return (now - at).total_seconds() > LATE_INTERVALS * max(SOON_S, float(model.spec.probe.interval.in_seconds))


def _shown_lately(model: CachedModel, now: datetime) -> bool:
    """Whether status shows recent success, which new pods may rely on until their first probe."""
    reported, condition = model.status.probe, model.status.condition(KIND)
    was_true = condition is not None and condition.status == "True"
    return was_true and reported is not None and reported.time is not None and not _is_late(model, reported.time, now)


def _keyspaces(world: World, model: CachedModel) -> str:
    bundle = world.bundles[model.name].bundle

    def compute() -> str:
        return hashlib.sha256("".join(sorted(bundle.keyspaces)).encode()).hexdigest()[:16]

    return world.memo.get(KIND, model.name, (bundle.entries, bundle.pools), compute)
