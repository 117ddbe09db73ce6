"""Pods of a managed cluster in networks of their own, in place of StatefulSets, the kubelet and the cluster's DNS.

A pod that is replaced has a new address and the old name; a restarted server is empty and has a new identity. Names
are looked up as everywhere, in this process' own `/etc/hosts`.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from e2e.chaos.network import Network, Sandbox
from kvstrata.model.redis.cluster import Goal, ServerPod
from kvstrata.objects.redis.users import REPLICATION_USER, USERS, users_acl
from tests.tiers.certificates import Certificates

PORT = 6379
ZONE = "tier.test"
TICK_S = 0.1
PROBE_S = 1.0
"""How long the kubelet waits for a server's answer before its pod is not ready."""
HOSTS = Path("/etc/hosts")


class EndedError(Exception):
    """A server ended that was not killed."""


@dataclass
class Running:
    """Network and processes of a pod. `due_s` is when its server is to be started, if it is not there."""

    sandbox: Sandbox
    process: subprocess.Popen[bytes] | None = None
    frozen: bool = False
    due_s: float = 0.0
    probe: asyncio.Task[bool] | None = None


class Pods:
    """The pods of one tier. `pods` are as the API server would show them, `sizes` the StatefulSets' replicas by shard.

    `command` is the argv prefix of the server program; the tier's users reach the keys of `domain`. With `tls` clients
    and servers send nothing in plain text.
    """

    def __init__(
        self,
        network: Network,
        directory: Path,
        command: Sequence[str],
        goal: Goal,
        domain: str,
        tls: Certificates | None = None,
    ) -> None:
        self.network = network
        self.goal = goal
        self.pods: dict[str, ServerPod] = {}
        self.sizes = dict.fromkeys(range(goal.shards), 1 + goal.replicas)
        self._running: dict[str, Running] = {}
        self._numbers = itertools.count(1)
        self._directory, self._command = directory, list(command)
        self._tls = tls
        self._acl = directory / "users.acl"
        self._acl.write_bytes(users_acl(domain, {user: [user] for user in USERS}))

    # actions of the user, the operator and faults

    def want(self, **changes: object) -> None:
        """Edit the tier: additional pods are added at once, others are removed when the operator decides so."""
        self.goal = replace(self.goal, **changes)  # type: ignore[arg-type]
        for shard in range(self.goal.shards):
            self.sizes[shard] = max(self.sizes.get(shard, 0), 1 + self.goal.replicas)

    def shrink(self) -> None:
        """Give StatefulSets fewer pods, where they have more than the tier wants."""
        for shard in self.sizes:
            self.sizes[shard] = 1 + self.goal.replicas

    def drain(self, shard: int) -> None:
        """Remove a shard's StatefulSet, and with it its pods."""
        self.sizes.pop(shard, None)

    def evict(self, uid: str) -> None:
        """Delete a pod as the operator asks for it."""
        self.delete(uid)

    def delete(self, uid: str) -> None:
        """Delete a pod without notice to its server."""
        self.kill(uid)
        self.network.remove(self._running.pop(uid).sandbox)
        del self.pods[uid]
        self._write_hosts()

    def kill(self, uid: str, *, back_after_s: float = 0.0) -> None:
        """Kill a pod's server; the kubelet starts it again."""
        running = self._running[uid]
        if running.process is not None:
            running.process.kill()
            running.process.wait()
        running.process, running.frozen, running.due_s = None, False, time.monotonic() + back_after_s

    def freeze(self, uid: str) -> None:
        """Stop a server without closing its connections."""
        running = self._running[uid]
        if running.process is not None:
            running.process.send_signal(signal.SIGSTOP)
            running.frozen = True

    def thaw(self) -> None:
        """Let all servers continue."""
        for running in self._running.values():
            if running.frozen and running.process is not None:
                running.process.send_signal(signal.SIGCONT)
                running.frozen = False

    def sandbox(self, uid: str) -> Sandbox:
        """The network of a pod."""
        return self._running[uid].sandbox

    @property
    def complete(self) -> bool:
        """Whether just those pods are there that the tier wants, all with a server."""
        wanted = set(itertools.product(range(self.goal.shards), range(1 + self.goal.replicas)))
        places = [(pod.shard, pod.ordinal) for pod in self.pods.values()]
        return sorted(places) == sorted(wanted) and all(one.process is not None for one in self._running.values())

    def name(self, shard: int, ordinal: int) -> str:
        """The host name of a pod of that place, the same for its successors."""
        return f"redis-{shard}-{ordinal}.{ZONE}"

    # actions of the cluster's own programs

    async def run(self) -> None:
        """Act as controllers and kubelets, until cancelled. Raises EndedError."""
        while True:
            self._replace_pods()
            for uid, running in list(self._running.items()):
                if running.process is not None and (code := running.process.poll()) is not None:
                    raise EndedError(f"the server of {self.pods[uid].name} ended by itself: {code}")
                if running.process is None and time.monotonic() >= running.due_s:
                    self._launch(uid, running)
                self._probe(uid, running)
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        """End everything."""
        for uid in list(self.pods):
            self.delete(uid)

    def _replace_pods(self) -> None:
        for uid, pod in list(self.pods.items()):
            if pod.ordinal >= self.sizes.get(pod.shard, 0):
                self.delete(uid)
        there = {(pod.shard, pod.ordinal) for pod in self.pods.values()}
        for shard, size in self.sizes.items():
            for ordinal in range(size):
                if (shard, ordinal) not in there:
                    self._add(shard, ordinal)

    def _add(self, shard: int, ordinal: int) -> None:
        uid, sandbox = f"uid-{next(self._numbers)}", self.network.add()
        self._running[uid] = Running(sandbox)
        revision = self.goal.revisions.get(shard, "none")
        self.pods[uid] = ServerPod(
            f"redis-{shard}-{ordinal}", uid, shard, ordinal, sandbox.ip, ready=False, deleting=False, revision=revision
        )
        self._write_hosts()

    def _write_hosts(self) -> None:
        names = (f"{pod.ip} {self.name(pod.shard, pod.ordinal)}\n" for pod in self.pods.values())
        HOSTS.write_text("127.0.0.1 localhost\n" + "".join(names))

    def _probe(self, uid: str, running: Running) -> None:
        """Take the answer of the last probe, and send the next: from the pod's node, so no partition hinders it."""
        if running.probe is not None:
            if not running.probe.done():
                return
            ready = running.probe.result()
            starting = running.process is None or (self.pods[uid].starting and not ready)
            self.pods[uid] = replace(self.pods[uid], ready=ready, starting=starting)
        running.probe = asyncio.create_task(self._answers(running))

    async def _answers(self, running: Running) -> bool:
        loop = asyncio.get_running_loop()
        try:
            with running.sandbox.entered():
                probe = socket.socket()
            with probe:
                probe.setblocking(False)
                async with asyncio.timeout(PROBE_S):
                    await loop.sock_connect(probe, ("127.0.0.1", PORT))
                    await loop.sock_sendall(probe, b"PING\r\n")
                    # A server that asks for a password is there, and so is one that wants TLS and hangs up.
                    return bool(await loop.sock_recv(probe, 64)) or self._tls is not None
        except ConnectionResetError:
            return self._tls is not None
        except OSError:  # TimeoutError, too; and a pod that is gone
            return False

    def _launch(self, uid: str, running: Running) -> None:
        pod = self.pods[uid]
        place = self._directory / f"{uid}-{time.monotonic_ns()}"
        place.mkdir(parents=True)
        settings = {
            "port": PORT,
            "protected-mode": "no",
            "dir": place,
            "save": "",
            "appendonly": "no",
            "maxmemory": self.goal.max_bytes_each,
            "aclfile": self._acl,
            "masteruser": REPLICATION_USER,
            "masterauth": REPLICATION_USER,
            "cluster-enabled": "yes",
            "cluster-node-timeout": self.goal.node_timeout_ms,
            "cluster-announce-ip": pod.ip,
            "cluster-announce-hostname": self.name(pod.shard, pod.ordinal),
            "cluster-preferred-endpoint-type": "hostname",
            "cluster-require-full-coverage": "no",
            "cluster-allow-replica-migration": "no",
            "cluster-replica-validity-factor": 0,
            "repl-diskless-sync": "yes",
            "repl-diskless-sync-delay": 0,
        }
        words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        if self._tls is not None:
            words += self._tls.only_tls(PORT)
        command = running.sandbox.inside([*self._command, *words])
        out = subprocess.DEVNULL
        running.process = subprocess.Popen(command, stdout=out, stderr=out)
