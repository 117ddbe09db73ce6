"""External servers that the operator may connect to: by name, by address, and by those that servers name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstrata.clients.redis.external import check_external
from kvstrata.clients.redis.probe import Access, Failure, ask, pipelined
from kvstrata.clients.redis.verifier import TierVerifier
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.settings import Settings, SettingsError

LOOPBACK = "127.0.0.1/32"
API_SERVER = "10.96.0.1"


LOCAL = ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "fe80::1%eth0"]


@pytest.mark.parametrize("address", [*LOCAL, "0.0.0.0", "::", "224.0.0.1", API_SERVER])
def test_addresses_of_the_node_and_the_api_server_are_allowed_by_networks_only(address: str) -> None:
    reserved = (API_SERVER,)
    assert not AllowedServers(reserved=reserved).allows("redis.example", [address], 6379)
    assert not AllowedServers(("*.example",), reserved=reserved).allows("redis.example", [address], 6379)
    assert not AllowedServers(reserved=reserved).allows("redis.example", ["10.0.0.7", address], 6379), "each counts"
    every = ("0.0.0.0/0", "::/0")
    assert AllowedServers(networks=every, reserved=reserved).allows("redis.example", [address], 6379)


def test_the_host_of_the_api_server_may_have_a_redis_at_another_port() -> None:
    allowed = AllowedServers(reserved=(API_SERVER, "[192.0.2.7]:6443", "[2001:db8::7]:6443"))
    for host in ("192.0.2.7", "2001:db8::7", "::ffff:192.0.2.7"):
        assert not allowed.allows("redis.example", [host], 6443)
        assert allowed.allows("redis.example", [host], 6379)
    assert allowed.reserved_at((6379,)) == {API_SERVER}
    assert allowed.reserved_at(range(1 << 16)) == {API_SERVER, "192.0.2.7", "2001:db8::7"}


def test_without_rules_every_other_server_is_allowed_and_with_rules_no_other() -> None:
    assert AllowedServers().allows("redis.example", ["10.0.0.7", "2001:db8::7"], 6379)
    rules = AllowedServers(("one.example", "*.cache.example"), ("10.1.0.0/16",))
    assert rules.allows("One.Example.", ["192.0.2.1"], 6379)
    assert rules.allows("a.cache.example", ["192.0.2.1"], 6379)
    assert rules.allows("10.1.2.3", ["10.1.2.3"], 6379)
    for host, address in (("cache.example", "192.0.2.1"), ("one.example.evil", "192.0.2.1"), ("10.2.0.1", "10.2.0.1")):
        assert not rules.allows(host, [address], 6379)


class Server:
    """A primary of a cluster at loopback, which names another server."""

    def __init__(self) -> None:
        self.port, self.connections, self.named, self.login = 0, 0, b"", b"+OK\r\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                length = int((await reader.readline())[1:])
                words.append((await reader.readexactly(length + 2))[:-2])
            answer = {b"AUTH": self.login, b"PING": b"+OK\r\n"}.get(words[0], b"-ERR not here\r\n")
            slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (len(self.named), self.named, self.port)
            peers = b"%b %b:%d@1 %b - 0 0 1 connected %b\n"
            nodes = peers % (b"a" * 40, b"127.0.0.1", self.port, b"myself,master", b"0-8191")
            nodes += peers % (b"b" * 40, self.named, self.port, b"master", b"8192-16383")
            answer = {b"SLOTS": slots, b"NODES": b"$%d\r\n%b\r\n" % (len(nodes), nodes)}.get(words[-1], answer)
            writer.write(answer)
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    yield made
    listening.close()


async def ping(server: Server, access: Access) -> Any:
    return await ask(f"localhost:{server.port}", access, lambda client: pipelined(client, [("PING",)]))


@pytest.fixture(autouse=True)
def one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` has an address in IPv4, on every machine."""
    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, _family=0, *rest, **more: found(
        host, port, socket.AF_INET, *rest, **{key: one for key, one in more.items() if key != "family"}))  # fmt: skip


async def test_a_server_that_is_not_allowed_gets_no_connection_and_no_password_in_plain_text(server: Server) -> None:
    refused = await ping(server, Access(None, None, allowed=AllowedServers()))
    assert isinstance(refused, Failure)
    assert refused.reason == "AddressNotAllowed"
    here = AllowedServers(networks=(LOOPBACK,))
    plain = await ping(server, Access("secret", None, allowed=here))
    assert isinstance(plain, Failure)
    assert plain.reason == "PasswordInPlainText"
    assert server.connections == 0
    assert await ping(server, Access(None, None, allowed=here)) is not None
    assert server.connections == 1
    allowed = AllowedServers(networks=(LOOPBACK,), plain_passwords=True)
    assert not isinstance(await ping(server, Access("secret", None, allowed=allowed)), Failure)


async def test_the_operator_connects_to_the_api_servers_host_at_other_ports_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [place])
    access = Access(None, None, allowed=AllowedServers(reserved=("[192.0.2.7]:6443",)))
    for port, refused in ((6443, True), (6379, False)):
        found = await ask(f"redis.example:{port}", access, lambda client: client.ping(), timeout_s=0.2)
        assert isinstance(found, Failure)
        assert (found.reason == "AddressNotAllowed") == refused


async def test_each_address_of_a_name_is_tried_until_one_answers(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = socket.getaddrinfo

    def twice(host: str, *rest: Any, **more: Any) -> Any:
        places = ("127.0.0.3", "127.0.0.1") if host == "localhost" else (host,)
        return [one for place in places for one in found(place, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", twice)
    here = AllowedServers(networks=("127.0.0.0/8",))
    assert not isinstance(await ping(server, Access(None, None, allowed=here)), Failure)
    assert server.connections == 1
    refused = await ping(server, Access(None, None, allowed=AllowedServers(networks=(LOOPBACK,))))
    assert isinstance(refused, Failure)
    assert (refused.reason, server.connections) == ("AddressNotAllowed", 1), "each address has to be allowed"


async def test_a_refused_password_is_not_hidden_by_another_address_that_does_not_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = socket.getaddrinfo

    def several(host: str, *rest: Any, **more: Any) -> Any:
        places = ("127.0.0.3", "127.0.0.1", "127.0.0.4") if host == "localhost" else (host,)
        return [one for place in places for one in found(place, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", several)
    server.login = b"-WRONGPASS invalid username-password pair\r\n"
    allowed = AllowedServers(networks=("127.0.0.0/8",), plain_passwords=True)
    refused = await ping(server, Access("secret", None, allowed=allowed))
    assert isinstance(refused, Failure)
    assert (refused.reason, server.connections) == ("WrongPassword", 1)


async def test_a_server_that_a_cluster_names_is_checked_too(server: Server) -> None:
    server.named = b"127.0.0.2"
    allowed = AllowedServers(networks=(LOOPBACK,))
    endpoint = f"127.0.0.1:{server.port}"
    access = Access(None, None, allowed=allowed)
    report = await check_external(endpoint, "127.0.0.1", access, "demo", cluster=True, limit=asyncio.Semaphore(4))
    assert [(one.address, one.reason) for one in report.servers] == [(f"127.0.0.2:{server.port}", "AddressNotAllowed")]
    assert server.connections == 1


@pytest.mark.parametrize("named", [b"127.0.0.2", b"no-such-host.invalid"])
async def test_a_status_shows_no_network_by_the_servers_that_a_cluster_names(server: Server, named: bytes) -> None:
    server.named = named
    access = Access(None, None, allowed=AllowedServers((named.decode(),), networks=("127.0.0.0/8",)))
    endpoint = f"127.0.0.1:{server.port}"
    report = await check_external(endpoint, "127.0.0.1", access, "demo", cluster=True, limit=asyncio.Semaphore(4))
    ((reason, message),) = [(one.reason, one.message) for one in report.servers]
    shown = f"{named.decode()}:{server.port}, which the cluster names, does not answer the operator as Redis"
    assert (reason, message) == ("Unreachable", f"{shown}: the operator's log has more")


async def test_the_look_of_an_erasure_shows_no_network_either(server: Server) -> None:
    server.named = b"127.0.0.2"
    access = Access(None, None, allowed=AllowedServers(networks=("127.0.0.0/8",)))
    found = await TierVerifier(f"127.0.0.1:{server.port}", "127.0.0.1", access, cluster=True).servers("0" * 16, ())
    shown = f"127.0.0.2:{server.port}, which the cluster names, does not answer the operator as Redis"
    assert f"{shown}: the operator's log has more" in [one.message for one in found.problems]
    assert "nothing listens" not in str(found.problems)


def settings(**more: str) -> Settings:
    names = ("NAMESPACE", "POD_NAME", "SIDECAR_IMAGE", "REDIS_IMAGE")
    return Settings.from_environment({**{f"KVSTRATA_{name}": "x" for name in names}, **more})


def test_the_installation_sets_the_rules() -> None:
    default = settings(KUBERNETES_SERVICE_HOST=API_SERVER).external_redis
    assert default == AllowedServers(reserved=(API_SERVER,))
    assert settings(KUBERNETES_SERVICE_HOST="api.cluster.example").external_redis == AllowedServers(), "no address"
    rules = '{"hosts": ["*.Example"], "cidrs": ["10.0.0.0/8"], "plainPasswords": true}'
    expected = AllowedServers(("*.example",), ("10.0.0.0/8",), plain_passwords=True)
    assert settings(KVSTRATA_EXTERNAL_REDIS=rules).external_redis == expected
    for wrong in ('{"cidrs": ["10.0.0.1/8"]}', '{"servers": []}', "[1]", "{"):
        with pytest.raises(SettingsError, match="KVSTRATA_EXTERNAL_REDIS must"):
            settings(KVSTRATA_EXTERNAL_REDIS=wrong)


def test_no_folder_of_nodes_lies_in_another_where_it_may_be_a_namespaces() -> None:
    assert settings(KVSTRATA_HOST_PATHS="/disks,/disks2").host_paths == ("/disks", "/disks2")
    for wrong in ("/disks,/disks/fast", "/disks/fast/a,/disks", "/disks,/disks/"):
        with pytest.raises(SettingsError, match="KVSTRATA_HOST_PATHS: /disks"):
            settings(KVSTRATA_HOST_PATHS=wrong)
