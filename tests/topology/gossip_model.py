"""A small model of a Redis Cluster for rules that must hold in any history: servers that gossip, suspect and vote.

It stands in for real servers where thousands of histories are to be tried. What it does on a command or a message was
written after `cluster.c` of Redis 7.0; tests on real servers show the same rules on what it leaves out: time, links
that break, messages that cross. There are few slots, so that histories are quick (`SLOTS`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from kvstrata.model.redis.cluster import Command, Goal, ServerPod

SLOTS = 12
FORGOTTEN_ROUNDS = 30


@dataclass
class Seen:
    """What one server believes of another."""

    ip: str
    primary: str | None = None
    epoch: int = 0
    suspected: bool = False
    failed: bool = False
    no_address: bool = False


@dataclass
class Node:
    """A server: what it is, and what it believes."""

    pod_uid: str
    node_id: str
    ip: str
    primary: str | None = None
    epoch: int = 0
    current: int = 0
    known: dict[str, Seen] = field(default_factory=dict)
    owners: list[str | None] = field(default_factory=lambda: [None] * SLOTS)
    keys: set[int] = field(default_factory=set)
    synced: bool = False
    ever_synced: bool = False
    forgotten: dict[str, int] = field(default_factory=dict)
    max_bytes: int = 0
    frozen: bool = False

    def slots_of(self, node_id: str) -> list[int]:
        """The slots that it believes another, or itself, to have."""
        return [slot for slot, owner in enumerate(self.owners) if owner == node_id]

    @property
    def slots(self) -> list[int]:
        """Its own."""
        return self.slots_of(self.node_id)

    def epoch_of(self, node_id: str) -> int:
        """The epoch under which it believes another to have its slots."""
        return self.epoch if node_id == self.node_id else self.known[node_id].epoch


class RefusedError(Exception):
    """A server refuses a command."""


class Gossip:
    """Pods, and their servers. What an operator does is in `gossip_operator`."""

    def __init__(self, shards: int = 3, replicas: int = 1) -> None:
        self.goal = Goal(shards, replicas, 1 << 20, dict.fromkeys(range(shards), "a"))
        self.pods: dict[str, ServerPod] = {}
        self.nodes: dict[str, Node] = {}
        self._numbers = itertools.count(1)
        self._meets: list[tuple[Node, str]] = []
        self._round = 0
        for shard, ordinal in itertools.product(range(shards), range(1 + replicas)):
            self.add(shard, ordinal)

    # Kubernetes

    def add(self, shard: int, ordinal: int) -> None:
        """A new pod with an empty server."""
        number = next(self._numbers)
        uid = f"uid-{number}"
        revision = self.goal.revisions.get(shard, "a")
        self.pods[uid] = ServerPod(f"{shard}-{ordinal}", uid, shard, ordinal, f"ip-{number}", True, False, revision)
        self.restart(uid)

    def restart(self, uid: str) -> None:
        """Start a server anew in its pod."""
        # Digits that do not follow the order in which servers start: ties are broken by them.
        number = next(self._numbers)
        self.nodes[uid] = Node(uid, f"{number * 7919 % 1000:03d}-{number}", str(self.pods[uid].ip))

    def replace(self, uid: str) -> None:
        """Delete a pod; its StatefulSet makes another."""
        pod = self.pods[uid]
        self.delete(uid)
        self.add(pod.shard, pod.ordinal)

    def delete(self, uid: str) -> None:
        """Delete a pod. Nothing replaces it."""
        del self.pods[uid], self.nodes[uid]

    def terminate(self, uid: str) -> None:
        """Tell a pod to go whose shard is no more."""
        self.delete(uid)

    def want(self, **changes: object) -> None:
        """Edit the tier: pods that are missing are added at once, others go when the operator says so."""
        self.goal = replace(self.goal, **changes)  # type: ignore[arg-type]
        there = {(pod.shard, pod.ordinal) for pod in self.pods.values()}
        for place in itertools.product(range(self.goal.shards), range(1 + self.goal.replicas)):
            if place not in there:
                self.add(*place)

    def shrink(self) -> bool:
        """Give StatefulSets fewer pods, where they have more than the tier wants; return whether any had."""
        surplus = [uid for uid, pod in self.pods.items() if pod.ordinal > self.goal.replicas]
        for uid in surplus:
            self.delete(uid)
        return bool(surplus)

    # Servers

    def alive(self) -> list[Node]:
        """The servers that do anything."""
        return [node for node in self.nodes.values() if not node.frozen]

    def at(self, ip: str) -> Node | None:
        """Who answers at an address."""
        return next((node for node in self.alive() if node.ip == ip), None)

    def gossip(self) -> None:
        """Everybody hears from everybody else, suspects who is silent, and votes."""
        self._round += 1
        meets, self._meets = self._meets, []
        for node, ip in meets:
            if node in self.alive():
                self._meet(node, self.at(ip))
        for node, other in self._links():
            if node.node_id in other.known:
                self._hear(other, node)
            self._hear(node, other)
        for node in self.alive():
            for node_id, seen in node.known.items():
                found = self.at(seen.ip)
                if found is not None and found.node_id != node_id:
                    seen.no_address, seen.ip = True, ""
                seen.suspected = found is None and not seen.no_address
        self._agree()
        for node in self.alive():
            self._vote(node)
        for node in self.alive():
            self._sync(node)

    def write(self) -> None:
        """Every slot that has a primary gets a key, and replicas in step have it, too."""
        for node in self.alive():
            if node.primary is None:
                node.keys |= set(node.slots)
        for node in self.alive():
            self._sync(node)

    def _links(self) -> Iterator[tuple[Node, Node]]:
        for node in self.alive():
            for node_id, seen in list(node.known.items()):
                other = self.at(seen.ip)
                if other is not None and other.node_id == node_id:
                    yield node, other

    def _meet(self, node: Node, other: Node | None) -> None:
        if other is None or other is node:
            return
        for one, two in ((node, other), (other, node)):
            one.known.setdefault(two.node_id, Seen(two.ip)).ip = two.ip
            one.known[two.node_id].no_address = False

    def _hear(self, node: Node, sender: Node) -> None:
        if sender.node_id not in node.known:
            return
        seen = node.known[sender.node_id]
        seen.ip, seen.primary, seen.epoch = sender.ip, sender.primary, sender.epoch
        seen.suspected = seen.failed = seen.no_address = False
        node.current = max(node.current, sender.current)
        if sender.primary is None:
            self._claim(node, sender.node_id, sender.epoch, sender.slots)
            for slot in sender.slots:
                owner = node.owners[slot]
                if owner not in (None, sender.node_id) and owner in sender.known:
                    sender.known[owner].epoch = max(sender.known[owner].epoch, node.epoch_of(str(owner)))
                    self._claim(sender, str(owner), node.epoch_of(str(owner)), [slot])
            if node.primary is None and node.epoch == sender.epoch and sender.node_id > node.node_id:
                node.current += 1
                node.epoch = node.current
        for node_id, told in list(sender.known.items()):
            is_new = node_id not in node.known and node_id != node.node_id
            forgotten = node.forgotten.get(node_id, -FORGOTTEN_ROUNDS) + FORGOTTEN_ROUNDS > self._round
            if is_new and not forgotten and not told.no_address:
                self._meet(node, self.at(told.ip))

    def _claim(self, node: Node, claimant: str, epoch: int, slots: Iterable[int]) -> None:
        """Believe a claim of a higher epoch; who loses all slots by it becomes a replica, and so do its replicas."""
        taken = [
            slot
            for slot in slots
            if (owner := node.owners[slot]) != claimant and (owner is None or node.epoch_of(owner) < epoch)
        ]
        followed = node.node_id if node.primary is None else node.primary
        had = bool(node.slots_of(followed))
        for slot in taken:
            if node.owners[slot] == node.node_id:
                node.keys.discard(slot)
            node.owners[slot] = claimant
        if had and not node.slots_of(followed):
            node.primary, node.synced = claimant, False

    def _agree(self) -> None:
        voters = [node for node in self.alive() if node.primary is None and node.slots]
        size = len(voters) + len({owner for node in voters for owner in node.owners if owner} - set(self._names()))
        size += len([node for node in self.nodes.values() if node.frozen and node.primary is None and node.slots])
        for node_id in {node_id for node in voters for node_id in node.known}:
            suspecting = [one for one in voters if node_id in one.known and one.known[node_id].suspected]
            if len(suspecting) * 2 > size:
                for node in self.alive():
                    if node_id in node.known:
                        node.known[node_id].failed = True

    def _names(self) -> list[str]:
        return [node.node_id for node in self.nodes.values()]

    def _vote(self, node: Node) -> None:
        if node.primary is None or not (seen := node.known.get(node.primary)) or not seen.failed:
            return
        slots = node.slots_of(node.primary)
        owners = {owner for owner in node.owners if owner}
        voters = [one for one in self.alive() if one.node_id in owners and node.node_id in one.known]
        if slots and len(voters) * 2 > len(owners):
            node.current = max([node.current, *(one.current for one in voters)])
            self._promote(node)

    def _promote(self, node: Node) -> None:
        slots = node.slots_of(str(node.primary))
        node.primary, node.synced = None, False
        node.current += 1
        node.epoch = node.current
        for slot in slots:
            node.owners[slot] = node.node_id

    def _sync(self, node: Node) -> None:
        if node.primary is None:
            return
        primary = next((one for one in self.alive() if one.node_id == node.primary), None)
        node.synced = primary is not None and primary.primary is None and node.primary in node.known
        if node.synced and primary is not None:
            node.keys, node.ever_synced = set(primary.keys), True

    def move(self, source_name: str, target_name: str, slot: int) -> None:
        """A slot that moves is at the target at once, under a new epoch; neither end does what is not so any more."""
        by_name = {node.node_id: node for node in self.alive()}
        source, target = by_name.get(source_name), by_name.get(target_name)
        if source is None or target is None or slot not in source.slots or slot in target.slots:
            return
        if target.primary is not None or target_name not in source.known:
            return
        self._on_bump(target)
        target.keys |= {slot} & source.keys
        source.keys -= {slot}
        source.owners[slot] = target.owners[slot] = target.node_id

    def tell(self, command: Command) -> None:
        """What a server does on a command; one for another identity is not sent."""
        node = self.nodes.get(command.pod_uid)
        if node is None or node.frozen or node.node_id != command.node_id:
            raise RefusedError("nobody by that name")
        name, *words = [word for word in command.words if word not in ("CLUSTER", "CONFIG")]
        {
            "MEET": self._on_meet,
            "FORGET": self._on_forget,
            "SET-CONFIG-EPOCH": self._on_epoch,
            "BUMPEPOCH": self._on_bump,
            "ADDSLOTSRANGE": self._on_add_slots,
            "DELSLOTSRANGE": self._on_delete_slots,
            "REPLICATE": self._on_replicate,
            "FAILOVER": self._on_failover,
            "SET": self._on_set,
        }[name](node, *words)

    def _on_meet(self, node: Node, ip: str, port: str) -> None:
        self._meets.append((node, ip))

    def _on_forget(self, node: Node, node_id: str) -> None:
        if node_id not in node.known or node_id == node.primary:
            raise RefusedError("unknown, or its primary")
        del node.known[node_id]
        node.forgotten[node_id] = self._round
        node.owners = [None if owner == node_id else owner for owner in node.owners]

    def _on_epoch(self, node: Node, epoch: str) -> None:
        if node.known or node.epoch:
            raise RefusedError("it knows others, or has one")
        node.epoch = node.current = int(epoch)

    def _on_bump(self, node: Node) -> None:
        if node.epoch == 0 or node.epoch < max([node.current, *(seen.epoch for seen in node.known.values())]):
            node.current += 1
            node.epoch = node.current

    def _on_add_slots(self, node: Node, *bounds: str) -> None:
        slots = _slots(bounds)
        if any(node.owners[slot] is not None for slot in slots):
            raise RefusedError("busy")
        for slot in slots:
            node.owners[slot] = node.node_id

    def _on_delete_slots(self, node: Node, *bounds: str) -> None:
        slots = _slots(bounds)
        if any(node.owners[slot] is None for slot in slots):
            raise RefusedError("already unassigned")
        for slot in slots:
            node.owners[slot] = None

    def _on_replicate(self, node: Node, node_id: str) -> None:
        if node_id not in node.known or node.known[node_id].primary is not None:
            raise RefusedError("unknown, or no primary")
        if node.primary is None and (node.slots or node.keys):
            raise RefusedError("not empty")
        if node.primary != node_id:
            node.primary, node.synced, node.ever_synced = node_id, False, False

    def _on_failover(self, node: Node, how: str = "") -> None:
        if node.primary is None:
            raise RefusedError("a primary")
        if not how and not node.synced:
            raise RefusedError("its primary is down")
        self._promote(node)

    def _on_set(self, node: Node, name: str, value: str) -> None:
        if name == "maxmemory":
            node.max_bytes = int(value)


def _slots(bounds: tuple[str, ...]) -> list[int]:
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return [slot for first, last in pairs for slot in range(int(first), int(last) + 1)]
