"""The operator of the model of servers: it looks, takes a step, and may be interrupted between any two acts of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvstrata.model.redis.cluster import Cluster, Command, Peer, Server
from kvstrata.plan.redis.topology import MoveOrder, Step
from kvstrata.plan.redis.topology.view import ranges
from tests.topology.gossip_model import Gossip, Node, RefusedError, Seen
from tests.topology.looks import step


class Tended(Gossip):
    """Servers that somebody looks after. `sent` are all commands there ever were, `steps` what they were for."""

    def __init__(self, shards: int = 3, replicas: int = 1) -> None:
        super().__init__(shards, replicas)
        self.sent: list[Command] = []
        self.steps: list[Step] = []

    def look(self) -> Cluster:
        """What it finds."""
        pods = {uid: replace(pod, ready=not self.nodes[uid].frozen) for uid, pod in self.pods.items()}
        servers = {node.pod_uid: self._server(node) for node in self.alive()}
        silent = dict.fromkeys(pods.keys() - servers.keys(), ("Timeout", ""))
        return Cluster(pods, servers, silent, 0.0)

    def _server(self, node: Node) -> Server:
        own = self._peer(node, node.node_id, Seen(node.ip, node.primary, node.epoch))
        return Server(
            pod_uid=node.pod_uid,
            node_id=node.node_id,
            software="Redis",
            version="7.0.15",
            peers=(own, *(self._peer(node, node_id, seen) for node_id, seen in node.known.items())),
            cluster_ok=True,
            current_epoch=node.current,
            is_primary=node.primary is None,
            link_up=node.synced,
            ever_synced=node.ever_synced,
            syncing=False,
            offset=len(node.keys),
            used_bytes=0,
            max_bytes=node.max_bytes,
            keys=len(node.keys),
            node_timeout_ms=self.goal.node_timeout_ms,
        )

    def _peer(self, node: Node, node_id: str, seen: Seen) -> Peer:
        found = self.at(seen.ip)
        return Peer(
            node_id=node_id,
            ip=seen.ip,
            port=6379,
            hostname="",
            is_primary=seen.primary is None,
            primary=seen.primary,
            epoch=seen.epoch,
            linked=found is not None and found.node_id == node_id,
            failed=seen.failed,
            suspected=seen.suspected,
            no_address=seen.no_address,
            slots=ranges(node.slots_of(node_id)),
        )

    def operate(self, acts: int | None = None) -> Step | None:
        """Take one step, or die after so many acts of it: commands, slots that move, pods that go."""
        found = step(self.look(), self.goal)
        if found is None:
            return None
        if not found.waits:
            self.steps.append(found)
        for act in self.acts(found)[:acts]:
            act()
        return found

    def acts(self, found: Step) -> list[Callable[[], None]]:
        """What a step is made of, to be done one after the other, now or when it is not wanted any more."""
        refusing: set[str] = set()

        def tell(command: Command) -> None:
            if command.pod_uid not in refusing:
                self.sent.append(command)
                try:
                    self.tell(command)
                except RefusedError:
                    refusing.add(command.pod_uid)

        def move(order: MoveOrder, slot: int) -> None:
            if not refusing:
                self.move(order.source, order.target, slot)

        def remove(uids: list[str], act: Callable[[str], None]) -> None:
            for uid in uids if not refusing else ():
                if uid in self.pods:
                    act(uid)

        acts = [partial(tell, command) for command in found.commands]
        acts += [
            partial(move, order, slot)
            for order in found.moves
            for first, last in order.slots
            for slot in range(first, last + 1)
        ]
        if found.remove_pod is not None:
            acts.append(partial(remove, [found.remove_pod], self.replace))
        for shard in found.drained:
            acts.append(partial(remove, [uid for uid, pod in self.pods.items() if pod.shard == shard], self.terminate))
        return acts
