"""What may be said of a managed cluster after one look at it."""

from __future__ import annotations

from dataclasses import dataclass

from .health import covered, shards_ready, uncovered, whole
from .steps import Step
from .view import View, count


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a cluster is, whatever is to be done with it.

    `uncovered` counts slots whose requests nobody serves, `shards_ready` shards whose primary serves and whose replicas
    are in step. `slots_covered` and `replication_healthy` are conditions, each with the sentence that says why not,
    empty if so. `settled` is that no rule had anything to do or to wait for; else `progress` says what.
    """

    slots_covered: bool
    slots_message: str
    replication_healthy: bool
    replication_message: str
    uncovered: int
    shards: int
    shards_ready: int
    settled: bool
    reason: str
    progress: str


def judge(view: View, found: Step | None) -> Verdict:
    """Judge a look and the step that follows from it."""
    slots, replication = covered(view), whole(view)
    shards, ready = view.goal.shards, shards_ready(view)
    return Verdict(
        slots_covered=slots is None,
        slots_message=_why(slots),
        replication_healthy=slots is None and replication is None,
        replication_message=_why(slots or replication),
        uncovered=count(uncovered(view)),
        shards=shards,
        shards_ready=ready,
        settled=found is None,
        reason=found.reason if found else "",
        progress=f"{ready} of {shards} shards ready" + (f"; {found.message}" if found else ""),
    )


def _why(waiting: Step | None) -> str:
    return waiting.message if waiting else ""
