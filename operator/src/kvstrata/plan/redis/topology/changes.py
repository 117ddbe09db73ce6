"""What happened to a cluster between two looks that nobody ordered, or that took many steps.

Servers promote replicas by themselves, and a migration is many steps: neither can be told from what was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstrata.model.redis.cluster import Cluster, Goal
from kvstrata.plan.redis.topology.view import View, count


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
