"""What a deletion Job has come to: by its conditions, its pod's state, and what the pod printed.

The report is the container's log, and not its termination message, which takes 4 KiB: too little for the primaries of
a large cluster. Nor is it an object that the pod writes, for which it would need a token. Who may be believed is the
kubelet, that this was printed by the pod that the Job's controller made from the Job that the operator made. Who could
run commands in that pod could print anything: so nothing is concluded from a report but its counts, and the operator
looks itself whether anything is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstrata.api.reasons import InvalidationReason
from kvstrata.contract import ContractError
from kvstrata.contract.messages.erase_report import End, Line, Outcome, StopReason, decode_line
from kvstrata.model.erasure.facts import JobState
from kvstrata.objects.erasure.delete_job import CONTAINER
from kvstrata.reconcile.erasure.ports import DeletionRun

WHOLE, MALFORMED, STOPPED = 0, 2, 3
"""Exit codes of the program, as `kvstrata_sidecar.delete_job` documents them."""

OUT_OF_MEMORY = "OOMKilled"
MAX_PROBLEM = 512
"""Characters of a problem."""

REASONS: Mapping[StopReason, InvalidationReason] = {
    StopReason.SERVER_AWAY: InvalidationReason.TIER_AWAY,
    StopReason.ACCESS_REFUSED: InvalidationReason.TIER_AWAY,
    StopReason.SLOTS_UNSERVED: InvalidationReason.TIER_AWAY,
    StopReason.REPLICAS_BEHIND: InvalidationReason.TIER_AWAY,
    StopReason.SLOT_MAP_CHANGED: InvalidationReason.SLOT_MAP_CHANGED,
}
"""Why an erasure is where it is while a deletion that stopped so is tried again; it is deleting, for any other."""

_LONG_HEX = re.compile(r"[0-9a-f]{32,}")


class ReportError(ValueError):
    """The report cannot be read, or not in full: its pod's log may still come."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container ended, by the kubelet."""

    code: int
    reason: str
    at: datetime


def reason_of(run: DeletionRun) -> InvalidationReason:
    """Return the reason of an erasure whose deletion came to this."""
    end = run.lines[-1] if run.lines else None
    stopped = end.reason if isinstance(end, End) else StopReason.NONE
    return REASONS.get(stopped, InvalidationReason.ERASING)


def read_report(log: bytes) -> tuple[Line, ...]:
    """Return the lines of a report that is whole. Raises ReportError for any other.

    A container's log has both its streams, so what is no JSON is passed over.
    """
    try:
        lines = tuple(decode_line(line) for line in log.splitlines() if line.startswith(b"{"))
    except ContractError as error:
        raise ReportError(str(error)) from None
    if not lines or not isinstance(lines[-1], End) or sum(isinstance(line, End) for line in lines) > 1:
        raise ReportError("it does not end as a report does")
    return lines


def judged(job: str, ended: Ended, lines: tuple[Line, ...]) -> DeletionRun:
    """Return what a Job (its uid) came to whose program exited with 0 or 3 and reported this."""
    end = lines[-1]
    if not isinstance(end, End) or (end.outcome is Outcome.ERASED) != (ended.code == WHOLE):
        problem = f"the program exited with {ended.code}, and its report says otherwise"
        return DeletionRun(job, JobState.FAILED, ended.at, lines, problem)
    if end.outcome is Outcome.ERASED:
        return DeletionRun(job, JobState.DONE, ended.at, lines)
    return DeletionRun(job, JobState.FAILED, ended.at, lines, readable(f"{end.reason}: {end.message}"))


def crashed(job: str, pod: str, ended: Ended) -> DeletionRun:
    """Return what a Job came to whose program ended in a way for which it has no report."""
    if ended.code == MALFORMED:
        why = f"the program could not read its order: see the log of pod {pod}"
    elif ended.reason == OUT_OF_MEMORY:
        why = f"pod {pod} ran out of memory"
    else:
        why = f"the program exited with {ended.code} ({ended.reason}): see the log of pod {pod}"
    return DeletionRun(job, JobState.FAILED, ended.at, problem=readable(why))


def ended_of(pod: Mapping[str, Any]) -> Ended | None:
    """Return how the deleting container ended; None while it runs, or if the kubelet never said."""
    state = _state(pod).get("terminated")
    if not state:
        return None
    at = state.get("finishedAt") or pod["metadata"]["creationTimestamp"]
    return Ended(int(state.get("exitCode", -1)), state.get("reason") or "Error", datetime.fromisoformat(at))


def lost(pod: Mapping[str, Any]) -> str:
    """Return why a pod is over whose container never ended by itself, as one that was evicted; empty if it is not."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Failed", "Succeeded"):
        return ""
    return readable(f"its pod was ended: {status.get('reason') or status['phase']} {status.get('message') or ''}")


def held_up(pod: Mapping[str, Any]) -> str:
    """Return why a pod does not begin; empty if it runs, or nothing is known to be the matter."""
    waiting = _state(pod).get("waiting") or {}
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return readable(f"its pod waits: {waiting['reason']} {waiting.get('message') or ''}")
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return readable(f"its pod cannot be scheduled: {condition.get('message') or condition.get('reason')}")
    return ""


def over(job: Mapping[str, Any]) -> str:
    """Return what a Job's controller says of one that is over; empty for one that is not."""
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return readable(f"{condition.get('reason') or condition['type']}: {condition.get('message') or ''}")
    return ""


def readable(text: str) -> str:
    """Return a text for a status: without what could be a keyspace, on one line, not too long."""
    shown = "".join(one if one.isprintable() else " " for one in _LONG_HEX.sub("…", text))
    return " ".join(shown.split())[:MAX_PROBLEM]


def _state(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    told = (pod.get("status") or {}).get("containerStatuses") or ()
    state: Mapping[str, Any] = next((one["state"] for one in told if one["name"] == CONTAINER), {})
    return state
