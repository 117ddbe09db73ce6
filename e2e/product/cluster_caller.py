"""A writer and reader of a managed cluster, with the data plane's user, from within the network of the operator's pod.

It goes by what the servers tell, as any cluster client does, and notes every request: how long it took, whether it was
answered, and whether what was written is found again.
"""

from __future__ import annotations

import base64
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry

from kvstrata.contract.keys import KEY_PREFIX
from kvstrata.objects.redisusers import DATA_USER

from .direct import container_pid, network_of
from .install import DEMO_NAMESPACE, SYSTEM_NAMESPACE
from .kubectl import CommandError, Kubectl

PORT = 6379
PAUSE_S = 0.01
DEADLINE_S = 2.0
KEYS = 512
REFRESH_S = 0.5


@dataclass(slots=True)
class Requests:
    """What became of the requests so far: `hits` found what was written just before, `wrong` something else."""

    writes: int = 0
    hits: int = 0
    misses: int = 0
    wrong: int = 0
    failed: int = 0
    longest_s: float = 0.0
    last_failure: str = ""


@contextmanager
def cluster_caller(kubectl: Kubectl, tier: str) -> Iterator[Requests]:
    """Write and read in a loop while the block runs."""
    auth = kubectl.get("secret", f"kvs-{tier}-redis-auth", DEMO_NAMESPACE)["data"]
    authority = base64.b64decode(kubectl.get("secret", f"kvs-{tier}-redis-tls", DEMO_NAMESPACE)["data"]["ca.crt"])
    domain = str(kubectl.get("cachedomain", "default", DEMO_NAMESPACE)["status"]["domainID"])
    operator = kubectl.list("pod", SYSTEM_NAMESPACE, "app.kubernetes.io/name=kvstrata")[0]["metadata"]["name"]
    pid = container_pid(kubectl, SYSTEM_NAMESPACE, operator, "operator")
    ended = threading.Event()
    with TemporaryDirectory() as folder:
        ca = Path(folder, "ca.crt")
        ca.write_bytes(authority)
        caller = _Caller(kubectl, tier, domain, base64.b64decode(auth["password"]).decode(), ca)
        caller.learn_addresses()
        threads = [
            threading.Thread(target=caller.call, args=(pid, ended), daemon=True),
            threading.Thread(target=caller.keep_learning, args=(ended,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield caller.requests
        finally:
            ended.set()
            for thread in threads:
                thread.join(10)


class _Caller:
    def __init__(self, kubectl: Kubectl, tier: str, domain: str, password: str, authority: Path) -> None:
        self._kubectl, self._tier, self._password, self._authority = kubectl, tier, password, authority
        self._prefix = f"{KEY_PREFIX}:{domain}:"
        self._addresses: dict[str, str] = {}
        self.requests = Requests()

    def call(self, pid: int, ended: threading.Event) -> None:
        """Write and read until told to end."""
        client: RedisCluster | None = None
        with network_of(pid):
            for number in itertools.count():
                if ended.is_set():
                    break
                began = time.monotonic()
                try:
                    client = client or self._client()
                    self._write_and_read(client, number)
                except (redis.RedisError, OSError) as error:
                    self.requests.failed += 1
                    self.requests.last_failure = f"{type(error).__name__}: {error}"[:300]
                self.requests.longest_s = max(self.requests.longest_s, time.monotonic() - began)
                time.sleep(PAUSE_S)
            if client is not None:
                client.close()

    def keep_learning(self, ended: threading.Event) -> None:
        """Ask for the addresses of the tier's pods until told to end: in the other's network are no names of pods."""
        while not ended.wait(REFRESH_S):
            try:
                self.learn_addresses()
            except CommandError:
                continue

    def learn_addresses(self) -> None:
        """Ask Kubernetes which address each of the tier's pods has."""
        pods = self._kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/tier={self._tier}")
        self._addresses = {pod["metadata"]["name"]: str(pod["status"].get("podIP") or "") for pod in pods}

    def _write_and_read(self, client: RedisCluster, number: int) -> None:
        name, value = f"{self._prefix}{{probe-{number % KEYS}}}:v", str(number).encode()
        client.set(name, value, px=600_000)
        self.requests.writes += 1
        found = client.get(name)
        self.requests.hits += found == value
        self.requests.misses += found is None
        self.requests.wrong += found not in (value, None)

    def _client(self) -> RedisCluster:
        return RedisCluster(
            host=next(address for address in self._addresses.values() if address),
            port=PORT,
            username=DATA_USER,
            password=self._password,
            ssl=True,
            ssl_ca_certs=str(self._authority),
            ssl_check_hostname=False,
            address_remap=self._address,
            socket_timeout=DEADLINE_S,
            socket_connect_timeout=DEADLINE_S,
            retry=Retry(NoBackoff(), 3),
        )

    def _address(self, told: tuple[str, int]) -> tuple[str, int]:
        host, port = told
        return self._addresses.get(host.partition(".")[0]) or host, port
