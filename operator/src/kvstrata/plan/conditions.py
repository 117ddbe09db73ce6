"""Conditions, and status writes only on change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.common import Condition, ConditionStatus, Summary
from kvstrata.api.scalars import Quantity, format_timestamp
from kvstrata.model.refs import Key
from kvstrata.objects.quantities import mebibytes
from kvstrata.plan.actions import Decision, StatusWrite

_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that the server drops, equal to one another."""

READY = "Ready"
RECONCILING = "Reconciling"
STALLED = "Stalled"


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition before it has a transition time."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""


def true(kind: str, reason: str, message: str = "") -> Finding:
    return Finding(kind, ConditionStatus.TRUE, reason, message)


def false(kind: str, reason: str, message: str = "") -> Finding:
    return Finding(kind, ConditionStatus.FALSE, reason, message)


def unknown(kind: str, reason: str, message: str = "") -> Finding:
    return Finding(kind, ConditionStatus.UNKNOWN, reason, message)


def kstatus(stalled: Decision | None, pending: Decision | None, ready: Decision) -> tuple[Finding, ...]:
    """Return Ready, with Stalled beside it if a person must act, or Reconciling while the operator waits; absent means
    False for both (kstatus). `stalled` is the problem, `pending` the cause of waiting, `ready` holds otherwise.
    """
    if stalled:
        return (
            false(READY, stalled.reason, stalled.message),
            true(STALLED, stalled.reason, stalled.message),
        )
    if pending:
        return (
            false(READY, pending.reason, pending.message),
            true(RECONCILING, pending.reason, pending.message),
        )
    return (true(READY, ready.reason, ready.message),)


def write_status(
    resource: Resource,
    now: datetime,
    findings: Iterable[Finding],
    fields: Mapping[str, Any],
    *,
    kept: Iterable[Condition] = (),
    can_wait: bool = False,
) -> tuple[StatusWrite, ...]:
    """Return the status write of `resource`, or nothing if its status is the same.

    `fields` are in API form; a None value removes its field. `summary` follows from the sizes among them. A condition
    keeps its transition time while its status stays. Conditions are in the order of `findings`, then unchanged those of
    `kept` that no finding replaces, besides Ready, Reconciling and Stalled. A condition in neither leaves the status.
    `can_wait`: progress only, which the next status may replace.
    """
    status: Any = getattr(resource, "status")  # noqa: B009  (declared by each kind)
    before: dict[str, Condition] = {condition.type: condition for condition in status.conditions}
    current: dict[str, Any] = status.to_kubernetes()
    conditions = []
    for finding in findings:
        old = before.get(finding.type)
        since = old.last_transition_time if old and old.status == finding.status else now
        conditions.append(
            {
                "type": finding.type,
                "status": str(finding.status),
                "reason": finding.reason,
                "message": finding.message,
                "observedGeneration": resource.generation,
                "lastTransitionTime": format_timestamp(since),
            }
        )
    found = {READY, RECONCILING, STALLED} | {condition["type"] for condition in conditions}
    conditions += [condition.to_kubernetes() for condition in kept if condition.type not in found]
    summary = _summary({**current, **fields})
    desired = {**fields, "observedGeneration": resource.generation, "conditions": conditions, "summary": summary}
    changed = {name: value for name, value in desired.items() if not _same(current.get(name), value)}
    if not changed:
        return ()
    key = Key(resource.INFO.kind, resource.namespace, resource.name)
    return (StatusWrite(key, resource.metadata.resource_version, changed, can_wait),)


def _summary(status: Mapping[str, Any]) -> dict[str, str | None] | None:
    """Return the sizes of a status in mebibytes, each None where the status has none, because patches merge."""
    sizes = {**status, **(status.get("usage") or {})}
    shown = {name: sizes.get(name) for name in Summary.model_fields}
    if not any(shown.values()):
        return None
    return {name: mebibytes(Quantity(size).in_bytes) if size else None for name, size in shown.items()}


def changes_only(resource: Resource, write: StatusWrite, fields: Collection[str]) -> bool:
    """Whether a write changes only these fields, in API form, and messages of conditions."""
    status: Any = getattr(resource, "status")  # noqa: B009  (declared by each kind)
    before = [_without_message(condition.to_kubernetes()) for condition in status.conditions]
    now = [_without_message(condition) for condition in write.status.get("conditions", ())]
    return write.status.keys() <= {*fields, "conditions"} and ("conditions" not in write.status or now == before)


def _without_message(condition: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in condition.items() if name != "message"}


def status_from_nothing(
    statuses: Mapping[str, str], reason: str, message: str, generation: int, now: datetime
) -> dict[str, Any]:
    return {
        "observedGeneration": generation,
        "conditions": [
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "observedGeneration": generation,
                "lastTransitionTime": format_timestamp(now),
            }
            for kind, status in statuses.items()
        ],
    }


def _same(current: Any, desired: Any) -> bool:
    if isinstance(current, list) and isinstance(desired, list):
        return len(current) == len(desired) and all(map(_same, current, desired))
    if isinstance(current, dict) and isinstance(desired, dict):
        names = current.keys() | desired.keys()
        return all(_same(current.get(name), desired.get(name)) for name in names)
    return bool(current == desired) or (current in _NOTHING and desired in _NOTHING)
