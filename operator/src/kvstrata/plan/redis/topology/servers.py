"""Servers that come and go: introductions, lost identities, replication, takeover.

A restarted server has a new identity; the former one would stay listed as failed, with its slots. Servers promote a
replica by majority of the primaries. That fails if the majority is lost or another server answers at the old address;
if the old identity is certainly gone, there is no reason to wait for the timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, permutations

from kvstrata.model.redis.cluster import Server
from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, count, to

EACH_OTHER = 16
"""Up to this many servers are introduced pairwise, because gossip takes seconds. More of them meet one server and their
shard's primary: introductions grow with the square."""

ANNOUNCED_WITHIN_S = 0.2
"""A server reconnects and sends its name within two of its ticks; another introduction would close that connection."""


def meet(view: View) -> Step | None:
    """Introduce servers that must not wait for gossip, unless they are just meeting."""
    commands = tuple(
        to(one, "CLUSTER", "MEET", view.pod(other).ip, other.itself.port)
        for one, other in _introductions(view)
        if not (view.knows(one, other) and view.knows(other, one)) and not _meeting(view, one, other)
    )
    message = f"{len(commands)} introductions among {len(view.servers)} servers"
    return Step(StepReason.MEETING, message, commands) if commands else None


def announce(view: View) -> Step | None:
    """Introduce servers again to those that know them without their announced names. A server sends its name with the
    first ping of a new connection, otherwise with a later ping, up to half of the node time-out away."""
    commands = tuple(
        to(other, "CLUSTER", "MEET", view.pod(one).ip, one.itself.port)
        for pair in _introductions(view)
        for one, other in permutations(pair)
        if view.knows(one, other) and not view.can_redirect(one, other) and not _meeting(view, one, other)
    )
    if not commands:
        return None
    return Step(StepReason.MEETING, f"{len(commands)} names are announced again", commands, pause_s=ANNOUNCED_WITHIN_S)


def _introductions(view: View) -> Iterator[tuple[Server, Server]]:
    servers = list(view.servers.values())
    if len(servers) <= EACH_OTHER:
        yield from combinations(servers, 2)
        return
    # The server with most slots knows most others; without slots any will do.
    hub = max(servers, key=lambda server: (count(view.slots.get(server.node_id, ())), server.node_id))
    for server in servers:
        if server is hub:
            continue
        yield hub, server
        leader = view.leader(view.pod(server).shard)
        if leader is not None and leader is not server and leader is not hub:
            yield leader, server


def _meeting(view: View, one: Server, other: Server) -> bool:
    pairs = ((one, view.pod(other).ip), (other, view.pod(one).ip))
    return any(peer.handshake and peer.ip == ip for server, ip in pairs for peer in server.peers)


def forget(view: View) -> Step | None:
    """Have every server forget lost identities, unless a replica of one may still be promoted. A server does not forget
    its own primary: first it becomes a primary, or another's replica."""
    gone = sorted(node_id for node_id in view.gone if not _awaited(view, node_id))
    commands = tuple(
        to(server, "CLUSTER", "FORGET", node_id)
        for server in view.servers.values()
        for node_id in gone
        if view.sight(server, node_id) is not None and server.itself.primary != node_id
    )
    names = ", ".join(view.name(command.words[-1]) for command in commands[: len(gone)])
    message = f"servers forget {len(gone)} without a pod: {names}"
    return Step(StepReason.FORGETTING, message, commands) if commands else None


def _awaited(view: View, node_id: str) -> bool:
    """Whether a replica of a lost primary is away, but may still be promoted."""
    if node_id not in view.slots:
        return False
    for replica, pod in view.away.items():
        words = view.known[replica]
        if any(word.primary == node_id for word in words) and (pod.ready or not any(word.failed for word in words)):
            return True
    return False


def replicate(view: View) -> Step | None:
    pairs = [(server, leader) for server, leader in _astray(view) if not _holds_keys(server)]
    commands = tuple(to(server, "CLUSTER", "REPLICATE", leader.node_id) for server, leader in pairs)
    names = ", ".join(f"{view.name(server.node_id)} of {view.name(leader.node_id)}" for server, leader in pairs)
    return Step(StepReason.REPLICATING, f"becomes a replica: {names}", commands) if commands else None


def replace(view: View) -> Step | None:
    """Delete the pod of a primary with keys but no slots: it cannot become a replica. Its keys are unused. Its next
    server starts empty and joins."""
    for server, leader in _astray(view):
        if _holds_keys(server) and not view.pod(server).deleting:
            message = f"{view.name(server.node_id)} holds keys of slots that are {view.name(leader.node_id)}'s"
            return Step(StepReason.REPLACING, message, remove_pod=server.pod_uid)
    return None


def _astray(view: View) -> list[tuple[Server, Server]]:
    """Servers that do not replicate their leader, with that leader. One with slots is left alone: they move first, or
    it does not know their new owner yet."""
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


def take_over(view: View) -> Step | None:
    lost = [owner for owner in view.slots if owner not in view.servers and view.replicas(owner)]
    return _promote(view, (owner for owner in lost if owner in view.gone)) or _promote(
        view, (owner for owner in lost if _cut_off(view, owner))
    )


def _promote(view: View, owners: Iterable[str]) -> Step | None:
    chosen = {owner: best_replica(view, view.replicas(owner)) for owner in owners}
    if not chosen:
        return None
    taken = ", ".join(
        f"{view.name(best.node_id)} takes {count(view.slots[owner])} slots of {view.name(owner)}"
        for owner, best in chosen.items()
    )
    commands = tuple(to(best, "CLUSTER", "FAILOVER", "TAKEOVER") for best in chosen.values())
    lost = tuple(piece for owner, best in chosen.items() if not best.ever_synced for piece in view.slots[owner])
    return Step(StepReason.TAKING_OVER, taken, commands, lost=lost)


def best_replica(view: View, replicas: Iterable[Server]) -> Server:
    """The replica that read furthest, preferably in a pod that stays; deterministic."""

    def merit(server: Server) -> tuple[bool, bool, int, str]:
        return server.ever_synced, not view.leaves(view.pod(server)), server.offset, server.node_id

    return max(replicas, key=merit)


def _cut_off(view: View, owner: str) -> bool:
    """Whether a primary that may still live cannot be replaced by a vote. Its replicas and the kubelet do not reach it,
    and most of the primaries, which vote, do not answer, or know a newer epoch of it than its replicas: they refuse
    replicas that missed the last epoch of their primary, and Redis, unlike Valkey, never sends it to them."""
    pod = view.away.get(owner)
    if pod is None or pod.ready:
        return False
    sights = [sight for replica in view.replicas(owner) if (sight := view.sight(replica, owner)) is not None]
    if not all(sight.suspected or sight.failed for sight in sights):
        return False
    newest = max((sight.epoch for sight in sights), default=0)
    voters = (view.sight(view.servers[other], owner) for other in view.slots if other in view.servers)
    votes = sum(sight is None or sight.epoch <= newest for sight in voters)
    return votes * 2 <= len(view.slots)
