"""Identities that no pod has any more are forgotten by every server.

A server's start is a new identity. The former one would stay in everybody's list as failed, and with it the slots that
nobody took over.
"""

from __future__ import annotations

from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, to


def forget(view: View) -> Step | None:
    """Have every server forget the identities that are gone, unless a copy of what one had may come back.

    A server does not forget its own primary: first it becomes a primary itself, or another's replica.
    """
    gone = sorted(node_id for node_id in view.gone if not _awaited(view, node_id))
    commands = tuple(
        to(server, "CLUSTER", "FORGET", node_id)
        for server in view.servers.values()
        for node_id in gone
        if view.sight(server, node_id) is not None and server.itself.primary != node_id
    )
    if not commands:
        return None
    names = ", ".join(view.name(command.words[-1]) for command in commands[: len(gone)])
    return Step(StepReason.FORGETTING, f"servers forget {len(gone)} without a pod: {names}", commands)


def _awaited(view: View, node_id: str) -> bool:
    """Whether a replica of a lost primary is away, but may still be promoted: it is not known to have failed."""
    if node_id not in view.slots:
        return False
    for replica, pod in view.away.items():
        words = view.known[replica]
        if any(word.primary == node_id for word in words) and (pod.ready or not any(word.failed for word in words)):
            return True
    return False
