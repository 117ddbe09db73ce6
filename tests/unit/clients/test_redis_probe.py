"""Questions to a real redis-server, with and without TLS, and to what is not one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.ports import free_port
from e2e.cluster.rootfs import server_command
from kvstrata.api.reasons import TierReason
from kvstrata.clients import pki
from kvstrata.clients.redis import probe
from kvstrata.clients.redis.probe import Access, Failure, ask, parse_endpoint
from tests.support.redis_binary import needs_redis

PASSWORD = "correct horse battery staple"
PATIENCE_S = 60.0
"""How long a probe waits in tests in which the server answers."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CONNECT_TIMEOUT_S", PATIENCE_S)


async def info(
    endpoint: str,
    password: str | None,
    ca_pem: bytes | None,
    server_name: str | None = None,
    *,
    username: str | None = None,
    timeout_s: float = PATIENCE_S,
) -> Mapping[str, Any] | Failure:
    """Ask for INFO."""
    access = Access(password, ca_pem, username)
    return await ask(endpoint, access, lambda client: client.info(), server_name=server_name, timeout_s=timeout_s)


async def why_not(*asked: Any, **options: Any) -> Failure:
    """Ask for INFO, and return why there is none."""
    answer = await info(*asked, **options)
    assert isinstance(answer, Failure), answer
    return answer


@contextmanager
def _server(directory: Path, *lines: str, tls: bool = False) -> Iterator[str]:
    port = free_port()
    configuration = directory / f"redis-{port}.conf"
    ports = (f"tls-port {port}", "port 0") if tls else (f"port {port}",)
    configuration.write_text("\n".join(("bind 127.0.0.1", 'save ""', f"dir {directory}", *ports, *lines)) + "\n")
    process = subprocess.Popen([*server_command(), str(configuration)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 0.2).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with _server(
        tmp_path_factory.mktemp("plain"),
        f'requirepass "{PASSWORD}"',
        "maxmemory 64mb",
        "maxmemory-policy noeviction",
        "user data on >data ~kvs1:* +get +set",
    ) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def authority() -> pki.KeyPair:
    return pki.create_authority("kvstrata", datetime.now(UTC), pki.generate_key())


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, authority: pki.KeyPair) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("tls")
    pair = pki.issue_server(authority, ["redis.example"], datetime.now(UTC), pki.generate_key())
    (directory / "tls.crt").write_bytes(pair.certificate_pem)
    (directory / "tls.key").write_bytes(pair.key_pem)
    (directory / "ca.crt").write_bytes(authority.certificate_pem)
    with _server(
        directory,
        f"tls-cert-file {directory}/tls.crt",
        f"tls-key-file {directory}/tls.key",
        f"tls-ca-cert-file {directory}/ca.crt",
        "tls-auth-clients no",
        f'requirepass "{PASSWORD}"',
        tls=True,
    ) as endpoint:
        yield endpoint


class TestARealServer:
    pytestmark = needs_redis

    async def test_with_another_password_is_named_and_leaks_neither(self, plain: str) -> None:
        report = await why_not(plain, "guess-4711", None)
        assert report.reason is TierReason.WRONG_PASSWORD
        assert "4711" not in repr(report)

    async def test_without_a_password_asks_for_one(self, plain: str) -> None:
        assert (await why_not(plain, None, None)).reason is TierReason.PASSWORD_REQUIRED

    async def test_whose_user_may_not_run_info_is_named(self, plain: str) -> None:
        report = await why_not(plain, "data", None, username="data")
        assert report.reason is TierReason.NO_PERMISSION

    async def test_without_a_password_refuses_one(self, tmp_path: Path) -> None:
        with _server(tmp_path) as endpoint:
            assert (await why_not(endpoint, PASSWORD, None)).reason is TierReason.PASSWORD_UNEXPECTED

    async def test_leaves_no_connection_behind(self, plain: str) -> None:
        for _ in range(5):
            await info(plain, PASSWORD, None)
        host, _, port = plain.partition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as raw, raw.makefile("rb") as answers:
            raw.sendall(f'AUTH "{PASSWORD}"\r\nINFO clients\r\n'.encode())
            assert (
                next(line for line in answers if line.startswith(b"connected_clients:")) == b"connected_clients:1\r\n"
            )

    async def test_over_tls_is_reached_by_the_name_in_its_certificate(
        self, encrypted: str, authority: pki.KeyPair
    ) -> None:
        figures = await info(encrypted, PASSWORD, authority.certificate_pem, "redis.example")
        assert not isinstance(figures, Failure), figures

    async def test_over_tls_under_another_name_is_refused(self, encrypted: str, authority: pki.KeyPair) -> None:
        report = await why_not(encrypted, PASSWORD, authority.certificate_pem, "other.example")
        assert report.reason is TierReason.CERTIFICATE_REFUSED

    async def test_over_tls_of_another_authority_is_refused(self, encrypted: str) -> None:
        other = pki.create_authority("other", datetime.now(UTC), pki.generate_key())
        report = await why_not(encrypted, PASSWORD, other.certificate_pem, "redis.example")
        assert report.reason is TierReason.CERTIFICATE_REFUSED

    async def test_over_tls_with_another_password_is_named(self, encrypted: str, authority: pki.KeyPair) -> None:
        report = await why_not(encrypted, "guess", authority.certificate_pem, "redis.example")
        assert report.reason is TierReason.WRONG_PASSWORD

    async def test_that_speaks_no_tls_leaves_the_handshake_unanswered(self, plain: str, authority: pki.KeyPair) -> None:
        report = await why_not(plain, PASSWORD, authority.certificate_pem, "redis.example", timeout_s=0.5)
        assert report.reason is TierReason.TIMEOUT
        assert "TLS" in report.message

    async def test_that_wants_tls_drops_a_plain_connection(self, encrypted: str) -> None:
        assert (await why_not(encrypted, PASSWORD, None)).reason is TierReason.DISCONNECTED

    async def test_that_is_frozen_times_out(self, tmp_path: Path) -> None:
        with _server(tmp_path, "enable-debug-command yes") as endpoint:
            host, _, port = endpoint.partition(":")
            with socket.create_connection((host, int(port)), PATIENCE_S) as raw:
                # It has this connection already, so it reads of the sleep before it reads what the probe asks.
                raw.sendall(b"PING\r\n")
                assert raw.recv(7) == b"+PONG\r\n"
                raw.sendall(b"DEBUG SLEEP 600\r\n")
                started = time.monotonic()
                report = await why_not(endpoint, None, None, timeout_s=0.4)
                assert report.reason is TierReason.TIMEOUT
                assert time.monotonic() - started < 30


async def test_a_closed_port_is_named() -> None:
    report = await why_not(f"127.0.0.1:{free_port()}", "x", None)
    assert report.reason is TierReason.CONNECTION_REFUSED


async def test_a_host_without_an_address_is_named() -> None:
    report = await why_not("no-such-host.invalid:6379", "x", None)
    assert report.reason is TierReason.NO_SUCH_HOST
    sentence = "the host of no-such-host.invalid:6379 cannot be resolved: check its spelling, and DNS"
    assert sentence in report.message


async def test_another_protocol_is_not_redis() -> None:
    async def speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak_http, "127.0.0.1", 0)
    async with server:
        report = await why_not(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", None, None)
    assert report.reason is TierReason.NOT_REDIS


async def test_an_authority_that_is_no_pem_is_named() -> None:
    report = await why_not("127.0.0.1:1", None, b"junk", "x")
    assert report.reason is TierReason.INVALID_CERTIFICATE_AUTHORITY


@pytest.mark.parametrize("endpoint", ["", ":6379", "host:", "host:0", "host:70000", "a:b:c", "redis://u:p@h", "[::1"])
async def test_a_malformed_endpoint_is_named_and_never_dialled(endpoint: str) -> None:
    assert (await why_not(endpoint, "x", None)).reason is TierReason.INVALID_ENDPOINT


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [("h", ("h", 6379)), ("h.ns.svc:7000", ("h.ns.svc", 7000)), ("[::1]:7", ("::1", 7)), ("[::1]", ("::1", 6379))],
)
def test_an_endpoint_is_a_host_and_maybe_a_port(endpoint: str, address: tuple[str, int]) -> None:
    assert parse_endpoint(endpoint) == address
