"""A look at a cluster in terms of the rules: slot owners, lost identities, shard leaders.

Where servers disagree, a server's report about itself comes first, then the claim of the highest epoch, as in Redis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvstrata.api.reasons.tier import TierReason
from kvstrata.model.redis.cluster import SLOTS, Cluster, Command, Goal, Peer, Server, ServerPod, SlotRange


@dataclass(frozen=True)
class View:
    """One look and the goal, with derived facts. Maps are by node id unless stated otherwise."""

    cluster: Cluster
    goal: Goal

    @cached_property
    def servers(self) -> Mapping[str, Server]:
        living = (self.cluster.servers.get(pod.uid) for pod in self.pods)
        return {server.node_id: server for server in living if server is not None}

    @cached_property
    def pods(self) -> Sequence[ServerPod]:
        """All pods, by shard and ordinal; of two with one name the live one is last."""
        return sorted(self.cluster.pods.values(), key=lambda pod: (pod.shard, pod.ordinal, not pod.deleting, pod.uid))

    def pod(self, server: Server) -> ServerPod:
        return self.cluster.pods[server.pod_uid]

    def in_shard(self, shard: int) -> list[Server]:
        return [server for server in self.servers.values() if self.pod(server).shard == shard]

    def stays(self, pod: ServerPod) -> bool:
        """Whether the goal has a pod with this ordinal."""
        return pod.ordinal <= self.goal.replicas

    def leaves(self, pod: ServerPod) -> bool:
        """Whether a pod is under deletion, or will be because its StatefulSet is gone."""
        return pod.deleting or pod.uid in self.goal.doomed

    @cached_property
    def owners(self) -> Sequence[str | None]:
        """The owner of each slot, which may be away or gone; None for no owner."""
        owners: list[str | None] = [None] * SLOTS
        for node_id, pieces in self.slots.items():
            for first, last in pieces:
                owners[first : last + 1] = [node_id] * (last - first + 1)
        return owners

    @cached_property
    def slots(self) -> Mapping[str, tuple[SlotRange, ...]]:
        """The slots of each node with any, including nodes that are away or gone."""
        return {owner: tuple(pieces) for owner, pieces in self._pieces.items() if owner is not None}

    @cached_property
    def unowned(self) -> tuple[SlotRange, ...]:
        return tuple(self._pieces.get(None, ()))

    @cached_property
    def _pieces(self) -> Mapping[str | None, Sequence[SlotRange]]:
        """The slots of each owner, and of none, as ranges in ascending order. Ranges are cut at the bounds of claims,
        which is much faster than per slot."""
        servers = self.servers.values()
        claims = [server.itself for server in servers if server.itself.is_primary]
        others = (peer for server in servers for peer in server.peers if peer.node_id not in self.servers)
        claims += [peer for peer in others if peer.slots]
        # The winning claim comes first: highest epoch, then first reported.
        claims.sort(key=lambda peer: peer.epoch, reverse=True)
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
        """Reports of answering servers about each other node, without handshakes."""
        known: dict[str, list[Peer]] = {}
        for server in self.servers.values():
            for peer in server.peers:
                if peer.node_id != server.node_id and not peer.handshake:
                    known.setdefault(peer.node_id, []).append(peer)
        return known

    @cached_property
    def away(self) -> Mapping[str, ServerPod]:
        """Nodes that a silent pod may still be, by the address that others know."""
        silent = {pod.ip: pod for pod in self.pods if pod.ip and self._may_be_known(pod)}
        found: dict[str, ServerPod] = {}
        for node_id, peers in self.known.items():
            pods = (silent[peer.ip] for peer in peers if not peer.no_address and peer.ip in silent)
            if node_id not in self.servers and (pod := next(pods, None)) is not None:
                found[node_id] = pod
        return found

    def _may_be_known(self, pod: ServerPod) -> bool:
        """Whether a silent pod may still be a node that others know. Not if its connection is refused and its container
        has just started: the former process has ended. Either alone is no proof: a busy server starts slowly, and a
        proxy may refuse."""
        if pod.uid in self.cluster.servers:
            return False
        reason, _ = self.cluster.silent.get(pod.uid, ("", ""))
        return not (pod.starting and reason == TierReason.CONNECTION_REFUSED)

    @cached_property
    def gone(self) -> frozenset[str]:
        """Identities without a pod: the pod is gone, the process ended, or another one answers."""
        return frozenset(self.known) - self.servers.keys() - self.away.keys()

    def primary(self, shard: int) -> Server | None:
        """The server with slots in a shard, of several the newest owner; None if there is none."""
        owners = [server for server in self.in_shard(shard) if server.node_id in self.slots]
        return max(owners, key=lambda server: (server.itself.epoch, server.node_id), default=None)

    def leader(self, shard: int) -> Server | None:
        """The server that others of a shard should replicate: its primary, or the first that can become it. None if
        there are only replicas."""
        candidates = [server for server in self.in_shard(shard) if server.itself.is_primary]
        staying = (server for server in candidates if not self.leaves(self.pod(server)))
        return self.primary(shard) or next(staying, candidates[0] if candidates else None)

    def replicas(self, primary: str) -> list[Server]:
        return [server for server in self.servers.values() if server.itself.primary == primary]

    @cached_property
    def _sights(self) -> Mapping[str, Mapping[str, Peer]]:
        return {server.node_id: {peer.node_id: peer for peer in server.peers} for server in self.servers.values()}

    def sight(self, server: Server, other: str) -> Peer | None:
        """A server's view of another node; None if it does not know it yet."""
        peer = self._sights[server.node_id].get(other)
        return None if peer is None or peer.handshake else peer

    def knows(self, server: Server, other: Server) -> bool:
        peer = self.sight(server, other.node_id)
        return peer is not None and not peer.no_address and peer.ip == self.pod(other).ip

    def can_redirect(self, server: Server, other: Server) -> bool:
        """Whether `server` knows the name that `other` announces, by which it redirects clients."""
        peer = self.sight(server, other.node_id)
        return peer is not None and peer.hostname == other.itself.hostname

    @property
    def shards(self) -> range:
        return range(self.goal.shards)

    def name(self, node_id: str) -> str:
        """Name of a node in messages: its pod, or the start of its id if it has none."""
        if (server := self.servers.get(node_id)) is not None:
            return self.pod(server).name
        pod = self.away.get(node_id)
        return pod.name if pod is not None else f"the lost node {node_id[:8]}"


def to(server: Server, *words: object) -> Command:
    """A command to a server under its observed identity."""
    return Command(server.pod_uid, server.node_id, tuple(str(word) for word in words))


def ranges(slots: Iterable[int]) -> tuple[SlotRange, ...]:
    found: list[SlotRange] = []
    for slot in slots:
        if found and found[-1][1] == slot - 1:
            found[-1] = (found[-1][0], slot)
        else:
            found.append((slot, slot))
    return tuple(found)


def count(slots: Iterable[SlotRange]) -> int:
    return sum(last - first + 1 for first, last in slots)
