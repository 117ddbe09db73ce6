"""A look at a cluster in the terms of the rules: who has which slot, which identities are gone, who leads a shard.

Servers may disagree; then a server's own word counts before what others say of it, and a claim of a higher epoch
before a lower one, as among the servers themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvstrata.api.reasons.tier import TierReason
from kvstrata.model.redis.cluster import SLOTS, Cluster, Command, Goal, Peer, Server, ServerPod, SlotRange


@dataclass(frozen=True)
class View:
    """One look and the goal, with what follows from both. All maps are by node id unless they say otherwise."""

    cluster: Cluster
    goal: Goal

    @cached_property
    def servers(self) -> Mapping[str, Server]:
        """The servers that answered, in the order of their pods."""
        living = (self.cluster.servers.get(pod.uid) for pod in self.pods)
        return {server.node_id: server for server in living if server is not None}

    @cached_property
    def pods(self) -> Sequence[ServerPod]:
        """All pods, by shard and ordinal; of two by one name the younger, which is not being deleted, last."""
        return sorted(self.cluster.pods.values(), key=lambda pod: (pod.shard, pod.ordinal, not pod.deleting, pod.uid))

    def pod(self, server: Server) -> ServerPod:
        """The pod that a server runs in."""
        return self.cluster.pods[server.pod_uid]

    def in_shard(self, shard: int) -> list[Server]:
        """The servers that answered in the pods of a shard, by ordinal."""
        return [server for server in self.servers.values() if self.pod(server).shard == shard]

    def stays(self, pod: ServerPod) -> bool:
        """Whether a shard is to have as many pods as to have this one."""
        return pod.ordinal <= self.goal.replicas

    def leaves(self, pod: ServerPod) -> bool:
        """Whether a pod is being deleted, or is about to be because its StatefulSet is no more."""
        return pod.deleting or pod.uid in self.goal.doomed

    @cached_property
    def owners(self) -> Sequence[str | None]:
        """Who has each slot: a node id, of a server that may be away or gone; None if nobody has it."""
        owners: list[str | None] = [None] * SLOTS
        for node_id, pieces in self.slots.items():
            for first, last in pieces:
                owners[first : last + 1] = [node_id] * (last - first + 1)
        return owners

    def _claims(self) -> Iterator[Peer]:
        for server in self.servers.values():
            if server.itself.is_primary:
                yield server.itself
        for server in self.servers.values():
            yield from (peer for peer in server.peers if peer.node_id not in self.servers and peer.slots)

    @cached_property
    def slots(self) -> Mapping[str, tuple[SlotRange, ...]]:
        """The slots of each node that has any, of servers that are away or gone, too."""
        return {owner: tuple(pieces) for owner, pieces in self._pieces.items() if owner is not None}

    @cached_property
    def unowned(self) -> tuple[SlotRange, ...]:
        """The slots that nobody has."""
        return tuple(self._pieces.get(None, ()))

    @cached_property
    def _pieces(self) -> Mapping[str | None, Sequence[SlotRange]]:
        """The slots of each owner, and of nobody, as ranges in ascending order.

        Ranges are cut where any claim begins or ends, which is far less work than to ask for each slot.
        """
        # The claim that counts comes first: of the highest epoch, and of two such the one that was heard first.
        claims = sorted(self._claims(), key=lambda peer: peer.epoch, reverse=True)
        edges = {edge for peer in claims for first, last in peer.slots for edge in (first, last + 1)}
        cuts = sorted({0, SLOTS} | edges)
        place = {cut: number for number, cut in enumerate(cuts)}
        owners: list[str | None] = [None] * (len(cuts) - 1)
        for peer in reversed(claims):
            for first, last in peer.slots:
                begin, end = place[first], place[last + 1]
                owners[begin:end] = [peer.node_id] * (end - begin)
        pieces: dict[str | None, list[SlotRange]] = {}
        for number, owner in enumerate(owners):
            held = pieces.setdefault(owner, [])
            first = held.pop()[0] if held and held[-1][1] + 1 == cuts[number] else cuts[number]
            held.append((first, cuts[number + 1] - 1))
        return pieces

    @cached_property
    def known(self) -> Mapping[str, Sequence[Peer]]:
        """All that answering servers say of each other node, those that are being met for the first time left out."""
        known: dict[str, list[Peer]] = {}
        for server in self.servers.values():
            for peer in server.peers:
                if peer.node_id != server.node_id and not peer.handshake:
                    known.setdefault(peer.node_id, []).append(peer)
        return known

    @cached_property
    def away(self) -> Mapping[str, ServerPod]:
        """The nodes that a pod whose server does not answer may still be, by the address that others know of it."""
        silent = {pod.ip: pod for pod in self.pods if pod.ip and self._may_be_known(pod)}
        found: dict[str, ServerPod] = {}
        for node_id, peers in self.known.items():
            pods = (silent[peer.ip] for peer in peers if not peer.no_address and peer.ip in silent)
            if node_id not in self.servers and (pod := next(pods, None)) is not None:
                found[node_id] = pod
        return found

    def _may_be_known(self, pod: ServerPod) -> bool:
        """Whether a pod whose server does not answer may still be a node that others know.

        Not if nothing listens in it and its container was only just started: then whoever was there has ended. Either
        alone is no proof. A server that is busy starts long for its kubelet, and who refuses may be something between.
        """
        if pod.uid in self.cluster.servers:
            return False
        reason, _ = self.cluster.silent.get(pod.uid, ("", ""))
        return not (pod.starting and reason == TierReason.CONNECTION_REFUSED)

    @cached_property
    def gone(self) -> frozenset[str]:
        """The identities that no pod has any more: their pod is gone, their process has ended, or another answers."""
        return frozenset(self.known) - self.servers.keys() - self.away.keys()

    def primary(self, shard: int) -> Server | None:
        """The server with slots among a shard's pods; of several the one that got its slots last. None if none has."""
        owners = [server for server in self.in_shard(shard) if server.node_id in self.slots]
        return max(owners, key=lambda server: (server.itself.epoch, server.node_id), default=None)

    def leader(self, shard: int) -> Server | None:
        """The server that the others of a shard are to replicate: its primary; before it has slots the first to come.

        A replica leads nobody; None if there are none but replicas.
        """
        candidates = [server for server in self.in_shard(shard) if server.itself.is_primary]
        staying = (server for server in candidates if not self.leaves(self.pod(server)))
        return self.primary(shard) or next(staying, candidates[0] if candidates else None)

    def replicas(self, primary: str) -> list[Server]:
        """The servers that answered and say that they are replicas of a node."""
        return [server for server in self.servers.values() if server.itself.primary == primary]

    @cached_property
    def _sights(self) -> Mapping[str, Mapping[str, Peer]]:
        return {server.node_id: {peer.node_id: peer for peer in server.peers} for server in self.servers.values()}

    def sight(self, server: Server, other: str) -> Peer | None:
        """What a server knows of another node; None if it does not know it, or is only about to meet it."""
        peer = self._sights[server.node_id].get(other)
        return None if peer is None or peer.handshake else peer

    def knows(self, server: Server, other: Server) -> bool:
        """Whether a server knows another, and where it is now."""
        peer = self.sight(server, other.node_id)
        return peer is not None and not peer.no_address and peer.ip == self.pod(other).ip

    @property
    def shards(self) -> range:
        """The shards that there are to be."""
        return range(self.goal.shards)

    def name(self, node_id: str) -> str:
        """How messages call a node: by its pod, or, of an identity that no pod has, by the beginning of its id."""
        if (server := self.servers.get(node_id)) is not None:
            return self.pod(server).name
        pod = self.away.get(node_id)
        return pod.name if pod is not None else f"the lost node {node_id[:8]}"


def to(server: Server, *words: object) -> Command:
    """A command to a server under the identity that it was seen with."""
    return Command(server.pod_uid, server.node_id, tuple(str(word) for word in words))


def ranges(slots: Iterable[int]) -> tuple[SlotRange, ...]:
    """Slots in ascending order, as ranges."""
    found: list[SlotRange] = []
    for slot in slots:
        if found and found[-1][1] == slot - 1:
            found[-1] = (found[-1][0], slot)
        else:
            found.append((slot, slot))
    return tuple(found)


def count(slots: Iterable[SlotRange]) -> int:
    """How many slots ranges hold."""
    return sum(last - first + 1 for first, last in slots)
