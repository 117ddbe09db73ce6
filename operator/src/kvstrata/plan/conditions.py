"""Conditions, and status writes only on change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstrata.api.base import GROUP, Resource
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import SharedReason
from kvstrata.api.scalars import Quantity, format_timestamp
from kvstrata.api.status import Condition, ConditionStatus, Summary
from kvstrata.objects.quantities import mebibytes
from kvstrata.plan.actions import Decision, StatusWrite, key_of

_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that the server drops, equal to one another."""

READY = "Ready"
RECONCILING = "Reconciling"
STALLED = "Stalled"

PAUSED = f"{GROUP}/paused"
"""Annotation of a CachedModel or CacheTier: with the value true, the operator leaves its children unchanged."""
WHILE_PAUSED = Decision(SharedReason.PAUSED, f"changes wait: remove the annotation {PAUSED} to have them carried out")


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition before it has a transition time. `lasting`: it does not change until a person acts."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""
    lasting: bool = False

    @property
    def cause(self) -> Decision:
        return Decision(self.reason, self.message)

    @property
    def failure(self) -> Decision | None:
        """The cause of False; None for another status."""
        return self.cause if self.status is ConditionStatus.FALSE else None


def true(kind: str, reason: str, message: str = "") -> Finding:
    return Finding(kind, ConditionStatus.TRUE, reason, message)


def false(kind: str, reason: str, message: str = "", *, lasting: bool = False) -> Finding:
    return Finding(kind, ConditionStatus.FALSE, reason, message, lasting)


def unknown(kind: str, reason: str, message: str = "") -> Finding:
    return Finding(kind, ConditionStatus.UNKNOWN, reason, message)


def repeated(condition: Condition) -> Finding:
    """Return the finding that leaves a condition as it is."""
    return Finding(condition.type, condition.status, condition.reason, condition.message)


def kstatus(
    stalled: Decision | None = None, pending: Decision | None = None, ready: Decision | None = None
) -> tuple[Finding, ...]:
    """Return Ready, with Stalled beside it if a person must act, or Reconciling while the operator waits; absent means
    False for both (kstatus). `stalled` is the problem, `pending` the cause of waiting, `ready` holds otherwise.
    """
    if stalled:
        return false(READY, *stalled), true(STALLED, *stalled)
    if pending:
        return false(READY, *pending), true(RECONCILING, *pending)
    return (true(READY, *ready),) if ready else ()


def write_status(
    resource: Resource,
    now: datetime,
    findings: Iterable[Finding | None],
    fields: Mapping[str, Any],
    *,
    keeps_others: bool = False,
    can_wait: bool = False,
) -> tuple[StatusWrite, ...]:
    """Return the status write of `resource`, or nothing if its status is the same.

    `fields` are in API form; a None value removes its field. `summary` follows from the sizes among them. A condition
    keeps its transition time while its status stays. A finding is None if its condition does not apply. Conditions are
    in the order of `findings`; one that is not among them leaves the status, unless the write `keeps_others` than
    Ready, Reconciling and Stalled. `can_wait`: progress only, which the next status may replace.
    """
    if is_paused(resource):
        others = (one for one in findings if one is not None and one.type != RECONCILING)
        findings = (*others, true(ConditionType.PAUSED, *WHILE_PAUSED))
    status = resource.status
    before: dict[str, Condition] = {condition.type: condition for condition in status.conditions}
    current: dict[str, Any] = status.to_kubernetes()
    conditions = _conditions(findings, resource.generation, now, before)
    if keeps_others:
        found = {READY, RECONCILING, STALLED} | {condition["type"] for condition in conditions}
        conditions += [kept.to_kubernetes() for kept in status.conditions if kept.type not in found]
    summary = _summary({**current, **fields})
    desired = {**fields, "observedGeneration": resource.generation, "conditions": conditions, "summary": summary}
    changed = {name: value for name, value in desired.items() if not _same(current.get(name), value)}
    if not changed:
        return ()
    can_wait = can_wait and "scope" not in changed  # the next leader depends on it
    return (StatusWrite(key_of(resource), resource.metadata.resource_version, changed, can_wait),)


def is_paused(resource: Resource) -> bool:
    return resource.INFO.kind in ("CachedModel", "CacheTier") and resource.metadata.annotations.get(PAUSED) == "true"


def status_from_nothing(findings: Iterable[Finding], generation: int, now: datetime) -> dict[str, Any]:
    return {"observedGeneration": generation, "conditions": _conditions(findings, generation, now, {})}


def _conditions(
    findings: Iterable[Finding | None], generation: int, now: datetime, before: Mapping[str, Condition]
) -> list[dict[str, Any]]:
    conditions = []
    for finding in findings:
        if finding is None:
            continue
        old = before.get(finding.type)
        since = old.last_transition_time if old and old.status == finding.status else now
        conditions.append(
            {
                "type": finding.type,
                "status": str(finding.status),
                "reason": finding.reason,
                "message": finding.message,
                "observedGeneration": generation,
                "lastTransitionTime": format_timestamp(since),
            }
        )
    return conditions


def _summary(status: Mapping[str, Any]) -> dict[str, str | None] | None:
    """Return the sizes of a status in mebibytes, each None where the status has none, because patches merge. Beside a
    limit, use counts on the tiers that the limit is of."""
    usage = status.get("usage") or {}
    sizes = {**status, **usage}
    if usage.get("limit"):
        limited = [row["used"] for row in usage.get("tiers", ()) if row.get("limit") and row.get("used")]
        sizes["used"] = str(sum(Quantity(used).in_bytes for used in limited)) if limited else None
    shown = {name: sizes.get(name) for name in Summary.model_fields}
    if not any(shown.values()):
        return None
    return {name: mebibytes(Quantity(size).in_bytes) if size else None for name, size in shown.items()}


def changes_only(resource: Resource, write: StatusWrite, fields: Collection[str]) -> bool:
    """Whether a write changes only these fields, in API form, and messages of conditions."""
    before = [_without_message(condition.to_kubernetes()) for condition in resource.status.conditions]
    now = [_without_message(condition) for condition in write.status.get("conditions", ())]
    return write.status.keys() <= {*fields, "conditions"} and ("conditions" not in write.status or now == before)


def _without_message(condition: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in condition.items() if name != "message"}


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return names for a message, sorted: the first of them, and the number of others."""
    every = sorted(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def _same(current: Any, desired: Any) -> bool:
    if isinstance(current, list) and isinstance(desired, list):
        return len(current) == len(desired) and all(map(_same, current, desired))
    if isinstance(current, dict) and isinstance(desired, dict):
        names = current.keys() | desired.keys()
        return all(_same(current.get(name), desired.get(name)) for name in names)
    return bool(current == desired) or (current in _NOTHING and desired in _NOTHING)
