"""Result of a deletion Job: from its conditions, its pod's state, and the pod's log.

The report is the container's log: a termination message takes 4 KiB, too little for the primaries of a large cluster,
and writing an object would need a token in the pod. The kubelet vouches that the Job's pod printed the log. A process
in the pod could print anything, so only counts are taken from a report, and the operator verifies the tier itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstrata.contract import ContractError
from kvstrata.contract.messages.erase_report import End, Line, Outcome, decode_line
from kvstrata.model.erasure.facts import JobState
from kvstrata.model.pods import Warned
from kvstrata.objects.erasure.delete_job import CONTAINER
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.plan.pod_trouble import of_events, of_status
from kvstrata.reconcile.parse import image_digest

WHOLE, MALFORMED, STOPPED = 0, 2, 3
"""Exit codes, as `kvstrata_sidecar.delete_job` documents them."""

MAX_PROBLEM = 512
"""Characters."""

_LONG_HEX = re.compile(r"[0-9a-f]{32,}")


class ReportError(ValueError):
    """The report cannot be read in full; the rest of the log may still arrive."""


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    reason: str
    at: datetime


def read_report(log: bytes) -> tuple[Line, ...]:
    """Return a complete report's lines. Raises ReportError. A container's log has both streams, so lines that are no
    JSON are skipped."""
    try:
        lines = tuple(decode_line(line) for line in log.splitlines() if line.startswith(b"{"))
    except ContractError as error:
        raise ReportError(str(error)) from None
    if not lines or not isinstance(lines[-1], End) or sum(isinstance(line, End) for line in lines) > 1:
        raise ReportError("it does not end as a report does")
    return lines


def judged(job: str, ended: Ended, lines: tuple[Line, ...]) -> DeletionRun:
    """Return the result of a Job (its uid) whose program exited with 0 or 3 and this report."""
    end = lines[-1]
    if not isinstance(end, End) or (end.outcome is Outcome.ERASED) != (ended.code == WHOLE):
        problem = f"the program exited with {ended.code}, and its report contradicts that"
        return DeletionRun(job, JobState.FAILED, ended.at, lines, problem)
    if end.outcome is Outcome.ERASED:
        return DeletionRun(job, JobState.DONE, ended.at, lines)
    return DeletionRun(job, JobState.FAILED, ended.at, lines, readable(f"{end.reason}: {end.message}"))


def crashed(job: str, pod: str, ended: Ended) -> DeletionRun:
    if ended.code == MALFORMED:
        why = f"the program could not read its order: see the log of pod {pod}"
    elif ended.reason == "OOMKilled":
        why = f"pod {pod} ran out of memory"
    else:
        why = f"the program exited with {ended.code} ({ended.reason}): see the log of pod {pod}"
    return DeletionRun(job, JobState.FAILED, ended.at, problem=readable(why))


def ended_of(pod: Mapping[str, Any]) -> Ended | None:
    """Return how the deleting container ended; None while it runs or if the kubelet never reported it."""
    state = (_status(pod).get("state") or {}).get("terminated")
    if not state:
        return None
    at = state.get("finishedAt") or pod["metadata"]["creationTimestamp"]
    return Ended(int(state.get("exitCode", -1)), state.get("reason") or "Error", datetime.fromisoformat(at))


def image_of(pod: Mapping[str, Any]) -> str:
    """Return the digest of the deleting container's image; empty before the kubelet reports it."""
    return image_digest(_status(pod))


def lost(pod: Mapping[str, Any]) -> str:
    """Return why a pod ended before its container did, as by eviction; empty if it did not."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Failed", "Succeeded"):
        return ""
    return readable(f"its pod was ended: {status.get('reason') or status['phase']} {status.get('message') or ''}")


def has_begun(pod: Mapping[str, Any]) -> bool:
    state = _status(pod).get("state") or {}
    return "running" in state or "terminated" in state


def held_up(pod: Mapping[str, Any], warnings: Sequence[Warned] = ()) -> str:
    """Return why a pod does not start; empty if it runs or no cause is known."""
    found = None if has_begun(pod) else of_status(pod.get("status") or {}) or of_events(warnings)
    return readable(f"pod {pod['metadata']['name']}: {found.message}") if found is not None else ""


def over(job: Mapping[str, Any]) -> str:
    """Return the controller's message for a finished Job; empty for others."""
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return readable(f"{condition.get('reason') or condition['type']}: {condition.get('message') or ''}")
    return ""


def readable(text: str) -> str:
    """Return a text for a status: on one line, shortened, without possible keyspaces."""
    shown = "".join(one if one.isprintable() else " " for one in _LONG_HEX.sub("…", text))
    return " ".join(shown.split())[:MAX_PROBLEM]


def _status(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    status: Mapping[str, Any] = next((one for one in statuses if one["name"] == CONTAINER), {})
    return status
