"""What may be said of a managed cluster after one look at it, and what happened between two.

Servers promote replicas by themselves, and a migration is many steps: neither can be told from what was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstrata.model.redis.cluster import Cluster, Goal
from kvstrata.plan.redis.topology.health import covered, replicas_missing, shards_ready, uncovered, whole
from kvstrata.plan.redis.topology.moves import left_to_move, progress
from kvstrata.plan.redis.topology.roll import outdated
from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, count


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a cluster is, whatever is to be done with it.

    `uncovered` counts slots whose requests nobody serves, `shards_ready` shards whose primary serves and whose replicas
    are in step. `empty` is that all servers there are answer and none of them knows of any slot. `slots_to_move` counts
    slots that are not where they are to be, `pods_to_replace` pods of a former template, `replicas_missing` replicas
    that are wanted and not in step. `slots_covered` and `replication_healthy` are conditions, each with the sentence
    that says why not, empty if so. `settled` is that no rule had anything to do or to wait for; else `progress` says
    what.
    """

    slots_covered: bool
    slots_message: str
    replication_healthy: bool
    replication_message: str
    uncovered: int
    shards: int
    shards_ready: int
    empty: bool
    slots_to_move: int
    pods_to_replace: int
    replicas_missing: int
    settled: bool
    reason: str
    progress: str


def judge(view: View, found: Step | None, moved: int = 0) -> Verdict:
    """Judge a look and the step that follows from it, of which `moved` slots have gone to their shard meanwhile."""
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
        empty=not view.slots and all(pod.uid in view.cluster.servers or pod.ip is None for pod in view.pods),
        slots_to_move=max(0, left_to_move(view) - moved),
        pods_to_replace=sum(outdated(view, pod) and view.stays(pod) for pod in view.pods),
        replicas_missing=replicas_missing(view),
        settled=found is None,
        reason=found.reason if found else "",
        progress=f"{ready} of {shards} shards ready" + (f"; {_told(view, found, moved)}" if found else ""),
    )


def _told(view: View, found: Step, moved: int) -> str:
    return progress(view, moved) if found.reason is StepReason.MOVING_SLOTS else found.message


def _why(waiting: Step | None) -> str:
    return waiting.message if waiting else ""


@dataclass(frozen=True, slots=True)
class Failover:
    """A server, by its node id, has slots of the one that it replicated before. `message` names both."""

    node_id: str
    message: str


def failovers(before: Cluster, after: Cluster, goal: Goal) -> tuple[Failover, ...]:
    """Return who took over from whom between two looks."""
    then, now = View(before, goal), View(after, goal)
    return tuple(_failovers(then, now))


def _failovers(then: View, now: View) -> Iterator[Failover]:
    for node_id, slots in now.slots.items():
        former = _primary_of(then, node_id)
        if node_id not in now.servers or former not in then.slots:
            continue
        names = f"{now.name(node_id)} has {count(slots)} slots of {then.name(former)}"
        yield Failover(node_id, f"{names}, {_whereabouts(now, former)}")


def _primary_of(view: View, node_id: str) -> str:
    """Return whose replica a node was, by its own word or else by others'; empty for nobody's."""
    server = view.servers.get(node_id)
    said = [server.itself.primary] if server is not None else [word.primary for word in view.known.get(node_id, ())]
    return next((primary for primary in said if primary), "")


def _whereabouts(view: View, node_id: str) -> str:
    if node_id in view.servers:
        return "which is a replica now" if not view.servers[node_id].itself.is_primary else "which gave them up"
    return "which does not answer" if node_id in view.away else "which is lost"
