"""Every server has the memory that is its part of the capacity."""

from __future__ import annotations

from kvstrata.model.redis.cluster import Server
from kvstrata.plan.redis.topology.roll import outdated
from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, to

SPARE_PERCENT = 20
"""By how much a server may have more than its pod was made for: containers have a quarter more, for fragmentation."""


def resize(view: View) -> Step | None:
    """Set the memory of servers that have another.

    What is more than its container has room for, a server gets with its new pod: else the kernel would end it.
    """
    wanted = view.goal.max_bytes_each
    commands = tuple(
        to(server, "CONFIG", "SET", "maxmemory", wanted)
        for server in view.servers.values()
        if server.max_bytes != wanted and _has_room(view, server)
    )
    if not commands:
        return None
    return Step(StepReason.CHANGING_CAPACITY, f"{len(commands)} servers get {wanted} bytes each", commands)


def _has_room(view: View, server: Server) -> bool:
    """Whether a container has room for its server's part, by what its pod was made for.

    Not by what the server has: that may have grown since. Nor by its template alone: which one is in force is not known
    until Kubernetes has seen the newest, and a capacity counts from the moment at which it is declared.
    """
    pod = view.pod(server)
    made_for_bytes = pod.made_for_bytes or server.max_bytes
    within = view.goal.max_bytes_each * 100 <= made_for_bytes * (100 + SPARE_PERCENT)
    return within or not (pod.made_for_bytes or outdated(view, pod))
