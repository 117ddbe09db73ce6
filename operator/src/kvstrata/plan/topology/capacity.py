"""Every server has the memory that is its part of the capacity."""

from __future__ import annotations

from kvstrata.model.topology import Server

from .roll import outdated
from .steps import Step, StepReason
from .view import View, to

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
    within = view.goal.max_bytes_each * 100 <= server.max_bytes * (100 + SPARE_PERCENT)
    return within or not outdated(view, view.pod(server))
