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
from kvstrata.clients.redis.nodes import LOOK_TIMEOUT_S, TIMEOUT_S, RedisNodes, Sent
from kvstrata.clients.redis.probe import Access
from kvstrata.model.redis.cluster import Cluster, Goal, Server, ServerPod
from kvstrata.objects.redis.users import ADMIN_USER, REPLICATION_USER, USERS, users_acl
from kvstrata.plan.redis.topology import Step, Verdict
from tests.tiers.certificates import SERVER_NAME, Certificates
from tests.topology.looks import step, verdict

MEMORY = 64 << 20
NODE_TIMEOUT_MS = 5_000
"""As in a managed tier: a server that is killed fails soon, and one that a busy machine starves does not at once."""

PATIENT_LOOK_S = 15.0
"""How long an operator waits for a server that is not frozen: a busy machine may starve it."""

PATIENCE_S, LONGEST_S = 120.0, 600.0
"""For the next that is heard, and for all: only what never happens fails."""
PASS_S = 0.05
OTHER_ADDRESSES = 127
"""A pod's second address is so much higher than its first."""

TESTER = b"user tester on >tester ~* &* +@all\n"
"""Who writes and reads for the tests; the operator and the servers use the users of a tier."""

_rigs = itertools.count()


class Patience:
    """Ends a wait when nothing new was heard for long, or too much."""

    def __init__(self) -> None:
        self._heard: object = None
        self._until_s = 0.0
        self._longest_s = time.monotonic() + LONGEST_S

    def ask(self, heard: object, more: Callable[[], str] = str) -> None:
        """Raise if that is what was heard all the time, with `more` about it."""
        if heard != self._heard or not self._until_s:
            self._heard, self._until_s = heard, time.monotonic() + PATIENCE_S
        assert time.monotonic() < min(self._until_s, self._longest_s), f"{heard}\n{more()}"


@dataclass
class Process:
    """A server in a pod."""

    popen: subprocess.Popen[bytes]
    log: Path
    frozen: bool = False


class Rig:
    """Pods of one tier. `pods` is what the API server would show.

    With `users` servers have the users of a tier, and the operator may no more than it may there. With `tls` nothing is
    said in plain text.
    """

    def __init__(
        self,
        directory: Path,
        command: list[str],
        *,
        shards: int = 3,
        replicas: int = 1,
        users: bool = False,
        tls: Certificates | None = None,
        node_timeout_ms: int = NODE_TIMEOUT_MS,
    ) -> None:
        revisions = dict.fromkeys(range(shards), "a")
        self.goal = Goal(shards, replicas, MEMORY, revisions, node_timeout_ms=node_timeout_ms)
        self.port = free_port()
        self.pods: dict[str, ServerPod] = {}
        self.steps: list[Step] = []
        self.sent: list[Sent] = []
        self._users, self._tls = users, tls
        self.nodes = self.connect()
        self._directory, self._command = directory, command
        self._network = f"127.{os.getpid() % 200 + 20}.{next(_rigs) % 250}"
        self._number = itertools.count(2)
        self._processes: dict[str, Process] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._acl = directory / "users.acl"
        self._acl.write_bytes(users_acl("d", {user: [user] for user in USERS}) + TESTER)

    def connect(self) -> RedisNodes:
        """An operator's connections, as the user that it has in a tier."""
        user = ADMIN_USER if self._users else None
        ca_pem = self._tls.ca.read_bytes() if self._tls else None
        access = Access(user, ca_pem, user)
        return RedisNodes(self.port, access, SERVER_NAME, look_timeout_s=PATIENT_LOOK_S, timeout_s=PATIENT_LOOK_S)

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

    def move(self, pod: ServerPod) -> ServerPod:
        """Give a pod another address, where the same server answers."""
        moved = replace(pod, ip=_other_address(str(pod.ip)))
        with self.client(pod) as client:
            client.config_set("cluster-announce-ip", moved.ip)
        self.pods[pod.uid] = moved
        return moved

    def kill(self, pod: ServerPod) -> None:
        """End a pod's server."""
        process = self._processes.pop(pod.uid, None)
        if process is not None:
            process.popen.kill()
            process.popen.wait()

    def restart(self, pod: ServerPod) -> None:
        """Start a pod's server anew at its address: empty, under another identity."""
        self.kill(pod)
        self.pods[pod.uid] = replace(pod, ready=False, starting=False)
        self._launch(pod)

    def freeze(self, pod: ServerPod) -> None:
        """Stop a server without closing its connections; the kubelet takes its pod for not ready."""
        process = self._processes[pod.uid].popen
        process.send_signal(signal.SIGSTOP)
        about, give_up_at_s = Path(f"/proc/{process.pid}/stat"), time.monotonic() + PATIENCE_S
        while about.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < give_up_at_s, "it does not stop"
            time.sleep(0.001)
        self._processes[pod.uid].frozen = True

    def thaw(self, pod: ServerPod) -> None:
        """Let it go on."""
        self._processes[pod.uid].popen.send_signal(signal.SIGCONT)
        self._processes[pod.uid].frozen = False

    def thaw_all(self) -> None:
        """Let all go on that are frozen."""
        for pod in self.pods.values():
            if pod.uid in self._processes and self._processes[pod.uid].frozen:
                self.thaw(pod)

    def close(self) -> None:
        """End all servers."""
        for pod in list(self.pods.values()):
            self.kill(pod)

    def _launch(self, pod: ServerPod) -> None:
        place = self._directory / f"{pod.uid}-{time.monotonic_ns()}"
        place.mkdir(parents=True)
        settings = {
            "port": self.port,
            "dir": place,
            "save": "",
            "appendonly": "no",
            "maxmemory": "32mb",
            "cluster-enabled": "yes",
            "cluster-node-timeout": self.goal.node_timeout_ms,
            "cluster-announce-ip": pod.ip,
            "cluster-require-full-coverage": "no",
            "cluster-allow-replica-migration": "no",
            "cluster-replica-validity-factor": 0,
            "repl-diskless-sync": "yes",
            "repl-diskless-sync-delay": 0,
        }
        if self._users:
            settings |= {"aclfile": self._acl, "masteruser": REPLICATION_USER, "masterauth": REPLICATION_USER}
        words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        # CONFIG SET bind does not move the port of the cluster bus.
        words += ["--bind", str(pod.ip), _other_address(str(pod.ip))]
        if self._tls is not None:
            words += self._tls.only_tls(self.port)
        log = place / "log"
        with log.open("wb") as out:
            self._processes[pod.uid] = Process(subprocess.Popen([*self._command, *words], stdout=out, stderr=out), log)

    # What the operator does

    async def look(self) -> Cluster:
        """One look, after which pods are ready whose servers answered, and no longer those whose cannot."""
        is_frozen = any(process.frozen for process in self._processes.values())
        self.nodes._look_timeout_s = LOOK_TIMEOUT_S if is_frozen else PATIENT_LOOK_S
        self.nodes._timeout_s = TIMEOUT_S if is_frozen else PATIENT_LOOK_S
        cluster = await self.nodes.look(self.pods.values())
        self.probe(cluster)
        return replace(cluster, pods=dict(self.pods))

    async def heard(self) -> Cluster:
        """A look in which nobody who can answer was too slow to."""
        patience = Patience()
        while True:
            cluster = await self.look()
            able = {uid for uid, process in self._processes.items() if not process.frozen}
            if able <= cluster.servers.keys():
                return cluster
            patience.ask("slow servers")

    def probe(self, cluster: Cluster) -> None:
        """Do what kubelets do: a server that only took long once is not one that does not answer."""
        for uid, pod in self.pods.items():
            process = self._processes.get(uid)
            able = process is not None and not process.frozen
            self.pods[uid] = replace(pod, ready=able and (pod.ready or uid in cluster.servers))

    async def act(self, permitted: Callable[[], bool] = lambda: True) -> Step | None:
        """Look once and take the step that follows, waiting as long as it says; return it."""
        cluster = await self.look()
        found = step(cluster, self.goal)
        if found is not None and not found.waits:
            self.steps.append(found)
            self.sent += await self.nodes.send(found.commands, cluster.pods, permitted)
            if found.remove_pod in self.pods and permitted():
                self.replace(self.pods[found.remove_pod])
        await asyncio.sleep(found.pause_s if found is not None and found.pause_s else PASS_S)
        return found

    async def settle(self, until: Callable[[Cluster], bool] = lambda _: True) -> list[Step]:
        """Act until nothing is left to do and `until` is true. Returns the steps that were not mere waiting."""
        first, patience = len(self.steps), Patience()
        while (found := await self.act()) is not None or not until(await self.look()):
            patience.ask(found, self._report)
        return self.steps[first:]

    async def die_after(self, commands: int) -> bool:
        """Act until so many commands are sent, or until it is settled, which is when this returns False."""
        budget = itertools.count(commands, -1)
        spent = False

        def permitted() -> bool:
            nonlocal spent
            spent = spent or next(budget) <= 0
            return not spent

        patience = Patience()
        while not spent:
            found = await self.act(permitted)
            if found is None and self.is_up(await self.look()):
                return False
            patience.ask(found)
        return True

    async def verdict(self) -> Verdict:
        """What may be said of it now."""
        return verdict(await self.look(), self.goal)

    def _report(self) -> str:
        """Return the last commands with their answers, and what servers wrote last."""
        lines = [str(sent) for sent in self.sent[-3:]]
        for uid, process in self._processes.items():
            pod = self.pods[uid]
            lines += [f"{pod.name} {uid} {pod.ip}:", *process.log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(lines)

    # What tests ask

    def is_up(self, cluster: Cluster) -> bool:
        """Whether all pods answer."""
        return len(cluster.servers) == self.goal.shards * (1 + self.goal.replicas)

    def pod(self, shard: int, ordinal: int) -> ServerPod:
        """The pod of that place."""
        return next(pod for pod in self.pods.values() if (pod.shard, pod.ordinal) == (shard, ordinal))

    async def primary(self, shard: int) -> ServerPod:
        """The pod whose server has slots."""
        cluster = await self.heard()
        servers = [one for one in cluster.servers.values() if one.itself.slots]
        return next(pod for one in servers if (pod := self.pods[one.pod_uid]).shard == shard)

    async def replica(self, shard: int) -> ServerPod:
        """A pod of a shard whose server is a replica."""
        cluster = await self.heard()
        servers = [one for one in cluster.servers.values() if not one.is_primary]
        return next(pod for one in servers if (pod := self.pods[one.pod_uid]).shard == shard)

    async def server(self, pod: ServerPod) -> Server:
        """What a pod's server says of itself."""
        return (await self.heard()).servers[pod.uid]

    def client(self, pod: ServerPod) -> Any:
        """A client of one server alone; its own types tell of all that any settings could make it answer."""
        return redis.Redis(host=str(pod.ip), port=self.port, socket_timeout=30, **self._as_tester())

    def _as_tester(self) -> dict[str, Any]:
        user = "tester" if self._users else None
        tls = {"ssl": True, "ssl_ca_certs": str(self._tls.ca), "ssl_check_hostname": False} if self._tls else {}
        return {"username": user, "password": user, "decode_responses": True, **tls}

    def write(self, count: int = 60) -> dict[str, str]:
        """Write keys all over the slots, wherever they belong; with names over which a tier's users have power."""
        pods = [pod for pod in self.pods.values() if pod.ready]
        with redis.RedisCluster(host=str(pods[0].ip), port=self.port, **self._as_tester()) as client:
            values = {f"kvs1:d:{number}": str(number) for number in range(count)}
            for name, value in values.items():
                client.set(name, value)
        return values

    def read(self) -> dict[str, str]:
        """All keys of all primaries that answer."""
        found: dict[str, str] = {}
        for pod in self.pods.values():
            if not pod.ready:
                continue
            with self.client(pod) as client:
                if client.info("replication")["role"] == "master":
                    found |= {name: client.get(name) for name in client.keys()}  # noqa: SIM118  (a command)
        return found


def _other_address(ip: str) -> str:
    """Return the address to which a pod may move."""
    network, _, number = ip.rpartition(".")
    assert int(number) < OTHER_ADDRESSES, "more pods than addresses"
    return f"{network}.{int(number) + OTHER_ADDRESSES}"
