"""Pods and deletion Jobs connect to servers that the installation allows, and to no other that a cluster names."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.messages.erase_report import StopReason
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata_sidecar.adapter.params import Endpoint, TierParams, TlsParams
from kvstrata_sidecar.adapter.redis.client.dial import dial
from kvstrata_sidecar.adapter.redis.client.resp import AccessError, TransportError
from kvstrata_sidecar.adapter.redis.client.slots import Address
from kvstrata_sidecar.delete_job.servers import Servers, StoppedError
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn
from tests.tiers.hostile_server import HostileServer
from tests.tiers.tier_driver import Driver, block

HERE = AllowedServers(networks=("127.0.0.1/32",))
EVERYWHERE = AllowedServers(networks=("127.0.0.0/8",))
pytestmark = pytest.mark.claim("pods and deletion Jobs connect to servers that the installation allows")

DEADLINES: dict[str, Any] = {"connect_timeout_ms": 5_000, "io_timeout_ms": 5_000}


class Named:
    """A server at 127.0.0.2 that a cluster names, and that answers nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.2", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    def was_reached(self) -> bool:
        try:
            self._listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def named() -> Iterator[Named]:
    made = Named()
    yield made
    made.close()


@pytest.fixture
def cluster(named: Named) -> Iterator[HostileServer]:
    """A server of a cluster, by which the named one has all slots."""
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.2\r\n:%d\r\n$4\r\nnode\r\n" % named.port
    made = HostileServer(lambda connection, _: connection.sendall(slots))
    yield made
    made.close()


def tier(port: int, allowed: AllowedServers | None) -> TierParams:
    return TierParams("shared", endpoints=(Endpoint("127.0.0.1", port),), cluster=True, allowed=allowed, **DEADLINES)


def test_a_pod_connects_to_no_server_that_a_cluster_names_and_the_installation_does_not_allow(
    start: Callable[..., Driver], gate: GateStandIn, cluster: HostileServer, named: Named
) -> None:
    driver = start(cluster.port, cluster=True, allowed=HERE)
    gate.allow(KEYSPACE_A)
    while "does not allow its address" not in driver.tier.state().detail:
        driver.lookup([block(KEYSPACE_A)])
    assert b"CLUSTER" in cluster.commands, "the declared server is allowed"
    assert not named.was_reached()


def test_each_address_of_a_name_has_to_be_allowed_before_a_connection(
    monkeypatch: pytest.MonkeyPatch, cluster: HostileServer, named: Named
) -> None:
    def both(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        places = ("127.0.0.1", "127.0.0.2") if host == "redis.example" else (host,)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, port)) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    for port in (cluster.port, named.port):
        with pytest.raises(AccessError, match="externalRedis of the chart"):
            dial(Address("redis.example", port), tier(port, HERE))
    assert not named.was_reached()
    for allowed in (EVERYWHERE, None):
        dial(Address("redis.example", cluster.port), tier(cluster.port, allowed)).close()
    assert cluster.commands == [b"PING", b"PING"]


def test_pods_connect_to_the_api_servers_host_at_other_ports_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any, **__: Any) -> socket.socket:
        raise ConnectionRefusedError

    place = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [place])
    monkeypatch.setattr(socket, "create_connection", refuse)
    allowed = AllowedServers(reserved=("[192.0.2.7]:6443",))
    with pytest.raises(AccessError, match="does not allow its address"):
        dial(Address("redis.example", 6443), tier(6443, allowed))
    with pytest.raises(TransportError, match="cannot connect"):
        dial(Address("redis.example", 6379), tier(6379, allowed))


def test_a_password_goes_without_tls_only_if_the_installation_allows_it(cluster: HostileServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_bytes(b"word")
    held = replace(tier(cluster.port, HERE), password_file=str(tmp_path / "password"))
    with pytest.raises(AccessError, match="no password without TLS"):
        dial(Address("127.0.0.1", cluster.port), held)
    assert cluster.commands == []
    dial(Address("127.0.0.1", cluster.port), replace(held, allowed=replace(HERE, plain_passwords=True))).close()
    assert cluster.commands == [b"AUTH", b"PING"]


def test_a_deletion_does_not_report_which_named_server_has_another_certificate(
    monkeypatch: pytest.MonkeyPatch, cluster: HostileServer, named: Named
) -> None:
    def start_tls(raw: socket.socket, _: TlsParams, server_name: str) -> socket.socket:
        if server_name == "127.0.0.1":
            return raw
        raise AccessError("the server's certificate is not trusted") from ssl.SSLCertVerificationError()

    monkeypatch.setattr("kvstrata_sidecar.adapter.redis.client.dial._start_tls", start_tls)
    with pytest.raises(StoppedError, match="does not answer as Redis") as stopped:
        Servers(replace(tier(cluster.port, EVERYWHERE), tls=TlsParams("ca.crt")))
    assert stopped.value.reason is StopReason.SERVER_AWAY
    assert named.was_reached()


def test_a_deletion_connects_to_no_such_server_either(cluster: HostileServer, named: Named) -> None:
    with pytest.raises(StoppedError, match="does not allow its address") as stopped:
        Servers(tier(cluster.port, HERE))
    assert stopped.value.reason is StopReason.ACCESS_REFUSED
    assert not named.was_reached()


def test_a_deletion_does_not_report_why_a_named_server_is_away(cluster: HostileServer, named: Named) -> None:
    named.close()
    with pytest.raises(StoppedError) as stopped:
        Servers(tier(cluster.port, EVERYWHERE))
    assert stopped.value.reason is StopReason.SERVER_AWAY
    assert str(stopped.value).endswith("the server, which the cluster names, does not answer as Redis")
    declared = TierParams("shared", endpoints=(Endpoint("127.0.0.2", named.port),), allowed=EVERYWHERE, **DEADLINES)
    with pytest.raises(StoppedError, match="refused"):
        Servers(declared)
