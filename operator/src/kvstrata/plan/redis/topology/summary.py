"""State of a managed cluster after one look, and events between two looks.

Failovers by the servers and long migrations cannot be derived from sent commands.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.model.redis.cluster import Cluster, Goal
from kvstrata.plan.redis.topology.health import covered, replicas_missing, shards_ready, uncovered, whole
from kvstrata.plan.redis.topology.moves import left_to_move, progress
from kvstrata.plan.redis.topology.roll import outdated
from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, count


@dataclass(frozen=True, slots=True)
class Verdict:
    """State of a cluster, independent of the next step.

    `uncovered` counts slots that are not served, `shards_ready` shards with a serving primary and replicas in step.
    `empty`: all servers answer and know no slot. The messages of `slots_covered` and `replication_healthy` are empty if
    these hold. `settled`: no rule had a step; else `progress` describes it.
    """

    slots_covered: bool
    slots_message: str
    replication_healthy: bool
    replication_message: str
    uncovered: int
    shards_ready: int
    empty: bool
    slots_to_move: int
    pods_to_replace: int
    replicas_missing: int
    settled: bool
    progress: str


def judge(view: View, found: Step | None, moved: int = 0) -> Verdict:
    slots = covered(view)
    replication = slots or whole(view)
    ready, work = shards_ready(view), ""
    if found is not None:
        work = "; " + (progress(view, moved) if found.reason is StepReason.MOVING_SLOTS else found.message)
    return Verdict(
        slots_covered=slots is None,
        slots_message=slots.message if slots else "",
        replication_healthy=replication is None,
        replication_message=replication.message if replication else "",
        uncovered=count(uncovered(view)),
        shards_ready=ready,
        empty=not view.slots and all(pod.uid in view.cluster.servers or pod.ip is None for pod in view.pods),
        slots_to_move=max(0, left_to_move(view) - moved),
        pods_to_replace=sum(outdated(view, pod) and view.stays(pod) for pod in view.pods),
        replicas_missing=replicas_missing(view),
        settled=found is None,
        progress=f"{ready} of {view.goal.shards} shards ready{work}",
    )


def failovers(before: Cluster, after: Cluster, goal: Goal) -> dict[str, str]:
    """Return the servers that have slots of their former primary, by node id, and a message about each."""
    then, now = View(before, goal), View(after, goal)
    found = {}
    for node_id, slots in now.slots.items():
        former = _primary_of(then, node_id)
        if node_id in now.servers and former in then.slots:
            names = f"{now.name(node_id)} has {count(slots)} slots of {then.name(former)}"
            found[node_id] = f"{names}, {_whereabouts(now, former)}"
    return found


def _primary_of(view: View, node_id: str) -> str:
    """Return a node's primary, by its own report or else by others'; empty for none."""
    server = view.servers.get(node_id)
    answer = [server.itself.primary] if server is not None else [word.primary for word in view.known.get(node_id, ())]
    return next((primary for primary in answer if primary), "")


def _whereabouts(view: View, node_id: str) -> str:
    if node_id in view.servers:
        return "which is a replica now" if not view.servers[node_id].itself.is_primary else "which gave them up"
    return "which does not answer" if node_id in view.away else "which is lost"
