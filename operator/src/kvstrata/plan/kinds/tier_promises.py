"""Conditions of a tier besides BackendReachable.

File tiers are judged by reports of the pods that use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstrata.api.cachetier import CacheTier, Medium, Restores
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import SharedReason, TierReason
from kvstrata.contract.messages.adapter import RestoreState, TierState
from kvstrata.model.pods import BackendReport, Pod
from kvstrata.model.world import World
from kvstrata.objects.quantities import binary, readable
from kvstrata.objects.sizing import stored_bytes
from kvstrata.plan.budgets.capacity import capacity_committed, not_reporting, serving_with, silent_pods
from kvstrata.plan.conditions import Finding, false, true, unknown
from kvstrata.plan.redis.backend import in_force
from kvstrata.plan.rules import first
from kvstrata.plan.rules import tier as chain


def promises(world: World, tier: CacheTier, report: BackendReport | None = None) -> tuple[Finding | None, ...]:
    """Return the conditions about a tier's blocks in pods that use it. `report` is the server's last answer."""
    is_usable = in_force(tier) is not None and first(chain.RULES, world, tier) is None
    pods = serving_with(world, tier, world.models.values()) if is_usable else []
    return (
        _encrypted(world, tier, pods),
        capacity_committed(world, tier) if is_usable else None,
        _eviction(world, tier, report) if pods and tier.spec.medium is Medium.REDIS else None,
        # Redis expires blocks by itself.
        _retention(world, tier) if pods and tier.spec.max_retention and tier.spec.medium is not Medium.REDIS else None,
        _restoring(world, tier) if pods and measured(world, tier) else None,
    )


def _encrypted(world: World, tier: CacheTier, pods: Sequence[Pod]) -> Finding | None:
    """Return whether stored blocks are encrypted, as reported by every pod that uses the tier; None if it stores
    nothing at rest.

    A pod that requires encryption stores nothing else, at any revision. One without a report may run an earlier
    adapter.
    """
    kind = ConditionType.ENCRYPTED
    if tier.spec.medium not in (Medium.REDIS, Medium.NVME):
        return None
    if not tier.spec.encryption_required:
        return false(kind, TierReason.ENCRYPTION_DISABLED, "spec.encryption is Disabled")
    if not pods:
        return None
    answers = ((pod.name, world.states.get(pod.uid)) for pod in pods)
    enforcing = {name: found.state for name, found in answers if found is not None and found.state.acked > 0}
    shown = {name: [one for one in state.tiers if one.name == tier.name] for name, state in enforcing.items()}
    holding = {name for name, rows in shown.items() if any(one.encrypted and one.keyless == 0 for one in rows)}
    lacking = sorted(pod.name for pod in pods if pod.name not in holding)
    if lacking:
        message = (
            f"{len(lacking)} of {len(pods)} pods have not reported that they encrypt and have a key for each keyspace "
            f"of their policy, without which they use the tier for none: {', '.join(lacking[:3])}"
        )
        return false(kind, SharedReason.AWAITING_KEYS, message)
    reading = sorted(name for name, rows in shown.items() if any(one.recovering for one in rows))
    if tier.spec.outlives_pods and reading:
        message = (
            f"{len(reading)} pods still read the files in their folders, where a tier of this name that was deleted "
            f"may have left plain files, and delete these: {', '.join(reading[:3])}"
        )
        return false(kind, TierReason.PLAINTEXT_LEFT, message)
    return true(kind, TierReason.KEYS_HELD, f"{len(pods)} pods encrypt all that they store")


def _eviction(world: World, tier: CacheTier, report: BackendReport | None) -> Finding:
    """Return whether a full Redis tier evicts."""
    kind, stored = ConditionType.EVICTS_WHEN_FULL, stored_bytes(tier.spec)
    divided = stored_bytes((in_force(tier) or tier).spec)
    behind = {pod for pod, state in _reported(world, tier).items() if state.capacity_bytes not in (0, divided)}
    if behind:
        sentence = not_reporting(behind, f"divide {readable(divided)}, the newest capacity")
        return unknown(kind, SharedReason.BUDGETS_NOT_ENFORCED, sentence)
    if report is not None and 0 < report.max_bytes < stored and not tier.spec.has_several_primaries:
        sentence = (
            f"the server's maxmemory is {readable(report.max_bytes)}, and scopes make room when together they have "
            f"{readable(stored)}: raise it, or lower capacity"
        )
        return false(kind, TierReason.SERVER_TOO_SMALL, sentence)
    sentence = f"each scope makes room among its own blocks when together they have {readable(stored)}"
    kept = true(kind, TierReason.EVICTS_OWN_BLOCKS, sentence)
    return _if_pods_confirm(world, tier, "divide the tier's capacity among scopes", kept)


def _retention(world: World, tier: CacheTier) -> Finding:
    """Return whether pods respect the tier's maxRetention, which is in every bundle entry."""
    sentence = f"pods remove each block {tier.spec.max_retention} after it was computed, or sooner"
    kept = true(ConditionType.RETENTION_KEPT, TierReason.REMOVED_IN_TIME, sentence)
    content = "memory" if tier.spec.medium is Medium.CPU else "files"
    return _if_pods_confirm(world, tier, f"keep their {content} under the policy", kept)


def _restoring(world: World, tier: CacheTier) -> Finding:
    """Return whether pods load the tier's hits rather than compute them, by their own measurements."""
    kind, reported = ConditionType.RESTORE_PAYS, _reported(world, tier)
    declining = {pod: state for pod, state in reported.items() if state.declining}
    if declining:
        sentence = (
            f"{_some(declining, reported)} compute most hits of the tier, because loading them takes longer: give "
            "the tier's servers, disks or network more bandwidth, or take it off the models' tiers"
        )
        return false(kind, TierReason.SLOWER_THAN_PREFILL, sentence)
    return true(kind, TierReason.FASTER_THAN_PREFILL, "pods load the tier's hits in less time than prefill takes")


def measured(world: World, tier: CacheTier) -> list[RestoreState]:
    """Return the figures of pods that know the speeds of both loads and prefill."""
    found = [state.restore for state in _reported(world, tier).values() if state.restore is not None]
    return [one for one in found if one.prefill_tokens_per_s]


def restores(world: World, tier: CacheTier) -> dict[str, Any] | None:
    """Return `restores` of status; rounded, so that it is seldom written."""
    found = measured(world, tier)
    if not found:
        return None
    return Restores(
        loaded=_rounded(sum(one.restored for one in found)),
        declined=_rounded(sum(one.declined for one in found)),
        saved_seconds=_rounded(sum(one.saved_ms for one in found) // 1000),
        avoided_seconds=_rounded(sum(one.avoided_ms for one in found) // 1000),
        bytes_per_second=_rounded(min(one.bytes_per_s for one in found)),
        tokens_per_second=_rounded(min(one.tokens_per_s for one in found)),
        prefill_tokens_per_second=_rounded(min(one.prefill_tokens_per_s for one in found)),
    ).to_kubernetes()


def _rounded(number: int) -> int:
    """Round to two significant digits."""
    return round(number, 2 - len(str(number)))


def _if_pods_confirm(world: World, tier: CacheTier, what: str, kept: Finding) -> Finding:
    """Return `kept` if every serving pod of the tier reports that it does `what`, else unknown."""
    silent = silent_pods(world, tier, world.models.values())
    if silent:
        return unknown(kept.type, SharedReason.BUDGETS_NOT_ENFORCED, not_reporting({pod.name for pod in silent}, what))
    return kept


OFF_SHARE = 20
"""`used` is rewritten when it is off by this part of the capacity, a twentieth: a busy tier has few writes."""


def file_findings(world: World, tier: CacheTier) -> tuple[Finding, ...]:
    """Return BackendReachable and HasRoom of a tier of files; empty while no pod uses it."""
    if not serving_with(world, tier, world.models.values()):
        return ()
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
    return f"{len(some)} of {len(reported)} pods ({', '.join(list(some)[:3])})"
