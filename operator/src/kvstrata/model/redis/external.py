"""Reports of an external tier's servers when they were checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Report of one external server to the user that pods will use.

    Version, role, sizes (bytes) and `eviction` (maxmemory-policy) are known only if the user may run INFO, otherwise
    empty or 0; `max_bytes` 0 of a known version means unbounded. `in_cluster_mode` None is unknown. `refused` are
    commands that the user may not run, `keys_refused` those forbidden on the domain's keys, `unknown` those that the
    server lacks. `slots` counts its slots by the cluster map.
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
    """One check of an external tier: the one server, or every primary of a cluster. If no server answered with the map,
    `servers` has only the one that was asked and `mapped` is False."""

    servers: tuple[ServerFacts, ...]
    mapped: bool = False

    @property
    def answering(self) -> tuple[ServerFacts, ...]:
        return tuple(server for server in self.servers if server.reachable)

    @property
    def covered(self) -> int:
        return sum(server.slots for server in self.servers)

    @property
    def answered(self) -> int:
        return sum(server.slots for server in self.answering)
