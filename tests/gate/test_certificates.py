"""Certificates that are replaced, and whether callers can connect: with real handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata_sidecar.gate.http.tls import OwnPort, ServerTls

from . import pki
from .world import MODEL, World, entry, post, until

DAY_S = 86_400.0
NAME = f"gate.{MODEL}.ns.kvstrata.internal"


def shown(tls: ServerTls) -> bytes:
    """Return the certificate of a handshake. Raises ssl.SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client, server = context.wrap_bio(back, there), tls.context.wrap_bio(there, back, server_side=True)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.getpeercert(binary_form=True) or b""


def odd_curve(directory: Path) -> None:
    """Write a pair that fits together, and with which no client shakes hands."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:secp256k1", "-nodes", "-days", "2", "-subj", "/CN=odd"]
    files = ["-keyout", str(directory / "tls.key"), "-out", str(directory / "tls.crt")]
    subprocess.run(["openssl", "req", "-x509", *curve, *files], check=True, capture_output=True)


@contextlib.asynccontextmanager
async def serving(world: World, **changes: Any) -> AsyncIterator[World]:
    revision = await world.publish([entry("acme")])
    async with world.started(**changes):
        await world.acked(revision)
        await until(lambda: world.gate.engine_ready)
        yield world


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return pki.Authority().issue(tmp_path / "tls", NAME, server=True)


def another_key(directory: Path) -> None:
    pki.Authority().issue(directory.parent / "other", NAME, server=True)
    (directory / "tls.key").write_bytes((directory.parent / "other" / "tls.key").read_bytes())


def client_only(directory: Path) -> None:
    pki.Authority().issue(directory, NAME, server=False)


BROKEN = {
    "another key": (another_key, "key values mismatch"),
    "an odd curve": (odd_curve, "no shared cipher"),
    "no key": (lambda directory: (directory / "tls.key").unlink(), "there is no tls.key"),
    "a client's": (client_only, "unsuitable certificate purpose"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_pair_that_makes_no_handshake_never_replaces_one_that_does(directory: Path, broken: str) -> None:
    tls = ServerTls(directory, client_authority=False)
    before = shown(tls)
    spoil, problem = BROKEN[broken]
    spoil(directory)
    assert not tls.reload_if_changed()
    assert tls.problem == f"the new certificate in {directory} cannot be used, and the former one is: {problem}"
    assert shown(tls) == before
    pki.Authority().issue(directory, NAME, server=True)
    assert tls.reload_if_changed()
    assert not tls.problem
    assert shown(tls) != before


def test_the_operators_certificate_is_tried_though_its_callers_need_one_too(directory: Path) -> None:
    tls = ServerTls(directory, client_authority=True)
    assert not tls.problem
    odd_curve(directory)
    assert not tls.reload_if_changed()
    assert tls.problem.endswith("no shared cipher")


def test_a_certificate_that_is_not_valid_now_is_reported_and_replaces_no_other(directory: Path) -> None:
    clock = [time.time()]
    tls = ServerTls(directory, client_authority=False, now_s=lambda: clock[0])
    before = shown(tls)
    clock[0] -= DAY_S
    pki.Authority().issue(directory, NAME, server=True)
    assert not tls.reload_if_changed()
    assert "cannot be used, and the former one is: it is valid from " in tls.problem
    assert shown(tls) == before
    clock[0] += DAY_S
    assert tls.reload_if_changed(), "its time has come, and its files are tried again"
    clock[0] += 2 * DAY_S
    assert not tls.reload_if_changed()
    assert "is in use, and callers refuse it: it is valid from " in tls.problem


async def test_a_gate_without_a_usable_pair_starts_unready_reports_it_and_recovers(world: World) -> None:
    good = world.authority.issue(world.directory / "caller", NAME, server=True)
    whole = (good / "tls.crt").read_bytes()
    (good / "tls.crt").write_bytes((world.gate_tls / "tls.crt").read_bytes())
    async with serving(world, tls_dir=good) as gate:
        await until(lambda: "callers cannot connect: the certificate in" in gate.gate.not_ready())
        assert gate.gate.state().certificate.endswith("key values mismatch")
        assert not gate.gate.state().problem, "the operator reaches it, to read this"
        assert b"kvstrata_gate_certificate_current 0" in (await gate.get("/metrics")).body
        with pytest.raises((OSError, EOFError)):
            await gate.connect("https", pki.client_context(good, present=False))
        (good / "tls.crt").write_bytes(whole)
        await until(lambda: not gate.gate.not_ready())
        connection = await gate.connect("https", pki.client_context(good, present=False))
        await connection.send(post("/v1/completions", {"prompt": "a"}))
        assert (await connection.answer()).status == 200
        connection.close()
        assert not gate.gate.state().certificate


async def test_a_port_that_takes_no_connections_makes_the_pod_unready_unless_it_was_chance() -> None:
    own = OwnPort()
    assert own.problem, "no success yet"
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    address = "127.0.0.1", server.sockets[0].getsockname()[1]
    assert await own.try_now(address, None)
    assert not own.problem
    assert await own.try_now(("::", address[1]), None), "without IPv6 a port of all addresses is one of IPv4"
    server.close()
    await server.wait_closed()
    assert not await own.try_now(address, None)
    assert not own.problem
    assert not await own.try_now(address, None)
    assert own.problem


async def test_tries_of_the_own_port_are_no_connections_that_stay(world: World) -> None:
    async with serving(world) as gate:
        port, tls = gate.gate.ports["https"], gate.gate._certificates["https"]
        for _ in range(5):
            assert await gate.gate.own_port.try_now(("127.0.0.1", port), tls)
        await until(lambda: not gate.gate.tenant_server.connections)
        assert not any(gate.gate.tenant_server.turned_away.values())
