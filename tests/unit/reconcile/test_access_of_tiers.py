"""Passwords and authorities of Redis tiers: pods get those that work, and keep theirs meanwhile."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import pytest

from kvstrata.clients import pki
from kvstrata.model.pods import BackendAccess
from kvstrata.plan.actions import ProbeBackend, TendServers
from tests.support.memory_secret_store import MemorySecretStore
from tests.support.objects import NAMESPACE, model, redis_tier
from tests.support.worlds import START, Simulation

LOGIN = ("login", "password")


def put_secret(simulation: Simulation, name: str, **values: bytes) -> None:
    data = {key.replace("_", "."): base64.b64encode(value).decode() for key, value in values.items()}
    metadata = {"name": name, "namespace": NAMESPACE}
    simulation.kube.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})


class Server:
    """It admits one password, and can do nothing else."""

    def __init__(self) -> None:
        self.password, self.port = b"first", 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        admitted = False
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                length = int((await reader.readline())[1:])
                words.append((await reader.readexactly(length + 2))[:-2])
            if words[0] == b"AUTH":
                admitted = words[-1] == self.password
            refused = b"-WRONGPASS invalid username-password pair\r\n"
            writer.write(refused if not admitted else b"+OK\r\n" if words[0] == b"AUTH" else b"-ERR not here\r\n")
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    yield made
    listening.close()


async def test_pods_get_a_password_of_an_external_server_after_the_server_admitted_it(server: Server) -> None:
    endpoint = f"127.0.0.1:{server.port}"
    external = {"external": {"endpoints": [endpoint], "authSecretRef": {"name": "login"}}}
    simulation = Simulation(model(tiers=("shared",)), redis_tier(redis=external))
    order = ProbeBackend("shared", BackendAccess(endpoint, "127.0.0.1", None, LOGIN), "demo")
    domain = simulation.store.domain(NAMESPACE)

    async def probe(password: bytes) -> tuple[bytes | None, str]:
        put_secret(simulation, "login", password=password)
        await simulation.backends.ask(NAMESPACE, order)
        return domain.access.get("shared", {}).get(LOGIN), domain.backends["shared"].message

    assert (await probe(b"wrong"))[0] is None, "it would only be refused"
    assert (await probe(b"first"))[0] == b"first"
    held, message = await probe(b"second")
    assert held == b"first"
    assert message.endswith("Pods keep the password and authority that they have")
    server.password = b"second"
    assert (await probe(b"second"))[0] == b"second"


async def test_an_authority_in_a_users_secret_that_no_server_can_use_reaches_no_pod(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MemorySecretStore, "authority", pki.create_authority("own", START, pki.generate_key()))
    managed = {"managed": {"tls": {"mode": "Secret", "secretRef": {"name": "own-tls"}}}}
    simulation = Simulation(model(tiers=("shared",)), redis_tier(redis=managed))
    put_secret(simulation, "users", password=b"later")
    put_secret(simulation, "own-tls", tls_crt=b"broken", tls_key=b"broken", ca_crt=b"broken")
    domain = simulation.store.domain(NAMESPACE)
    domain.access["shared"] = {("own-tls", "ca.crt"): b"works", ("users", "password"): b"first"}
    await simulation.credentials.tend(NAMESPACE, TendServers("shared", (), "users", "own-tls", foreign_tls=True))
    assert domain.access["shared"] == {("own-tls", "ca.crt"): b"works", ("users", "password"): b"later"}
