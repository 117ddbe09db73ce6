"""Every server has the memory that is its part of the capacity."""

from __future__ import annotations

from .steps import Step, StepReason
from .view import View, to


def resize(view: View) -> Step | None:
    """Set the memory of servers that have another."""
    wanted = view.goal.max_bytes_each
    commands = tuple(
        to(server, "CONFIG", "SET", "maxmemory", wanted)
        for server in view.servers.values()
        if server.max_bytes != wanted
    )
    if not commands:
        return None
    return Step(StepReason.CHANGING_CAPACITY, f"{len(commands)} servers get {wanted} bytes each", commands)
