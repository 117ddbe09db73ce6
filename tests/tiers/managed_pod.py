"""Pods of a managed Redis Cluster without Kubernetes: real servers, started, asked and stopped as their template says.

Every pod has a loopback address and a folder of its own; programs are found by PATH, as in an image.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis

from e2e.cluster.ports import free_port
from kvstrata.api.cachetier import CacheTier
from kvstrata.clients import pki
from kvstrata.objects import names, paths
from kvstrata.objects.redis.cluster import NODE_TIMEOUT_MS, START_OVER_WAIT_S, build_shard_statefulset
from kvstrata.objects.redis.users import ADMIN_USER, USERS
from kvstrata.objects.secret import redis_auth_data
from tests.support.redis_binary import put_client_into
from tests.tiers.redis_cluster import until
from tests.unit.objects.builders import CONTEXT, DOMAIN_ID, redis_tier

PASSWORDS = {user: (f"{user[0]}-_" * 11,) for user in USERS}
Terms = tuple[int, int]
"""A node time-out in milliseconds, and how many seconds a server that is started over waits."""

SHORT_TERMS: Terms = (4_000, 12)
"""For tests that wait for a server to be found failed, which on a busy machine, too, it is before it is back."""

PATIENT_TERMS: Terms = (30_000, 1)
"""For tests in which no server fails: one that a busy machine starves is not dead."""

_networks = itertools.count()


class ManagedPods:
    """Pods of one tier. `server` is the argv prefix of the server program, `called` its name in the image.

    The image's client has the name that belongs to it.
    """

    def __init__(
        self,
        directory: Path,
        server: Sequence[str],
        *,
        tls: bool = False,
        called: str = "redis-server",
        **managed: Any,
    ) -> None:
        mode = {"mode": "Issued" if tls else "Disabled"}
        self.tier = redis_tier(capacity="192Mi", **{"shards": 3, "replicasPerShard": 1, "tls": mode, **managed})
        self.port, self.directory = free_port(), directory
        self.authority = pki.create_authority("kvstrata", datetime.now(UTC), pki.generate_key()) if tls else None
        self.image = directory / "bin"
        self.image.mkdir(parents=True)
        if server:
            program = self.image / called
            program.write_text(f'#!/bin/sh\nexec {shlex.join(server)} "$@"\n')
            program.chmod(0o755)
        put_client_into(self.image, called.replace("-server", "-cli"))
        self._network = f"127.{os.getpid() % 200 + 20}.{next(_networks) % 250 + 1}"
        self._numbers = itertools.count(1)
        self.pods: list[ManagedPod] = []

    def add(self, shard: int) -> ManagedPod:
        """A new pod of a shard, without a server yet."""
        number = next(self._numbers)
        self.pods.append(ManagedPod(self, shard, f"redis-{shard}-{number}", f"{self._network}.{number}"))
        return self.pods[-1]

    def files(self) -> Mapping[str, Mapping[str, bytes]]:
        """What the kubelet puts into a pod, by folder."""
        auth = redis_auth_data(DOMAIN_ID, PASSWORDS)
        if self.authority is None:
            return {paths.REDIS_AUTH: auth}
        hosts = names.redis_dns_names(self.tier.name, self.tier.namespace, "cluster.local")
        pair = pki.issue_server(self.authority, hosts, datetime.now(UTC), pki.generate_key(), for_peers=True)
        pems = (pair.certificate_pem, pair.key_pem, self.authority.certificate_pem)
        keys = (names.CERTIFICATE_KEY, names.PRIVATE_KEY_KEY, names.AUTHORITY_KEY)
        return {paths.REDIS_AUTH: auth, paths.REDIS_TLS: dict(zip(keys, pems, strict=True))}

    def form(self) -> None:
        """Make a cluster of the pods that there are: the first of each shard its primary."""
        first = {pod.shard: pod for pod in reversed(self.pods)}
        for shard, pod in sorted(first.items()):
            pod.admin("CLUSTER", "SET-CONFIG-EPOCH", shard + 1)
            begin, end = (16384 * n // len(first) for n in (shard, shard + 1))
            pod.admin("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
        for one, other in itertools.combinations(self.pods, 2):
            one.admin("CLUSTER", "MEET", other.ip, self.port)
        until(lambda: all(pod.agrees(len(self.pods)) for pod in self.pods), "the cluster does not form")
        for pod in self.pods:
            if pod is not first[pod.shard]:
                pod.admin("CLUSTER", "REPLICATE", first[pod.shard].node_id)
                until(lambda primary=first[pod.shard]: primary.has_replica, "no replication")
                # Servers vote for no replica of which they have yet to hear whose it is.
                until(lambda heir=pod.node_id: all(one.knows_replica(heir) for one in self.pods), "no gossip")

    def close(self) -> None:
        """End all servers."""
        for pod in self.pods:
            pod.kill()


class ManagedPod:
    """One pod: what its template says runs in its folder and at its address."""

    def __init__(self, pods: ManagedPods, shard: int, name: str, ip: str) -> None:
        self.pods, self.shard, self.name, self.ip = pods, shard, name, ip
        self.terms: Terms | None = None
        self.folder = pods.directory / name
        (self.folder / paths.TEMPORARY.strip("/")).mkdir(parents=True)
        template = _template(pods.tier, shard)
        (self.container,) = template["containers"]
        (auth,) = (volume for volume in template["volumes"] if volume["name"] == "auth")
        shown = {item["key"] for item in auth["secret"]["items"]}
        for folder, files in pods.files().items():
            (self.folder / folder.strip("/")).mkdir(parents=True)
            for key, value in files.items():
                if folder != paths.REDIS_AUTH or key in shown:
                    (self.folder / folder.strip("/") / key).write_bytes(value)
        self.log = self.folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def written(self) -> list[Path]:
        """The files that its container wrote."""
        return [path for path in (self.folder / paths.TEMPORARY.strip("/")).rglob("*") if path.is_file()]

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the container, and return its first process."""
        command = self.words([*self.container["command"], *self.container["args"]])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, "--bind", self.ip], env=self._env, stdout=log, stderr=log)
        return self.process

    def start(self) -> None:
        """Start the container, and wait until its server answers."""
        process = self.launch()
        until(lambda: self.probe() == 0 or process.poll() is not None, "no answer")
        assert process.poll() is None, self.log.read_text()

    def probe(self) -> int:
        """Run the readiness probe."""
        command = [word.replace("-h 127.0.0.1", f"-h {self.ip}") for word in self._exec("readinessProbe")]
        return subprocess.run(command, env=self._env, check=False).returncode

    def stop_politely(self) -> float:
        """Run the preStop hook, then end the container; return how long the hook took in seconds."""
        began_s = time.monotonic()
        (command,) = [self.container["lifecycle"]["preStop"]["exec"]["command"]]
        command = [self.ip if word == "127.0.0.1" else word for word in self.words(command)]
        hook = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=60, check=False)
        took_s = time.monotonic() - began_s
        self.said = hook.stdout + hook.stderr
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)
            self.process = None
        return took_s

    def kill(self) -> None:
        """End the container at once, as an out-of-memory kill does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def words(self, command: Sequence[str]) -> list[str]:
        """Return a command as the kubelet runs it, moved to the pod's folder, address and port."""
        return [self._moved(_expanded(word, {"POD_IP": self.ip, "POD_NAME": self.name})) for word in command]

    def client(self, user: str = ADMIN_USER) -> Any:
        """A client of this server alone; its own types tell of all that any settings could make it answer."""
        options: dict[str, Any] = {}
        if self.pods.authority is not None:
            authority = self.pods.authority.certificate_pem.decode()
            options = {"ssl": True, "ssl_ca_data": authority, "ssl_check_hostname": False}
        secret = {"username": user, "password": PASSWORDS[user][0]}
        return redis.Redis(host=self.ip, port=self.pods.port, socket_timeout=10, **secret, **options)

    def run_as(self, user: str, *words: object) -> Any:
        """Return what the server answers to a user, unprocessed."""
        with self.client(user) as client:
            client.response_callbacks.clear()
            return client.execute_command(*(str(word) for word in words))

    def admin(self, *words: object) -> Any:
        """Return what the server answers to the operator's user."""
        return self.run_as(ADMIN_USER, *words)

    def setting(self, name: str) -> str:
        """Return one of its settings."""
        answer = self.admin("CONFIG", "GET", name)
        value: bytes = answer[name.encode()] if isinstance(answer, dict) else answer[1]
        return value.decode()

    def info(self, section: str) -> Mapping[str, str]:
        """Return a section of INFO."""
        lines = self.admin("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    @property
    def role(self) -> str:
        """Its part in replication: `master` or `slave`."""
        return self.info("replication")["role"]

    @property
    def has_replica(self) -> bool:
        """Whether a replica is in step with it."""
        return "state=online" in self.info("replication").get("slave0", "")

    @property
    def offset(self) -> int:
        """How many bytes it wrote for replicas."""
        return int(self.info("replication")["master_repl_offset"])

    @property
    def replica_offset(self) -> int:
        """How many bytes of them its replica said that it has."""
        words = self.info("replication")["slave0"].split(",")
        return int(dict(word.split("=") for word in words)["offset"])

    @property
    def node_id(self) -> str:
        """Its name in the cluster."""
        return str(self.admin("CLUSTER", "MYID").decode())

    def agrees(self, servers: int) -> bool:
        """Whether it is in a cluster of so many, knows who has which slot, and all is well."""
        info = self.admin("CLUSTER", "INFO").decode()
        return all(
            f"cluster_{line}\r" in info for line in ("state:ok", f"known_nodes:{servers}", "slots_assigned:16384")
        )

    def knows_replica(self, node_id: str) -> bool:
        """Whether it believes that a server is somebody's replica."""
        lines = [line.split() for line in self.admin("CLUSTER", "NODES").decode().splitlines()]
        return any(words[0] == node_id and words[3] != "-" for words in lines)

    @property
    def _env(self) -> dict[str, str]:
        names_ = {variable["name"] for variable in self.container["env"]}
        assert names_ == {"POD_IP", "POD_NAME"}
        tools = "/usr/bin:/bin"
        return {"PATH": f"{self.pods.image}:{tools}", "POD_IP": self.ip, "POD_NAME": self.name}

    def _exec(self, probe: str) -> list[str]:
        return self.words(self.container[probe]["exec"]["command"])

    def _moved(self, word: str) -> str:
        for path in (paths.REDIS_AUTH, paths.REDIS_TLS):
            if word.startswith(path):
                return f"{self.folder}{word}"
        here = {paths.TEMPORARY: f"{self.folder}{paths.TEMPORARY}", str(paths.REDIS_PORT): str(self.pods.port)}
        if self.terms is not None:
            here |= dict(zip((str(NODE_TIMEOUT_MS), str(START_OVER_WAIT_S)), map(str, self.terms), strict=True))
        return here.get(word, word)


def _template(tier: CacheTier, shard: int) -> dict[str, Any]:
    built = build_shard_statefulset(CONTEXT, tier, shard)
    assert built is not None
    spec: dict[str, Any] = built["spec"]["template"]["spec"]
    return spec


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """Return a word of a command with the variables that Kubernetes puts in; others stay, and `$$` is `$`."""

    def replaced(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return env.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)
