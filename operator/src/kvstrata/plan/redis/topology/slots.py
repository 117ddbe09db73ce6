"""Slots without an owner get one, and a waiting owner serves them soon.

The data of a lost server without replicas is gone. The empty server in its place gets its slots, and the step names the
lost ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstrata.model.redis.cluster import Command, Server, SlotRange
from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, count, ranges, to

REJOIN_MS = 1000
"""Node timeout for primaries that wait to serve. A primary that had no majority, as each before it has slots, refuses
requests for another node timeout (`clusterUpdateState`: rejoin_delay)."""


def form(view: View) -> Step | None:
    """Give each shard's first server its part of the slots before they meet, so that epochs differ from the start. Only
    if every shard has a server, none knows of slots, and no ready pod is silent."""
    takers = {shard: leader for shard in view.shards if (leader := view.leader(shard)) is not None}
    silent = any(pod.ready and pod.uid not in view.cluster.servers for pod in view.pods)
    if view.slots or silent or len(takers) < view.goal.shards:
        return None
    shares = _shares(view.unowned, tuple(view.shards))
    commands = tuple(command for shard, server in takers.items() for command in _give(server, shares[shard], shard + 1))
    return Step(StepReason.FORMING, f"all slots are given to {len(takers)} shards", commands)


def assign(view: View) -> Step | None:
    """Give unowned slots to the shards without any, or else to the one with fewest.

    Slots that are changing hands wait: a look is not atomic, and may have asked both servers before their change.
    Others then report a replica as the owner.
    """
    if not view.slots or not view.unowned:
        return None
    free = ranges(sorted(_slots(view.unowned) & _slots(view.cluster.unclaimed_before)))
    if not free or _changing_hands(view):
        return None
    # A shard with an absent primary has its slots.
    away = {view.away[owner].shard for owner in view.slots if owner in view.away}
    there = [shard for shard in view.shards if shard not in away]
    lacking = [shard for shard in there if view.primary(shard) is None]
    least = sorted(there, key=lambda shard: (_held(view, shard), shard))[:1]
    shares = _shares(free, lacking or least)
    takers = {shard: server for shard in shares if (server := _taker(view, shard)) is not None}
    # A server without the highest epoch would claim slots without effect.
    epoch = max(server.current_epoch for server in view.servers.values())
    given = {shard: server for shard, server in takers.items() if server.current_epoch >= epoch and shares[shard]}
    if not given:
        return None
    commands = tuple(command for shard, server in given.items() for command in _give(server, shares[shard]))
    found = {slot for shard in given for slot in _slots(shares[shard])}
    lost = ranges(sorted(found - _left_to_each_other(view)))
    names = ", ".join(view.name(server.node_id) for server in given.values())
    if not lost:
        message = f"{len(found)} slots that servers left to each other are given to {names}"
        return Step(StepReason.REPAIRING_SLOTS, message, commands)
    message = f"{count(lost)} slots without an owner are given, empty, to {names}"
    return Step(StepReason.SLOTS_LOST, message, commands, lost=lost)


def _left_to_each_other(view: View) -> set[int]:
    """Return the unclaimed slots that every server attributes to another server that answers: commands of two operators
    crossed. Nothing is lost: a server refuses CLUSTER SETSLOT for a slot of which it holds keys, and after CLUSTER
    DELSLOTS, which it does not refuse, it attributes the slot to no server."""
    free = _slots(view.unowned)
    for server in view.servers.values():
        others = (peer for peer in server.peers if peer.node_id in view.servers and peer.node_id != server.node_id)
        free &= {slot for peer in others for slot in _slots(peer.slots)}
    return free


def _changing_hands(view: View) -> bool:
    """Whether a server reports an unclaimed slot as a replica's, which will be announced."""
    free = _slots(view.unowned)
    return any(
        peer.linked and not peer.suspected and not peer.failed and not free.isdisjoint(_slots(peer.slots))
        for server in view.servers.values()
        for peer in server.peers
        if peer.node_id in view.servers and not view.servers[peer.node_id].itself.is_primary
        if peer.node_id != server.node_id
    )


def rejoin(view: View) -> Step | None:
    """Shorten the node timeout of primaries that wait despite a majority, and restore it when they serve."""
    wanted = {server.node_id: _node_timeout_ms(view, server) for server in view.servers.values()}
    commands = tuple(
        to(server, "CONFIG", "SET", "cluster-node-timeout", wanted[server.node_id])
        for server in view.servers.values()
        if server.node_timeout_ms != wanted[server.node_id]
    )
    message = f"the node time-out of {len(commands)} servers is set"
    return Step(StepReason.REJOINING, message, commands) if commands else None


def _node_timeout_ms(view: View, server: Server) -> int:
    if server.cluster_ok or server.node_id not in view.slots:
        return view.goal.node_timeout_ms
    reached = sum(
        owner == server.node_id or (sight is not None and sight.linked and not sight.suspected and not sight.failed)
        for owner in view.slots
        for sight in (view.sight(server, owner),)
    )
    return min(REJOIN_MS, view.goal.node_timeout_ms) if reached * 2 > len(view.slots) else view.goal.node_timeout_ms


def _give(server: Server, slots: Sequence[SlotRange], epoch: int = 0) -> list[Command]:
    """The commands that give slots to a server and make its claim the newest. `epoch` is for a server that knows no
    other yet."""
    commands = []
    if not server.itself.is_primary:
        commands.append(to(server, "CLUSTER", "FAILOVER", "TAKEOVER"))
    if epoch and len(server.peers) == 1 and server.itself.epoch == 0:
        commands.append(to(server, "CLUSTER", "SET-CONFIG-EPOCH", epoch))
    else:
        commands.append(to(server, "CLUSTER", "BUMPEPOCH"))
    wanted = _slots(slots)
    believed = {slot for peer in server.peers if peer.node_id != server.node_id for slot in _slots(peer.slots)}
    if stale := ranges(sorted(wanted & believed)):
        commands.append(to(server, "CLUSTER", "DELSLOTSRANGE", *(bound for piece in stale for bound in piece)))
    commands.append(to(server, "CLUSTER", "ADDSLOTSRANGE", *(bound for piece in slots for bound in piece)))
    return commands


def _taker(view: View, shard: int) -> Server | None:
    """The server that takes slots for a shard: its leader, or a replica of a primary without slots."""
    idle = (server for server in view.in_shard(shard) if server.itself.primary not in view.slots)
    return view.leader(shard) or next(idle, None)


def _held(view: View, shard: int) -> int:
    return sum(count(view.slots.get(server.node_id, ())) for server in view.in_shard(shard))


def _shares(slots: Sequence[SlotRange], shards: Sequence[int]) -> Mapping[int, tuple[SlotRange, ...]]:
    """Parts of equal size, in the order of the shards."""
    free = sorted(_slots(slots))
    if not shards:
        return {}
    cuts = [len(free) * number // len(shards) for number in range(len(shards) + 1)]
    return {shard: ranges(free[cuts[number] : cuts[number + 1]]) for number, shard in enumerate(shards)}


def _slots(pieces: Sequence[SlotRange]) -> set[int]:
    return {slot for first, last in pieces for slot in range(first, last + 1)}
