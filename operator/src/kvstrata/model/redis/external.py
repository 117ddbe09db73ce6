"""What the servers of an external tier said of themselves when they were checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What one external server said to the user that pods will be.

    `address` is how it was reached. Version, role, sizes (bytes) and `eviction` (its maxmemory-policy) are known only
    if the user may run INFO, and are empty or 0 otherwise; `max_bytes` 0 of a known version is no bound.
    `in_cluster_mode` is None where nobody said. `refused` are the commands that the user may not run, `keys_refused`
    those that it may not run on the domain's keys, `unknown` those that the server does not have. `slots` is how many
    slots of a cluster it has by the word of the server that was asked for them.
    """

    address: str
    reachable: bool
    reason: str
    message: str
    software: str = "Redis"
    version: str = ""
    is_replica: bool = False
    in_cluster_mode: bool | None = None
    used_bytes: int = 0
    max_bytes: int = 0
    eviction: str = ""
    refused: tuple[str, ...] = ()
    keys_refused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    slots: int = 0


@dataclass(frozen=True, slots=True)
class ExternalReport:
    """One check of an external tier: the one server, or every primary of a cluster as one of its servers named them.

    Where no server answered to name them, the one that was asked is all there is, and `mapped` is False.
    """

    servers: tuple[ServerFacts, ...]
    mapped: bool = False

    @property
    def answering(self) -> tuple[ServerFacts, ...]:
        """Those that answered."""
        return tuple(server for server in self.servers if server.reachable)

    @property
    def covered(self) -> int:
        """How many slots have a server."""
        return sum(server.slots for server in self.servers)

    @property
    def answered(self) -> int:
        """How many slots have a server that answers."""
        return sum(server.slots for server in self.answering)
