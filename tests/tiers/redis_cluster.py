"""A real Redis Cluster for tests: primaries and replicas on loopback ports, and what can happen to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis

from e2e.cluster.ports import free_port
from kvstrata_sidecar.adapter.redis.client.slots import SLOTS, slot_of
from tests.tiers.redis_process import RedisProcess

NODE_TIMEOUT_MS = 3000
"""After so long servers take one for dead that says nothing, and a replica takes over."""

PATIENT_MS = 30_000
"""The same where no server is to take over: a server that a busy machine starves is not dead."""


class ClusterNode(RedisProcess):
    """One server of a cluster."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        tls: Sequence[str] = (),
        node_timeout_ms: int = NODE_TIMEOUT_MS,
        **others: Any,
    ) -> None:
        bus = free_port()
        cluster = ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--enable-debug-command", "local"]
        cluster += ["--cluster-node-timeout", str(node_timeout_ms), "--cluster-require-full-coverage", "no"]
        cluster += ["--cluster-config-file", f"nodes-{bus}.conf", "--cluster-replica-validity-factor", "0"]
        cluster += ["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"]
        if tls:
            cluster += ["--tls-cluster", "yes", "--tls-replication", "yes"]
        super().__init__(directory, *cluster, *options, tls=tls, **others)
        self.bus = bus

    def ask(self, *words: object) -> Any:
        """Run a command on this server alone, whatever the cluster thinks."""
        return self.admin().execute_command(*(str(word) for word in words))

    @property
    def node_id(self) -> str:
        """Its name in the cluster."""
        return text(self.ask("CLUSTER", "MYID"))


class RedisCluster:
    """Primaries that share the slots evenly, and replicas, each of one primary.

    `options` and `tls` return a server's own, by its number.
    """

    def __init__(
        self,
        directory: Path,
        primaries: int = 3,
        replicas: int = 0,
        *,
        options: Callable[[int], Sequence[str]] = lambda _: (),
        tls: Callable[[int], Sequence[str]] = lambda _: (),
        command: Sequence[str] | None = None,
        node_timeout_ms: int = NODE_TIMEOUT_MS,
    ) -> None:
        self._node_timeout_ms = node_timeout_ms
        common = {"command": command, "node_timeout_ms": node_timeout_ms}
        self.nodes = [ClusterNode(directory, *options(n), tls=tls(n), **common) for n in range(primaries + replicas)]
        self.primaries, self.replicas = self.nodes[:primaries], self.nodes[primaries:]

    def start(self) -> None:
        """Start and form it; returns when every server says that it is well."""
        for node in self.nodes:
            node.start()
        first, *others = self.nodes
        for number, node in enumerate(self.primaries):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            begin, end = (SLOTS * n // len(self.primaries) for n in (number, number + 1))
            node.ask("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
        for node in others:
            first.ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus)
        until(lambda: all(self._agrees(node) for node in self.nodes), "the cluster does not form")
        for number, node in enumerate(self.replicas):
            node.ask("CLUSTER", "REPLICATE", self.primaries[number % len(self.primaries)].node_id)
        for node in self.replicas:
            until(lambda: b"master_link_status:up" in raw(node, "INFO", "replication"), "no replication")  # noqa: B023

    def add(self, directory: Path, **options: Any) -> ClusterNode:
        """Start one more server, without slots."""
        node = ClusterNode(directory, tls=options.get("tls", ()), node_timeout_ms=self._node_timeout_ms)
        node.start()
        self.nodes.append(node)
        node.ask("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, self.nodes[0].bus)
        alive = [one for one in self.nodes if one.running]
        until(lambda: all(self._agrees(one, len(alive)) for one in alive), "the server does not join")
        return node

    def owner(self, key: bytes) -> ClusterNode:
        """Which server says that it has a key's slot."""
        slot = slot_of(key)
        for node in self.nodes:
            if node.running:
                # By name: whoever asks without TLS is told other ports from Redis 7.2 on.
                for first, last, (_, _, name, *_), *_ in raw(node, "CLUSTER", "SLOTS"):
                    if first <= slot <= last and name == node.node_id.encode():
                        return node
        raise AssertionError("nobody has the slot")

    def begin_move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        """Open a slot at both ends, as the first half of a migration key by key."""
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.node_id)

    def move_keys(self, slot: int, source: ClusterNode, target: ClusterNode, limit: int = 10**6) -> int:
        """Move at most so many keys; return how many went."""
        names = raw(source, "CLUSTER", "GETKEYSINSLOT", slot, limit)
        for name in names:
            answer = raw(source, "MIGRATE", "127.0.0.1", target.port, name, 0, 5000, "REPLACE")
            assert answer in (b"OK", b"NOKEY"), answer
        return len(names)

    def end_move(self, slot: int, target: ClusterNode) -> None:
        """Hand the slot over."""
        for node in [target, *(one for one in self.nodes if one is not target and one.running)]:
            try:
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.node_id)
            except redis.ResponseError as error:
                if "only with masters" not in str(error):  # one without slots becomes a replica by itself
                    raise

    def move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        """Migrate a slot key by key."""
        self.begin_move(slot, source, target)
        while self.move_keys(slot, source, target):
            pass
        self.end_move(slot, target)

    def kill(self) -> None:
        """End all servers."""
        for node in self.nodes:
            node.kill()

    def _agrees(self, node: ClusterNode, count: int | None = None) -> bool:
        """Whether a server knows all others, and who has which slot."""
        info = text(node.ask("CLUSTER", "INFO")).split()
        lines = ("state:ok", f"known_nodes:{count or len(self.nodes)}", f"slots_assigned:{SLOTS}")
        return all(f"cluster_{line}" in info for line in lines)


def raw(node: ClusterNode, *words: object) -> Any:
    """Return what a server answers, unprocessed."""
    with node.admin() as client:
        client.response_callbacks.clear()
        return client.execute_command(*words)


def text(answer: Any) -> str:
    """Return an answer as text."""
    if isinstance(answer, dict):
        return "\n".join(f"{name}:{value}" for name, value in answer.items())
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def until(condition: Callable[[], bool], what: object = "", timeout_s: float = 180) -> None:
    """Wait for something that has to become true."""
    give_up_at_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at_s, what() if callable(what) else what
        time.sleep(0.05)
