"""A tier of files in each pod, by the word of the pods that serve with it: whether they use it, and have room."""

from __future__ import annotations

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.contract.messages.adapter import TierState
from kvstrata.model.world import World
from kvstrata.plan.budgets.capacity import serving_with
from kvstrata.plan.conditions import Finding, false, true, unknown

USED_STEPS = 20
"""`used` is reported in twentieths of the capacity, so that a busy tier does not rewrite its status all the time."""

_NAMED = 3


def file_findings(world: World, tier: CacheTier) -> tuple[Finding, Finding]:
    """Return BackendReachable and HasRoom."""
    told = _told(world, tier)
    if not told:
        pods = serving_with(world, tier, world.models.values())
        reason = TierReason.PROGRESSING if pods else TierReason.NO_LIVE_PODS
        sentence = (
            "no pod has told of its files yet" if pods else "no pod serves a model with this tier, so it has no files"
        )
        return (
            unknown(ConditionType.BACKEND_REACHABLE, reason, sentence),
            unknown(ConditionType.HAS_ROOM, reason, sentence),
        )
    return _reachable(told), _room(told)


def used_share(world: World, tier: CacheTier) -> str | None:
    """Return how much of the capacity the pod has used that uses most, None while none has told."""
    told, capacity_bytes = _told(world, tier), tier.spec.capacity_bytes
    if not told or not capacity_bytes:
        return None
    most_bytes = max(state.used_bytes for state in told.values())
    return f"~{min(USED_STEPS, round(most_bytes * USED_STEPS / capacity_bytes)) * 100 // USED_STEPS}%"


def _reachable(told: dict[str, TierState]) -> Finding:
    kind = ConditionType.BACKEND_REACHABLE
    away = {pod: state for pod, state in told.items() if state.breaker == "open"}
    if away:
        why = next(iter(away.values())).detail
        return false(kind, TierReason.PODS_DISCONNECTED, f"{_some(away, told)} do not use their files: {why}")
    return true(kind, TierReason.REACHABLE, f"{len(told)} pods use their files")


def _room(told: dict[str, TierState]) -> Finding:
    kind = ConditionType.HAS_ROOM
    read_only = {pod: state for pod, state in told.items() if state.read_only}
    if read_only:
        sentence = f"the file system of {_some(read_only, told)} is read-only: blocks are read, and none are stored"
        return false(kind, TierReason.DISK_READ_ONLY, sentence)
    full = {pod: state for pod, state in told.items() if state.full}
    if full:
        sentence = f"the disk of {_some(full, told)} has no room, although the tier's capacity is not used up"
        return false(kind, TierReason.DISK_FULL, sentence)
    short = {pod: state for pod, state in told.items() if state.floor_reached}
    if short:
        sentence = (
            f"the file system of {_some(short, told)} has little left for others, so blocks take less than the "
            "capacity: lower capacityPerPod, or free the node's disk"
        )
        return false(kind, TierReason.FLOOR_REACHED, sentence)
    return true(kind, TierReason.ROOM_LEFT, "each scope makes room among its own blocks when the tier is full")


def _told(world: World, tier: CacheTier) -> dict[str, TierState]:
    """Return what each pod in contact says of the tier, by name, in order."""
    found = {
        pod.name: state
        for pod in serving_with(world, tier, world.models.values())
        if (said := world.states.get(pod.uid)) is not None and said.in_contact
        for state in said.state.tiers
        if state.name == tier.name and state.medium == tier.spec.medium
    }
    return dict(sorted(found.items()))


def _some(some: dict[str, TierState], told: dict[str, TierState]) -> str:
    return f"{len(some)} of {len(told)} pods ({', '.join(list(some)[:_NAMED])})"
