"""Real servers that play the pods of a managed cluster, and an operator that looks and acts until it is settled.

Every pod has a loopback address of its own and all have one port, so a pod that is replaced gets a new address, as in
Kubernetes; so does a server that is started again in its pod lose everything, its identity, too.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis

from e2e.cluster.ports import free_port
from kvstrata.adapters.redis_nodes import NodeAccess, RedisNodes, Sent
from kvstrata.model.topology import Cluster, Goal, Server, ServerPod
from kvstrata.plan.topology import Step, Verdict, step, verdict

MEMORY = 64 << 20
NODE_TIMEOUT_MS = 1000
PATIENCE_S = 40.0

_rigs = itertools.count()


@dataclass
class Process:
    """A server in a pod."""

    popen: subprocess.Popen[bytes]
    frozen: bool = False


class Rig:
    """Pods of one tier. What is asked of `pods` is what the API server would show."""

    def __init__(
        self, directory: Path, command: list[str], *, shards: int = 3, replicas: int = 1, timeout_ms: int = 0
    ) -> None:
        self.goal = Goal(
            shards, replicas, MEMORY, dict.fromkeys(range(shards), "a"), node_timeout_ms=timeout_ms or NODE_TIMEOUT_MS
        )
        self.port = free_port()
        self.pods: dict[str, ServerPod] = {}
        self.steps: list[Step] = []
        self.sent: list[Sent] = []
        self.nodes = RedisNodes(NodeAccess(self.port))
        self._directory, self._command = directory, command
        self._network = f"127.{os.getpid() % 200 + 20}.{next(_rigs) % 250}"
        self._number = itertools.count(2)
        self._processes: dict[str, Process] = {}

    # What Kubernetes does

    def start(self) -> None:
        """Start every pod of the goal."""
        for shard, ordinal in itertools.product(range(self.goal.shards), range(1 + self.goal.replicas)):
            self.add(shard, ordinal)

    def add(self, shard: int, ordinal: int, *, server: bool = True) -> ServerPod:
        """A new pod, with a new address, and a server in it unless it has yet to start."""
        number = next(self._number)
        name = f"redis-{shard}-{ordinal}"
        revision = self.goal.revisions[shard]
        pod = ServerPod(name, f"uid-{number}", shard, ordinal, f"{self._network}.{number}", False, False, revision)
        self.pods[pod.uid] = pod
        if server:
            self._launch(pod)
        return pod

    def delete(self, pod: ServerPod) -> None:
        """Delete a pod without a word to its server. Nothing replaces it."""
        self.kill(pod)
        del self.pods[pod.uid]

    def replace(self, pod: ServerPod) -> ServerPod:
        """Delete a pod; its StatefulSet makes another."""
        self.delete(pod)
        return self.add(pod.shard, pod.ordinal)

    def kill(self, pod: ServerPod) -> None:
        """End a pod's server."""
        process = self._processes.pop(pod.uid, None)
        if process is not None:
            process.popen.kill()
            process.popen.wait()

    def restart(self, pod: ServerPod) -> None:
        """Start a pod's server anew at its address: empty, under another identity."""
        self.kill(pod)
        self._launch(pod)

    def freeze(self, pod: ServerPod) -> None:
        """Stop a server without closing its connections; the kubelet takes its pod for not ready."""
        self._processes[pod.uid].popen.send_signal(signal.SIGSTOP)
        self._processes[pod.uid].frozen = True

    def thaw(self, pod: ServerPod) -> None:
        """Let it go on."""
        self._processes[pod.uid].popen.send_signal(signal.SIGCONT)
        self._processes[pod.uid].frozen = False

    def close(self) -> None:
        """End all servers."""
        for pod in list(self.pods.values()):
            self.kill(pod)

    def _launch(self, pod: ServerPod) -> None:
        place = self._directory / f"{pod.uid}-{time.monotonic_ns()}"
        place.mkdir(parents=True)
        settings = {
            "port": self.port,
            "bind": pod.ip,
            "dir": place,
            "save": "",
            "appendonly": "no",
            "maxmemory": "32mb",
            "enable-debug-command": "local",
            "cluster-enabled": "yes",
            "cluster-node-timeout": self.goal.node_timeout_ms,
            "cluster-announce-ip": pod.ip,
            "cluster-require-full-coverage": "no",
            "cluster-allow-replica-migration": "no",
            "cluster-replica-validity-factor": 0,
            "repl-diskless-sync": "yes",
            "repl-diskless-sync-delay": 0,
        }
        words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        out = subprocess.DEVNULL
        self._processes[pod.uid] = Process(subprocess.Popen([*self._command, *words], stdout=out, stderr=out))

    # What the operator does

    async def look(self) -> Cluster:
        """One look, after which pods are ready whose servers answered."""
        cluster = await self.nodes.look(self.pods.values())
        for uid, pod in self.pods.items():
            self.pods[uid] = replace(pod, ready=uid in cluster.servers)
        return replace(cluster, pods=dict(self.pods))

    async def settle(
        self, *, commands: int | None = None, until: Callable[[Cluster], bool] = lambda _: True, wait_s: float = 0.05
    ) -> list[Step]:
        """Act until nothing is left to do and `until` is true, or so many commands are sent: then the operator dies.

        Returns the steps that were not mere waiting.
        """
        taken: list[Step] = []
        left = [commands]

        def permitted() -> bool:
            if left[0] is not None:
                left[0] -= 1
                return left[0] >= 0
            return True

        give_up_at_s = time.monotonic() + PATIENCE_S
        while True:
            cluster = await self.look()
            found = step(cluster, self.goal)
            if found is None and until(cluster):
                return taken
            assert time.monotonic() < give_up_at_s, (found, verdict(cluster, self.goal), cluster.silent)
            if found is not None and not found.waits:
                taken.append(found)
                self.steps.append(found)
                self.sent += await self.nodes.send(found.commands, cluster.pods, permitted)
                if left[0] is not None and left[0] < 0:
                    return taken
                if found.remove_pod in self.pods:
                    self.replace(self.pods[found.remove_pod])
            await asyncio.sleep(found.pause_s if found is not None and found.pause_s else wait_s)

    async def verdict(self) -> Verdict:
        """What may be said of it now."""
        return verdict(await self.look(), self.goal)

    # What tests ask

    def pod(self, shard: int, ordinal: int) -> ServerPod:
        """The pod of that place."""
        return next(pod for pod in self.pods.values() if (pod.shard, pod.ordinal) == (shard, ordinal))

    async def primary(self, shard: int) -> ServerPod:
        """The pod whose server has slots."""
        cluster = await self.look()
        servers = [one for one in cluster.servers.values() if one.itself.slots]
        return next(pod for one in servers if (pod := self.pods[one.pod_uid]).shard == shard)

    async def replica(self, shard: int) -> ServerPod:
        """A pod of a shard whose server is a replica."""
        cluster = await self.look()
        servers = [one for one in cluster.servers.values() if not one.is_primary]
        return next(pod for one in servers if (pod := self.pods[one.pod_uid]).shard == shard)

    async def server(self, pod: ServerPod) -> Server:
        """What a pod's server says of itself."""
        return (await self.look()).servers[pod.uid]

    def client(self, pod: ServerPod) -> Any:
        """A client of one server alone; its own types tell of all that any settings could make it answer."""
        return redis.Redis(host=str(pod.ip), port=self.port, decode_responses=True, socket_timeout=5)

    def write(self, count: int = 60) -> dict[str, str]:
        """Write keys all over the slots, wherever they belong."""
        pods = [pod for pod in self.pods.values() if pod.ready]
        with redis.RedisCluster(host=str(pods[0].ip), port=self.port, decode_responses=True) as client:
            for number in range(count):
                client.set(f"key-{number}", str(number))
        return {f"key-{number}": str(number) for number in range(count)}

    def read(self) -> dict[str, str]:
        """All keys of all primaries."""
        found: dict[str, str] = {}
        for pod in self.pods.values():
            with self.client(pod) as client:
                if client.info("replication")["role"] == "master":
                    found |= {name: client.get(name) for name in client.keys()}  # noqa: SIM118  (a command)
        return found
