"""Conditions of a tier besides BackendReachable.

File tiers are judged by reports of the pods that use them.
"""

from __future__ import annotations

from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.contract.messages.adapter import TierState
from kvstrata.model.pods import BackendReport, Pod
from kvstrata.model.world import World
from kvstrata.objects.quantities import binary, readable
from kvstrata.objects.sizing import stored_bytes
from kvstrata.plan.budgets.capacity import capacity_committed, not_reporting, serving_with, silent_pods
from kvstrata.plan.conditions import Finding, false, true, unknown


def promises(world: World, tier: CacheTier, report: BackendReport | None = None) -> tuple[Finding, ...]:
    """Return the conditions about a tier's blocks in pods that use it. `report` is the server's last answer."""
    return (
        _encrypted(world, tier),
        capacity_committed(world, tier),
        _eviction(world, tier, report),
        _retention(world, tier),
    )


def _encrypted(world: World, tier: CacheTier) -> Finding:
    """Return whether stored blocks are encrypted, as reported by every serving pod of the models that list the tier.

    A pod that requires encryption stores nothing else, at any revision. One without a report may run an earlier
    adapter.
    """
    kind = ConditionType.ENCRYPTED
    if not tier.spec.encryption_required:
        return false(kind, TierReason.ENCRYPTION_DISABLED, "spec.encryption is Disabled")
    pods = serving_with(world, tier, world.models.values())
    lacking = sorted(pod.name for pod in pods if not _has_keys(world, pod, tier.name))
    if lacking:
        return false(
            kind,
            TierReason.AWAITING_KEYS,
            f"{len(lacking)} of {len(pods)} pods have not reported that they encrypt and have a key for each "
            f"keyspace of "
            f"their policy, without which they use the tier for none: {', '.join(lacking[:3])}",
        )
    reading = sorted(pod.name for pod in pods if any(one.recovering for one in _answer_of(world, pod, tier.name)))
    if tier.spec.outlives_pods and reading:
        return false(
            kind,
            TierReason.PLAINTEXT_LEFT,
            f"{len(reading)} pods still read the files in their folders, where a tier of this name that was deleted "
            f"may "
            f"have left plain files, and delete these: {', '.join(reading[:3])}",
        )
    return true(kind, TierReason.KEYS_HELD, f"{len(pods)} pods encrypt all that they store")


def _has_keys(world: World, pod: Pod, tier: str) -> bool:
    reported = world.states.get(pod.uid)
    return (
        reported is not None
        and reported.state.acked > 0
        and any(one.encrypted and one.keyless == 0 for one in _answer_of(world, pod, tier))
    )


def _answer_of(world: World, pod: Pod, tier: str) -> list[TierState]:
    reported = world.states.get(pod.uid)
    return [one for one in reported.state.tiers if one.name == tier] if reported is not None else []


def _eviction(world: World, tier: CacheTier, report: BackendReport | None) -> Finding:
    """Return whether a full Redis tier evicts; in pods the cache server does."""
    kind = ConditionType.EVICTS_WHEN_FULL
    stored = stored_bytes(tier.spec)
    if report is not None and 0 < report.max_bytes < stored and not tier.spec.has_several_primaries:
        return false(
            kind,
            TierReason.SERVER_TOO_SMALL,
            f"the server's maxmemory is {readable(report.max_bytes)}, and scopes make room when together they have "
            f"{readable(stored)}: raise it, or lower capacity",
        )
    sentence = f"each scope makes room among its own blocks when together they have {readable(stored)}"
    kept = true(kind, TierReason.EVICTS_OWN_BLOCKS, sentence)
    return _if_pods_confirm(world, tier, "divide the tier's capacity among scopes", kept)


def _retention(world: World, tier: CacheTier) -> Finding:
    """Return whether pods respect the tier's maxRetention, which is in every bundle entry."""
    kind = ConditionType.RETENTION_KEPT
    sentence = f"pods remove each block {tier.spec.max_retention} after it was computed, or sooner"
    kept = true(kind, TierReason.REMOVED_IN_TIME, sentence)
    content = "memory" if tier.spec.medium is Medium.CPU else "files"
    return _if_pods_confirm(world, tier, f"keep their {content} under the policy", kept)


def _if_pods_confirm(world: World, tier: CacheTier, what: str, kept: Finding) -> Finding:
    """Return `kept` if every serving pod of the tier reports that it does `what`, else unknown."""
    silent = silent_pods(world, tier, world.models.values())
    if silent:
        return unknown(kept.type, TierReason.BUDGETS_NOT_ENFORCED, not_reporting({pod.name for pod in silent}, what))
    return kept


OFF_SHARE = 20
"""`used` is rewritten when it is off by this part of the capacity, a twentieth: a busy tier has few writes."""

_NAMED = 3


def file_findings(world: World, tier: CacheTier) -> tuple[Finding, Finding]:
    reported = _reported(world, tier)
    if not reported:
        sentence = "no pod has reported its files yet"
        return (
            unknown(ConditionType.BACKEND_REACHABLE, TierReason.PROGRESSING, sentence),
            unknown(ConditionType.HAS_ROOM, TierReason.PROGRESSING, sentence),
        )
    return _reachable(reported), _room(reported)


def most_used(world: World, tier: CacheTier) -> str | None:
    """Return `used` of a tier of files: that of the pod that uses most, None without reports."""
    reported = _reported(world, tier)
    return used_now(tier, max(state.used_bytes for state in reported.values())) if reported else None


def used_now(tier: CacheTier, used_bytes: int) -> str:
    """Return `used` of status: the recorded size until it is off by a twentieth of the capacity."""
    recorded = tier.status.used
    off_bytes = abs(recorded.in_bytes - used_bytes) if recorded is not None else None
    if off_bytes is not None and off_bytes * OFF_SHARE < (tier.spec.capacity_bytes or 0):
        return str(recorded)
    return binary(used_bytes)


def _reachable(reported: dict[str, TierState]) -> Finding:
    kind = ConditionType.BACKEND_REACHABLE
    away = {pod: state for pod, state in reported.items() if state.breaker == "open"}
    if away:
        why = next(iter(away.values())).detail
        return false(kind, TierReason.PODS_DISCONNECTED, f"{_some(away, reported)} do not use their files: {why}")
    return true(kind, TierReason.REACHABLE, f"{len(reported)} pods use their files")


def _room(reported: dict[str, TierState]) -> Finding:
    kind = ConditionType.HAS_ROOM
    read_only = {pod: state for pod, state in reported.items() if state.read_only}
    if read_only:
        sentence = f"the file system of {_some(read_only, reported)} is read-only: blocks are read, and none are stored"
        return false(kind, TierReason.DISK_READ_ONLY, sentence)
    full = {pod: state for pod, state in reported.items() if state.full}
    if full:
        sentence = f"the disk of {_some(full, reported)} has no room, although the tier's capacity is not used up"
        return false(kind, TierReason.DISK_FULL, sentence)
    short = {pod: state for pod, state in reported.items() if state.floor_reached}
    if short:
        sentence = (
            f"the file system of {_some(short, reported)} has little left for others, so blocks take less than the "
            "capacity: lower capacityPerPod, or free the node's disk"
        )
        return false(kind, TierReason.FLOOR_REACHED, sentence)
    return true(kind, TierReason.ROOM_LEFT, "each scope makes room among its own blocks when the tier is full")


def _reported(world: World, tier: CacheTier) -> dict[str, TierState]:
    found = {
        pod.name: state
        for pod in serving_with(world, tier, world.models.values())
        if (answer := world.states.get(pod.uid)) is not None and answer.in_contact
        for state in answer.state.tiers
        if state.name == tier.name and state.medium == tier.spec.medium
    }
    return dict(sorted(found.items()))


def _some(some: dict[str, TierState], reported: dict[str, TierState]) -> str:
    return f"{len(some)} of {len(reported)} pods ({', '.join(list(some)[:_NAMED])})"
