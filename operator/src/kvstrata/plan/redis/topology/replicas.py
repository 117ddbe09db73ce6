"""Within a shard all servers but the primary replicate it."""

from __future__ import annotations

from kvstrata.model.redis.cluster import Server
from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, to


def replicate(view: View) -> Step | None:
    """Have the servers of each shard replicate its leader, as soon as they know it."""
    pairs = [(server, leader) for server, leader in _astray(view) if not _holds_keys(server)]
    if not pairs:
        return None
    commands = tuple(to(server, "CLUSTER", "REPLICATE", leader.node_id) for server, leader in pairs)
    names = ", ".join(f"{view.name(server.node_id)} of {view.name(leader.node_id)}" for server, leader in pairs)
    return Step(StepReason.REPLICATING, f"becomes a replica: {names}", commands)


def replace(view: View) -> Step | None:
    """Delete the pod of a primary that has keys but no slots: no server makes a replica of such a one.

    Nobody reads what it holds. Its next server starts empty, and joins.
    """
    for server, leader in _astray(view):
        if _holds_keys(server) and not view.pod(server).deleting:
            message = f"{view.name(server.node_id)} holds keys of slots that are {view.name(leader.node_id)}'s"
            return Step(StepReason.REPLACING, message, remove_pod=server.pod_uid)
    return None


def _astray(view: View) -> list[tuple[Server, Server]]:
    """Servers that replicate another than their leader or nobody, with that leader.

    One that claims slots is left alone: they move away first, or it has yet to hear that they are another's.
    """
    found = []
    for server in view.servers.values():
        leader = view.leader(view.pod(server).shard)
        if leader is None or server is leader or server.itself.slots or server.itself.primary == leader.node_id:
            continue
        if view.knows(server, leader):
            found.append((server, leader))
    return found


def _holds_keys(server: Server) -> bool:
    return server.itself.is_primary and server.keys > 0
