"""Servers that do not know each other meet, where the other's pod is now."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from kvstrata.model.redis.cluster import Server
from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, count, to

EACH_OTHER = 16
"""Up to so many servers are introduced each to each; gossip alone takes seconds. More of them meet one, and their
shard's primary: the number of introductions grows with its square."""


def meet(view: View) -> Step | None:
    """Introduce to each other those that must not wait for gossip, unless they are just meeting."""
    commands = tuple(
        to(one, "CLUSTER", "MEET", view.pod(other).ip, other.itself.port)
        for one, other in _introductions(view)
        if not (view.knows(one, other) and view.knows(other, one)) and not _meeting(view, one, other)
    )
    if not commands:
        return None
    return Step(StepReason.MEETING, f"{len(commands)} introductions among {len(view.servers)} servers", commands)


def _introductions(view: View) -> Iterator[tuple[Server, Server]]:
    servers = list(view.servers.values())
    if len(servers) <= EACH_OTHER:
        yield from combinations(servers, 2)
        return
    # What has slots is where most others are; of those without, any will do.
    hub = max(servers, key=lambda server: (count(view.slots.get(server.node_id, ())), server.node_id))
    for server in servers:
        if server is hub:
            continue
        yield hub, server
        leader = view.leader(view.pod(server).shard)
        if leader is not None and leader is not server and leader is not hub:
            yield leader, server


def _meeting(view: View, one: Server, other: Server) -> bool:
    """Whether one of them has begun to."""
    pairs = ((one, view.pod(other).ip), (other, view.pod(one).ip))
    return any(peer.handshake and peer.ip == ip for server, ip in pairs for peer in server.peers)
