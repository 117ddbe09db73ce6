"""Rules for slots in motion: open ones, scaling and draining.

A move under way is finished before another begins, even after a change of goal, because an open slot takes no stores.
Few slots move at a time, so that each look shows progress and a changed goal applies soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvstrata.model.redis.cluster import SLOTS, Command, Server, SlotRange
from kvstrata.plan.redis.topology.steps import MoveOrder, Step, StepReason
from kvstrata.plan.redis.topology.view import View, count, ranges, to

SLOTS_AT_ONCE = 256
"""Slots per order that are moved key by key, or dropped."""

SLOTS_PER_JOB = 1_024
"""Slots per atomic job: each job forks its source once, regardless of its size."""


def jobs_under_way(view: View) -> Step | None:
    orders = [
        _order(view, server.node_id, job.target, job.slots, atomic=True)
        for server in view.servers.values()
        for job in server.jobs
    ]
    return Step(StepReason.MOVING_SLOTS, progress(view), moves=tuple(orders)) if orders else None


def open_slots(view: View) -> Step | None:
    """Slots open between two servers: the move continues if both exist, or is closed at the owner."""
    commands: list[Command] = []
    slots: dict[tuple[str, str], list[int]] = {}
    awaited: list[int] = []
    for slot, ends in sorted(_open(view).items()):
        owner = view.servers.get(view.owners[slot] or "")
        if owner is None:
            awaited.append(slot)
            continue
        stale = [server for server in ends if _is_stale(server, slot, owner)]
        commands += [_close(server, slot, owner) for server in stale]
        if len(stale) == len(ends):
            continue
        target = _target(view, slot, owner, ends)
        if target in view.away:
            awaited.append(slot)
        else:
            slots.setdefault((owner.node_id, target), []).append(slot)
    if commands:
        return Step(StepReason.REPAIRING_SLOTS, f"closing slots that no longer move: {len(commands)}", tuple(commands))
    if slots:
        return _behind(view, slots) or _unbound(view, slots) or _finish(view, slots)
    if awaited:
        which = f"slot {awaited[0]}" if len(awaited) == 1 else f"{len(awaited)} slots"
        return Step(StepReason.WAITING_FOR_SERVERS, f"{which}: open towards a server that does not answer")
    return None


def towards_lost(view: View) -> Step | None:
    """Slots open towards a lost identity. Forgetting the identity would forget the open move and leave unreachable
    keys. Keys that came from a lost server stay at their target, with the slot if no other server has it now."""
    commands: list[Command] = []
    slots: dict[tuple[str, str], list[int]] = {}
    for slot, ends in sorted(_open(view).items()):
        owner = view.owners[slot] or ""
        for server in ends:
            towards = {server.itself.migrating.get(slot), server.itself.importing.get(slot)} & view.gone
            heir = view.servers.get(owner)
            if towards and owner == server.itself.importing.get(slot):
                commands.append(to(server, "CLUSTER", "SETSLOT", slot, "NODE", server.node_id))
            elif towards and heir is not None:
                target = _target(view, slot, heir, ends)
                taker = view.servers.get(target, heir)
                if taker is heir or (view.knows(heir, taker) and view.knows(taker, heir)):
                    slots.setdefault((owner, taker.node_id), []).append(slot)
    if commands:
        message = f"{len(commands)} slots of a lost server stay where they were on their way to"
        return Step(StepReason.REPAIRING_SLOTS, message, tuple(commands))
    return _finish(view, slots) if slots else None


def spread(view: View) -> Step | None:
    found = _transfers(view)
    if not found:
        return None
    going = sorted({view.name(one.target) for one in found if view.leaves(view.pod(view.servers[one.target]))})
    if going:
        return Step(StepReason.WAITING_FOR_PODS, f"before slots go there: {', '.join(going)} is being deleted")
    # A new server refuses requests for some seconds after it joined the majority.
    refusing = sorted({view.name(one.target) for one in found if not view.servers[one.target].cluster_ok})
    if refusing:
        return Step(StepReason.WAITING_FOR_SERVERS, f"before slots go there: {', '.join(refusing)} does not serve yet")
    chosen = tuple(side_by_side(found))
    if behind := _behind(view, [(one.source, one.target) for one in chosen]):
        return behind
    orders = []
    for one in chosen:
        atomic = all(view.servers[node].moves_atomically for node in (one.source, one.target)) and not view.goal.drops
        slots = one.slots[: SLOTS_PER_JOB if atomic else SLOTS_AT_ONCE]
        orders.append(_order(view, one.source, one.target, ranges(sorted(slots)), atomic=atomic))
    return Step(StepReason.MOVING_SLOTS, progress(view), moves=tuple(orders))


def removal(view: View) -> Step | None:
    beyond = {pod.shard for pod in view.pods if pod.shard >= view.goal.shards}
    owners = {view.pod(view.servers[node]).shard for node in view.slots if node in view.servers}
    owners |= {view.away[node].shard for node in view.slots if node in view.away}
    drained = tuple(sorted(beyond - owners))
    if not drained:
        return None
    names = ", ".join(str(shard) for shard in drained)
    message = f"shard{'s' if len(drained) > 1 else ''} {names} without slots: to be removed"
    staying = {pod.shard for pod in view.pods if not pod.deleting}
    return Step(StepReason.REMOVING_SHARD, message, drained=tuple(shard for shard in drained if shard in staying))


def progress(view: View, moved: int = 0) -> str:
    """Describe progress: slots received by growing shards, or given by shards under removal. `moved` slots have moved
    since the look."""
    leaders = _leaders(view)
    sizes = {node: count(found) for node, found in view.slots.items()}
    total = done = 0
    if leaders:
        wanted = parts(sizes, list(leaders.values()))
        lacking = [node for node, part in wanted.items() if sizes.get(node, 0) < part]
        draining = [node for node in sizes if node not in wanted]
        if draining:
            whole = SLOTS // len(wanted.keys() | sizes.keys())
            total = sum(max(whole, sizes[node]) for node in draining)
            done = total - sum(sizes[node] for node in draining)
        else:
            total = sum(wanted[node] for node in lacking)
            done = sum(sizes.get(node, 0) for node in lacking)
    return f"moving slots: {min(total, done + moved):,} of {total:,}" if total else "moving slots"


def left_to_move(view: View) -> int:
    return sum(len(one.slots) for one in _transfers(view))


def _transfers(view: View) -> tuple[Transfer, ...]:
    """Required transfers; none while a server with slots, or one that needs some, does not answer."""
    leaders = _leaders(view)
    if not leaders or any(node not in view.servers for node in view.slots):
        return ()
    return transfers(view.slots, list(leaders.values()))


def _leaders(view: View) -> Mapping[int, str]:
    """The primary of every desired shard, also without slots; empty if one has none."""
    found = {shard: leader for shard in view.shards if (leader := view.leader(shard)) is not None}
    return {shard: leader.node_id for shard, leader in found.items()} if len(found) == len(view.shards) else {}


def _open(view: View) -> Mapping[int, Sequence[Server]]:
    """The servers at which each slot is open, without replicas, which cannot close one."""
    found: dict[int, list[Server]] = {}
    for server in view.servers.values():
        if server.itself.is_primary:
            for slot in server.itself.migrating.keys() | server.itself.importing.keys():
                found.setdefault(slot, []).append(server)
    return found


def _is_stale(server: Server, slot: int, owner: Server) -> bool:
    """Whether a slot is open at a server that is neither source nor target of its move."""
    if server.node_id == owner.node_id:
        return slot not in server.itself.migrating
    return slot not in server.itself.importing


def _close(server: Server, slot: int, owner: Server) -> Command:
    claims = any(first <= slot <= last for first, last in server.itself.slots)
    if claims and server.node_id != owner.node_id:
        return to(server, "CLUSTER", "SETSLOT", slot, "NODE", owner.node_id)
    return to(server, "CLUSTER", "SETSLOT", slot, "STABLE")


def _target(view: View, slot: int, owner: Server, ends: Iterable[Server]) -> str:
    """The target of an open slot; the owner itself if the move must be closed. An importer continues if it imports from
    the owner or its lost predecessor; other keys are left from another move."""
    meant = owner.itself.migrating.get(slot)
    if meant is not None:
        heir = _heir(view, meant)
        if meant in view.away or (heir is not None and heir != owner.node_id):
            return heir or meant
    for server in ends:
        origin = server.itself.importing.get(slot)
        if origin is not None and server.node_id != owner.node_id:
            lives = origin in view.servers or origin in view.away
            if not lives or _heir(view, origin) == owner.node_id:
                return server.node_id
    return owner.node_id


def _heir(view: View, node: str) -> str | None:
    """The primary that has a node's data: itself, or its new primary. None if it is gone."""
    server = view.servers.get(node)
    if server is not None and not server.itself.is_primary:
        server = view.servers.get(server.itself.primary or "")
    return server.node_id if server is not None and server.itself.is_primary else None


def _behind(view: View, pairs: Iterable[tuple[str, str]]) -> Step | None:
    """Wait for targets that do not know the epoch under which the owner has its slots. They would claim the slots under
    a lower epoch, lose them to the owner's last message, and no server would have them."""
    servers = view.servers
    behind = [target for source, target in pairs if servers[source].itself.epoch > servers[target].current_epoch]
    if not behind:
        return None
    names = ", ".join(sorted({view.name(target) for target in behind}))
    message = f"before slots move there: {names} does not know their owner's epoch yet"
    return Step(StepReason.WAITING_FOR_GOSSIP, message)


def _unbound(view: View, slots: Mapping[tuple[str, str], Sequence[int]]) -> Step | None:
    """Send targets the owner of open slots that have none in their view. A server answers such a slot's keys with
    CLUSTERDOWN, and ignores gossip about a slot that it imports."""
    commands = []
    for (source, target), found in slots.items():
        server = view.servers[target]
        bound = [piece for peer in server.peers for piece in peer.slots]
        if view.knows(server, view.servers[source]):
            commands += [
                to(server, "CLUSTER", "SETSLOT", slot, "NODE", source)
                for slot in found
                if not any(first <= slot <= last for first, last in bound)
            ]
    if not commands:
        return None
    message = f"{len(commands)} open slots have no owner in their target's view"
    return Step(StepReason.REPAIRING_SLOTS, message, tuple(commands))


def _order(view: View, source: str, target: str, slots: tuple[SlotRange, ...], *, atomic: bool) -> MoveOrder:
    return MoveOrder(source, target, slots, atomic, drops=view.goal.drops, movable_bytes=view.goal.movable_bytes)


def _finish(view: View, slots: Mapping[tuple[str, str], Sequence[int]]) -> Step:
    """Continue open moves, by source and target, or close slots that stay at their source."""
    orders, sentences = [], []
    for (source, target), found in slots.items():
        orders.append(_order(view, source, target, ranges(sorted(set(found))), atomic=False))
        what = f"slot {found[0]}" if len(found) == 1 else f"{len(found)} slots"
        if source == target:
            sentences.append(f"closing {what} at {view.name(source)}: where it was to go is gone")
        else:
            sentences.append(f"going on with {what} from {view.name(source)} to {view.name(target)}")
    return Step(StepReason.REPAIRING_SLOTS, "; ".join(sentences), moves=tuple(orders))


@dataclass(frozen=True, slots=True)
class Transfer:
    """Slots to move from one node to another, in order. After a partial move a new transfer continues it: ranges grow
    at one end."""

    source: str
    target: str
    slots: tuple[int, ...]


def parts(owned: Mapping[str, int], nodes: Sequence[str]) -> Mapping[str, int]:
    """Number of slots for each of `nodes`: equal parts, with the remainder at those that have most already. Of equal
    ones the last get it, as in 16,384 slots cut at `16384 * n // nodes`."""
    each, more = divmod(sum(owned.values()), len(nodes))
    most = sorted(range(len(nodes)), key=lambda place: (-owned.get(nodes[place], 0), -place))[:more]
    return {node: each + (place in most) for place, node in enumerate(nodes)}


def transfers(owned: Mapping[str, Sequence[SlotRange]], nodes: Sequence[str]) -> tuple[Transfer, ...]:
    """The minimal transfers that give `nodes` all slots in equal parts, and others none. Ranges stay whole if possible:
    first slots beside the target's, from the near end, then whole ranges, then ends."""
    sizes = {node: count(ranges) for node, ranges in owned.items()}
    wanted = parts(sizes, nodes)
    surplus = {node: size - wanted.get(node, 0) for node, size in sizes.items() if size > wanted.get(node, 0)}
    lack = {node: wanted[node] - sizes.get(node, 0) for node in nodes if wanted[node] > sizes.get(node, 0)}
    left = {node: sorted(owned[node]) for node in surplus}
    moves: dict[tuple[str, str], list[int]] = {}

    def take(source: str, target: str, piece: SlotRange, *, from_end: bool) -> None:
        number = min(surplus[source], lack[target], count([piece]))
        first, last = (piece[1] - number + 1, piece[1]) if from_end else (piece[0], piece[0] + number - 1)
        left[source].remove(piece)
        rest = ((piece[0], first - 1), (last + 1, piece[1]))
        left[source] = sorted([*left[source], *(part for part in rest if part[0] <= part[1])])
        surplus[source] -= number
        lack[target] -= number
        slots = range(last, first - 1, -1) if from_end else range(first, last + 1)
        moves.setdefault((source, target), []).extend(slots)

    for source in surplus:
        for target in lack:
            for piece, from_end in _beside(left[source], owned.get(target, ())):
                if surplus[source] and lack[target]:
                    take(source, target, piece, from_end=from_end)
    for source in surplus:
        for target in lack:
            while surplus[source] and lack[target]:
                room = min(surplus[source], lack[target])
                whole = [piece for piece in left[source] if count([piece]) <= room]
                piece = max(whole or left[source], key=lambda one: count([one]) * (1 if whole else -1))
                take(source, target, piece, from_end=True)
    return tuple(Transfer(source, target, tuple(slots)) for (source, target), slots in moves.items())


def side_by_side(found: Sequence[Transfer]) -> Iterator[Transfer]:
    busy: set[str] = set()
    for one in found:
        if not busy & {one.source, one.target}:
            busy |= {one.source, one.target}
            yield one


def _beside(pieces: Sequence[SlotRange], others: Sequence[SlotRange]) -> list[tuple[SlotRange, bool]]:
    """The pieces that touch one of `others`, each with whether it does so at its end."""
    begins, ends = {first for first, _ in others}, {last for _, last in others}
    touching = [(piece, piece[1] + 1 in begins) for piece in pieces]
    return [(piece, at_end) for piece, at_end in touching if at_end or piece[0] - 1 in ends]
