"""A managed server as its pod runs it, an operator that tends it, and a kubelet that brings files of Secrets late.

The server, the commands and the handshakes are real; the API server is in memory, and the operator's clock can be put
forward.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.resources import SECRET
from kvstrata.model.redis.credentials import Stage
from kvstrata.objects import labels, names
from kvstrata.objects.context import BuildContext
from kvstrata.plan.actions import ManagedServer, TendServers, TurnSecret
from kvstrata.plan.redis.credentials import Tending, missing_secrets, tend_credentials
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis.credentials import CredentialWorker
from kvstrata.reconcile.secrets import SecretStore, decode
from kvstrata.reconcile.store import Store
from kvstrata_sidecar.adapter.params import TlsParams
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, redis_tier
from tests.tiers.gate_stand_in import DOMAIN
from tests.tiers.redis_process import RedisProcess

CONTEXT = BuildContext(sidecar_image="sidecar:1", redis_image="redis:7")
KUBELET_S = 90.0
"""How late files of Secrets reach pods: the latest that the plan reckons with."""

LONG_AGO = timedelta(days=300)
"""How old the first Secrets are, unless a test wants it otherwise: passwords and certificate are due."""

TLS, USERS = names.redis_tls("shared"), names.redis_auth("shared")


class Managed:
    """One managed server `one` of the tier `shared`, with its operator, and the files of a pod that uses it."""

    def __init__(self, directory: Path, command: Sequence[str], *, tls: bool, age: timedelta = LONG_AGO) -> None:
        self.tls = tls
        self._began, self.ahead = datetime.now(UTC), -age
        self.kube = MemoryKube()
        self.store = Store(lambda: os.urandom(64), self.now)
        self._boot()
        self.kube.put(redis_tier(redis={"managed": {"tls": {"mode": "Issued" if tls else "Disabled"}}}))
        self._observe()
        self.pod, self.user = directory / "pod", directory / "user"
        for folder in (self.pod, self.user):
            folder.mkdir()
        self.writes: list[tuple[datetime, dict[str, bytes]]] = []
        asyncio.run(self._make())
        self.ahead = timedelta()
        self.bring_files(newest=True)
        settings = [word for name, value in self.files.items() for word in (f"--{name}", value)]
        self.process = RedisProcess(
            directory,
            *("--aclfile", str(self.pod / names.ACL_FILE_KEY)),
            tls=[*settings, "--tls-auth-clients", "no"] if tls else (),
            command=command,
        )
        self.process.start()
        endpoint = f"127.0.0.1:{self.process.port}"
        self.server = ManagedServer("one", endpoint, names.redis_host("shared", NAMESPACE))
        self.servers: tuple[ManagedServer, ...] = (self.server,)

    def _boot(self) -> None:
        self.queue = WorkQueue(lambda: 0.0)
        self.secret_store = SecretStore(self.kube, "kvstrata-system", os.urandom, self.now)
        asyncio.run(self.secret_store.open())

    @property
    def files(self) -> dict[str, str]:
        """Where the server has its certificate, by the setting that names it."""
        keys = {"tls-cert-file": names.CERTIFICATE_KEY, "tls-key-file": names.PRIVATE_KEY_KEY}
        return {name: str(self.pod / key) for name, key in (keys | {"tls-ca-cert-file": names.AUTHORITY_KEY}).items()}

    @property
    def access(self) -> dict[str, Any]:
        """What the adapter is told of the server."""
        found: dict[str, Any] = {"username": "data", "password_file": str(self.user / names.PASSWORD_KEY)}
        if self.tls:
            found["tls"] = TlsParams(str(self.user / names.AUTHORITY_KEY), self.server.server_name)
        return found

    def follow(self, directory: Path, command: Sequence[str]) -> RedisProcess:
        """Start another server `two` that follows the first."""
        password = self.secret()[names.REPLICATION_PASSWORD_KEY].decode()
        other = RedisProcess(
            directory,
            *("--aclfile", str(self.pod / names.ACL_FILE_KEY), "--replicaof", "127.0.0.1", str(self.process.port)),
            *("--masteruser", "replication", "--masterauth", password, "--repl-diskless-sync-delay", "0"),
            command=command,
        )
        other.start()
        self.servers = (self.server, ManagedServer("two", f"127.0.0.1:{other.port}", self.server.server_name))
        return other

    def now(self) -> datetime:
        """The operator's clock, which goes on when a test says so: no file is later than it may be."""
        return self._began + self.ahead

    def secret(self, name: str = USERS) -> dict[str, bytes]:
        """The values of a Secret."""
        return decode(self.kube.objects[(SECRET.kind, NAMESPACE, name)])

    @property
    def stage(self) -> Stage:
        """Where the passwords are in their life."""
        facts = self.store.world(NAMESPACE).secrets[USERS].passwords
        assert facts is not None
        return facts.stage

    def restart_operator(self) -> None:
        """Let another operator begin, which knows what the API server holds and no more."""
        self.store = Store(lambda: os.urandom(64), self.now)
        self._boot()
        self._observe()

    def round(self) -> Tending:
        """Let the operator plan once, and carry the plan out."""
        return asyncio.run(self._round())

    def settle(self) -> Tending:
        """Let it plan until it waits."""
        for _ in range(20):
            tending = self.round()
            if not tending.actions:
                return tending
        raise AssertionError(f"the operator never rests: {tending}")

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition by the last look."""
        findings = self._plan().findings
        return next((str(one.status), one.reason) for one in findings if one.type == kind)

    def pass_s(self, seconds: float) -> None:
        """Put the operator's clock forward; files arrive when they must."""
        self.ahead += timedelta(seconds=seconds)
        self.bring_files()

    def bring_files(self, *, newest: bool = False) -> None:
        """Bring the files that are due to the server's pod and to the one that uses it, each at one instant."""
        due = [data for at, data in self.writes if newest or (self.now() - at).total_seconds() >= KUBELET_S]
        for key, value in (due[-1] if due else {}).items():
            for folder in (self.pod, self.user):
                fresh = folder / f".{key}"
                fresh.write_bytes(value)
                fresh.rename(folder / key)

    def lose_passwords(self) -> None:
        """Delete the Secret of the users, and let the operator make it anew."""
        self.kube.remove(SECRET.kind, NAMESPACE, USERS)
        self.secret_store.forget(self.store.domain(NAMESPACE), USERS)
        asyncio.run(self._make())

    def change_authority(self) -> None:
        """Have an operator begin that finds no authority, and makes another."""
        self.kube.remove(SECRET.kind, "kvstrata-system", "kvstrata-ca")
        self.restart_operator()

    def _plan(self) -> Tending:
        world = self.store.world(NAMESPACE)
        return tend_credentials(world, CONTEXT, world.tiers["shared"], DOMAIN, self.servers, self.now())

    async def _make(self) -> None:
        world = self.store.world(NAMESPACE)
        for order in missing_secrets(world, CONTEXT, world.tiers["shared"], DOMAIN):
            await self.secret_store.ensure(self.store.domain(NAMESPACE), order)
        self._written()

    async def _round(self) -> Tending:
        tending = self._plan()
        tender = CredentialWorker(
            self.kube, self.store, self.queue, self.secret_store, lambda: True, files=self.files, now=self.now
        )
        for action in tending.actions:
            if isinstance(action, TurnSecret):
                await self.secret_store.turn(self.store.domain(NAMESPACE), action)
                self._written()
            if isinstance(action, TendServers):
                await tender.tend(NAMESPACE, action)
        return tending

    def _written(self) -> None:
        values = {name: self.secret(name) for name in (USERS, *([TLS] if self.tls else []))}
        self.writes.append((self.now(), {key: value for one in values.values() for key, value in one.items()}))

    def _observe(self) -> None:
        for (kind, _, _), raw in self.kube.objects.items():
            if kind == CacheTier.INFO.kind:
                self.store.observe(raw)
            elif kind == SECRET.kind and raw["metadata"]["labels"].get(labels.TIER):
                self.secret_store.observe(self.store.domain(NAMESPACE), raw)
