"""A writer and reader of a managed cluster, with the data plane's user, from within the network of the operator's pod.

It follows the servers' redirections, as any cluster client does, and records every request: how long it took, whether
it was answered, and whether a written value is found again. It is written out because every library's client needs
more commands than this user may send.
"""

from __future__ import annotations

import base64
import itertools
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError
from redis.retry import Retry

from kvstrata.contract.store.redis_keys import KEY_PREFIX
from kvstrata.objects.redis.users import DATA_USER

from .direct import container_pid, network_of
from .install import DEMO_NAMESPACE, SYSTEM_NAMESPACE
from .kubectl import CommandError, Kubectl

PORT = 6379
PAUSE_S = 0.05
RETRY_S = 0.02
DEADLINE_S = 20.0
"""How long a request is tried: longer than a node time-out and the election that follows it, on a busy machine."""
IO_TIMEOUT_S = 1.0
KEYS = 512
REFRESH_S = 0.5


@dataclass(slots=True)
class Requests:
    """Outcomes of the requests so far: `hits` found the value written just before; `misses` did not, because that write
    was lost: they found none, or an earlier value of the same name; `wrong` found another value. `lost` counts values
    that were gone when their names were written again, KEYS writes later."""

    writes: int = 0
    hits: int = 0
    misses: int = 0
    wrong: int = 0
    lost: int = 0
    failed: int = 0
    longest_s: float = 0.0
    last_failure: str = ""


@contextmanager
def cluster_caller(
    kubectl: Kubectl, tier: str, deadline_s: float = DEADLINE_S, *, tls: bool = True, pause_s: float = PAUSE_S
) -> Iterator[Requests]:
    """Write and read in a loop while the block runs, with a pause in each turn; a request is tried for `deadline_s`,
    and counts as failed then."""
    auth = kubectl.get("secret", f"kvs-{tier}-redis-auth", DEMO_NAMESPACE)["data"]
    domain = str(kubectl.get("cachedomain", "default", DEMO_NAMESPACE)["status"]["domainID"])
    operator = kubectl.list("pod", SYSTEM_NAMESPACE, "app.kubernetes.io/name=kvstrata")[0]["metadata"]["name"]
    pid = container_pid(kubectl, SYSTEM_NAMESPACE, operator, "operator")
    ended = threading.Event()
    with TemporaryDirectory() as folder:
        ca = Path(folder, "ca.crt") if tls else None
        if ca is not None:
            certificate = kubectl.get("secret", f"kvs-{tier}-redis-tls", DEMO_NAMESPACE)["data"]
            ca.write_bytes(base64.b64decode(certificate["ca.crt"]))
        caller = _Caller(kubectl, tier, domain, base64.b64decode(auth["password"]).decode(), ca, deadline_s)
        caller.learn_addresses()
        threads = [
            threading.Thread(target=caller.call, args=(pid, ended, pause_s), daemon=True),
            threading.Thread(target=caller.keep_learning, args=(ended,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield caller.requests
        finally:
            ended.set()
            # The requests under way are tried to their deadline.
            for thread in threads:
                thread.join(10 * deadline_s)


class _Caller:
    def __init__(
        self, kubectl: Kubectl, tier: str, domain: str, password: str, authority: Path | None, deadline_s: float
    ) -> None:
        self._kubectl, self._tier, self._password, self._authority = kubectl, tier, password, authority
        self._deadline_s = deadline_s
        self._run = secrets.token_hex(8)
        self._prefix = f"{KEY_PREFIX}:{domain}:"
        self._addresses: dict[str, str] = {}
        self._clients: dict[str, redis.Redis] = {}
        self._owners: dict[int, str] = {}
        self._written: dict[str, bytes] = {}
        self.requests = Requests()

    def call(self, pid: int, ended: threading.Event, pause_s: float) -> None:
        """Write and read until `ended` is set."""
        with network_of(pid):
            for number in itertools.count():
                if ended.is_set():
                    break
                try:
                    self._write_and_read(number)
                except _FailedError as error:
                    self.requests.failed += 1
                    self.requests.last_failure = str(error)[:300]
                time.sleep(pause_s)
            for client in self._clients.values():
                client.close()

    def keep_learning(self, ended: threading.Event) -> None:
        """Ask for the pods' addresses until `ended` is set: names of pods are unknown in the other network."""
        while not ended.wait(REFRESH_S):
            try:
                self.learn_addresses()
            except CommandError:
                continue

    def learn_addresses(self) -> None:
        """Ask Kubernetes which address each of the tier's pods has."""
        pods = self._kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/tier={self._tier}")
        self._addresses = {pod["metadata"]["name"]: str(pod["status"].get("podIP") or "") for pod in pods}

    def _write_and_read(self, number: int) -> None:
        key = f"probe-{number % KEYS}"
        name, value = f"{self._prefix}{{{key}}}:v", f"{key} {self._run} {number}".encode()
        if (former := self._written.pop(name, None)) is not None:
            self.requests.lost += self._request("GET", name) != former
        self._request("SET", name, value, "PX", 600_000)
        self._written[name] = value
        self.requests.writes += 1
        found = self._request("GET", name)
        self.requests.hits += found == value
        self.requests.misses += found is None or (found != value and found.startswith(f"{key} ".encode()))
        self.requests.wrong += found is not None and not found.startswith(f"{key} ".encode())

    def _request(self, *words: Any) -> Any:
        """Ask the server that has the slot of a key. Raises _FailedError if there is no answer in time."""
        slot, began = key_slot(words[1].encode()), time.monotonic()
        until = began + self._deadline_s
        try:
            while True:
                try:
                    return self._ask(slot, until, *words)
                except (redis.RedisError, OSError) as error:
                    if time.monotonic() > until:
                        raise _FailedError(f"{words[0]}: {type(error).__name__}: {error}") from error
                time.sleep(RETRY_S)
        finally:
            self.requests.longest_s = max(self.requests.longest_s, time.monotonic() - began)

    def _ask(self, slot: int, until: float, *words: Any) -> Any:
        """Ask the server that has a slot, and the one that it redirects to. Forgets the map of slots on no answer."""
        try:
            return self._client(self._owner(slot, until)).execute_command(*words)
        except AskError as elsewhere:
            with self._client(self._address(str(elsewhere.host))).pipeline(transaction=False) as both:
                both.execute_command("ASKING")
                both.execute_command(*words)
                return both.execute()[-1]
        except MovedError as elsewhere:
            # As most clients do: the former owner of other slots may be gone before it is asked for one of them.
            self._owners = self._map(until, self._where(str(elsewhere.host)))
            raise
        except (redis.RedisError, OSError):
            self._owners.clear()
            raise

    def _owner(self, slot: int, until: float) -> str:
        if slot not in self._owners:
            self._owners.update(self._map(until))
        owner = self._owners.get(slot) or next(iter(self._servers()), None)
        if owner is None:
            raise redis.ConnectionError("no pod has an address")
        return owner

    def _map(self, until: float, first: str = "") -> dict[int, str]:
        """Ask one server after the other, beginning with `first`, for the map of slots, until one answers or it is this
        late."""
        for address in (*filter(None, [first]), *self._servers()):
            if time.monotonic() > until:
                break
            try:
                slots = self._client(address).execute_command("CLUSTER SLOTS")
            except (redis.RedisError, OSError):
                continue
            return {slot: address for slot, host in _owners(slots) if (address := self._where(host))}
        raise redis.ConnectionError("no server returns the map of slots")

    def _servers(self) -> list[str]:
        return [address for address in self._addresses.values() if address]

    def _client(self, address: str) -> redis.Redis:
        if address not in self._clients:
            self._clients[address] = redis.Redis(
                host=address,
                port=PORT,
                username=DATA_USER,
                password=self._password,
                ssl=self._authority is not None,
                ssl_ca_certs=str(self._authority or ""),
                ssl_check_hostname=False,
                socket_timeout=IO_TIMEOUT_S,
                socket_connect_timeout=IO_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        return self._clients[address]

    def _address(self, host: str) -> str:
        """Address of a server by its host name. Raises redis.ConnectionError while its pod has no address."""
        if not (address := self._where(host)):
            raise redis.ConnectionError(f"{host} is the name of no pod that has an address")
        return address

    def _where(self, host: str) -> str:
        return self._addresses.get(host.partition(".")[0], "")


class _FailedError(Exception):
    """A request had no answer within its deadline."""


def _owners(slots: Any) -> Iterator[tuple[int, str]]:
    """Each slot, and the host of its primary, of an answer to CLUSTER SLOTS."""
    for first, last, (host, *_), *_ in slots:
        yield from ((slot, host.decode()) for slot in range(first, last + 1))
