"""What one caller, or a crowd without keys, can take away from the others: connections and memory."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvstrata.contract.messages.pod_state import gate_server_name
from kvstrata_sidecar.gate.http.errors import Reason
from kvstrata_sidecar.gate.http.messages import Buffered, Limits

from .pki import client_context
from .stand_ins import plain_answer
from .world import ACME, GLOBEX, MODEL, Connection, World, entry, post, until

ASK = post("/v1/completions", {"prompt": "a"})
LIVE = b"GET /livez HTTP/1.1\r\nHost: gate\r\n\r\n"


@asynccontextmanager
async def ready(world: World, **changes: int) -> AsyncIterator[World]:
    revision = await world.publish([entry("acme"), entry("globex")])
    async with world.started(**changes):
        await world.acked(revision)
        await until(lambda: len(world.gate.keys.ring) == 3)
        yield world


def upload(key: str, total_bytes: int, sent_bytes: int) -> bytes:
    """Return the head of a body of `total_bytes` and the first of them."""
    whole = post("/v1/completions", b"x" * total_bytes, key)
    return whole[: len(whole) - total_bytes + sent_bytes]


async def test_probes_get_through_however_many_connections_are_held(gate: World) -> None:
    server = gate.gate.health_server
    server.limits = replace(server.limits, head_s=600.0)  # so that none of those that are held ends by itself
    bound = server.limits.connections
    held = [await gate.connect("health") for _ in range(bound)]
    await until(lambda: len(server.connections) == bound)
    for path in ("/livez", "/readyz", "/metrics"):
        assert (await gate.get(path)).status == 200
    for connection in held:
        connection.close()


async def test_an_answer_of_the_health_port_ends_its_connection(gate: World) -> None:
    for request in (LIVE, LIVE.replace(b"livez", b"secrets"), LIVE.replace(b"GET", b"PUT")):
        connection = await gate.connect("health")
        await connection.send(request)
        assert (await connection.answer()).headers["connection"] == "close"
        assert await connection.closed()
        connection.close()


async def test_a_silent_connection_to_the_health_port_ends_before_a_probe_gives_up(gate: World) -> None:
    connection = await gate.connect("health")
    await until(lambda: gate.gate.health_server.connections)
    (held,) = gate.gate.health_server.connections
    assert held.deadline <= asyncio.get_running_loop().time() + 5
    connection.close()


async def test_at_the_bound_the_connection_that_waited_longest_makes_room(world: World) -> None:
    async with ready(world, max_connections=2):
        server = world.gate.tenant_server
        oldest = await world.connect()
        await until(lambda: len(server.connections) == 1 and not server.opening)
        context = client_context(world.gate_tls, present=False)
        younger = await world.connect("https", context)
        await until(lambda: len(server.connections) == 2 and not server.opening)
        newest = await world.connect()
        await newest.send(ASK)
        assert await oldest.closed()
        assert len(server.connections) == 2
        await younger.send(ASK)
        for connection in (younger, newest):
            assert (await connection.answer()).status == 200
            connection.close()
        assert b'kvstrata_gate_refusals_total{reason="too_many_connections"} 1' in (await world.get("/metrics")).body


async def test_who_sends_a_body_stays_while_others_only_hold_a_connection(world: World) -> None:
    async with ready(world, max_connections=2):
        sending = await world.connect()
        await sending.send(upload(ACME, 8, 4))
        await until(lambda: world.gate.tenant_server.buffered.total == 4)
        (kept,) = world.gate.tenant_server.connections
        kept.deadline = asyncio.get_running_loop().time() + 5  # nearer than the ten seconds that a head gets
        silent = await world.connect()
        await until(lambda: len(world.gate.tenant_server.connections) == 2)
        newest = await world.connect()
        await newest.send(ASK)
        assert await silent.closed()
        assert kept in world.gate.tenant_server.connections
        sending.close()
        newest.close()


async def test_a_connection_is_turned_away_when_all_others_are_served(world: World) -> None:
    release = asyncio.Event()

    async def slow(request, writer):  # type: ignore[no-untyped-def]
        await release.wait()
        await plain_answer(request, writer)

    world.engine.handler = slow
    async with ready(world, max_connections=2):
        served = [await world.connect() for _ in range(2)]
        for connection in served:
            await connection.send(ASK)
        await until(lambda: len(world.engine.requests) == 2)
        refused = await world.connect()
        answer = await refused.answer()
        assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
        assert await refused.closed()
        assert b'kvstrata_gate_refusals_total{reason="too_many_connections"} 1' in (await world.get("/metrics")).body
        release.set()
        for connection in served:
            assert (await connection.answer()).status == 200
            connection.close()


@pytest.mark.parametrize(
    ("request_line", "key", "status"),
    [
        ("GET /v1/models", "", 401),
        ("GET /v1/models", "Authorization: Bearer wrong\r\n", 401),
        ("GET /elsewhere", "", 404),
        ("PUT /v1/models", "", 405),
    ],
)
async def test_who_has_no_valid_key_keeps_no_connection(gate: World, request_line: str, key: str, status: int) -> None:
    connection = await gate.connect()
    await connection.send(f"{request_line} HTTP/1.1\r\nHost: gate\r\n{key}\r\n".encode())
    answer = await connection.answer()
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert await connection.closed()
    connection.close()


def _tls_end_without_reply(port: int, context: ssl.SSLContext) -> bytes:
    """Make the server end TLS, answer nothing to that, and return what the bare connection brings next."""
    plain = socket.create_connection(("127.0.0.1", port), 20)
    with context.wrap_socket(plain, server_hostname=gate_server_name(MODEL, "ns")) as tls:
        tls.sendall(b"GET /v1/models HTTP/1.1\r\nHost: gate\r\n\r\n")
        while tls.recv(4096):
            pass
        with socket.socket(fileno=os.dup(tls.fileno())) as bare:
            bare.settimeout(20)
            return bare.recv(1)


async def test_a_caller_who_does_not_answer_the_end_of_tls_is_let_go_soon(gate: World) -> None:
    # Such a connection, once turned away, holds a place of a handshake; the loop's default is 30 s.
    context = client_context(gate.gate_tls, present=False)
    assert await asyncio.to_thread(_tls_end_without_reply, gate.gate.ports["https"], context) == b""
    await until(lambda: not gate.gate.tenant_server.connections)


def shrink_memory(world: World, buffered_bytes: int) -> None:
    """Let the tenants' server hold this much of bodies."""
    server = world.gate.tenant_server
    server.limits = replace(server.limits, body_bytes=buffered_bytes // 4, buffered_bytes=buffered_bytes)
    server.buffered = type(server.buffered)(server.limits)


def test_memory_may_be_used_up_to_the_bounds_and_no_further() -> None:
    buffered = Buffered(Limits(body_bytes=2, buffered_bytes=8))
    buffered.add("a", 3)
    assert buffered.refusal("a", 1) is None
    refused = buffered.refusal("a", 2)
    assert refused is not None
    assert (refused.status, refused.reason, refused.retry_after_s) == (429, Reason.TENANT_OVERLOADED, 1)
    buffered.add("b", 4)
    assert buffered.refusal("c", 1) is None
    refused = buffered.refusal("c", 2)
    assert refused is not None
    assert (refused.status, refused.reason, refused.retry_after_s) == (503, Reason.OVERLOADED, 1)
    buffered.remove("b", 4)
    buffered.remove("a", 1)
    assert (buffered.total, buffered.refusal("a", 2), buffered.refusal("b", 4)) == (2, None, None)
    assert Limits(body_bytes=8, buffered_bytes=8).buffered_bytes_per_caller == 8


async def _uploads(world: World, key: str, count: int, size: int) -> list[Connection]:
    connections = [await world.connect() for _ in range(count)]
    for connection in connections:
        before = world.gate.tenant_server.buffered.total
        await connection.send(upload(key, size, size - 1))
        await until(lambda before=before: world.gate.tenant_server.buffered.total == before + size - 1)  # type: ignore[misc]
    return connections


async def test_one_tenants_bodies_take_half_of_the_memory_and_leave_the_rest_to_others(gate: World) -> None:
    shrink_memory(gate, 8000)
    held = await _uploads(gate, ACME, 2, 2000)
    answer = await gate.ask(post("/v1/completions", {"prompt": "a" * 100}))
    assert (answer.status, answer.error["code"]) == (429, "tenant_overloaded")
    assert answer.headers["retry-after"] == "1"
    assert (await gate.ask(post("/v1/completions", {"prompt": "a" * 100}, GLOBEX))).status == 200
    for connection in held:
        connection.close()
    await until(lambda: not gate.gate.tenant_server.buffered.total)
    assert (await gate.ask(post("/v1/completions", {"prompt": "a" * 100}))).status == 200


async def test_bodies_of_all_tenants_together_have_a_bound_too(gate: World) -> None:
    shrink_memory(gate, 8000)
    held = [*await _uploads(gate, ACME, 2, 2000), *await _uploads(gate, GLOBEX, 2, 1990)]
    answer = await gate.ask(post("/v1/completions", {"prompt": "a" * 100}, "key-without-policy"))
    assert (answer.status, answer.error["code"]) == (503, "overloaded")
    for connection in held:
        connection.close()
    await until(lambda: not gate.gate.tenant_server.buffered.total)


async def test_what_waits_for_the_engine_counts_for_its_tenant_until_the_answer_begins(gate: World) -> None:
    release = asyncio.Event()

    async def slow(request, writer):  # type: ignore[no-untyped-def]
        await release.wait()
        await plain_answer(request, writer)

    shrink_memory(gate, 8000)
    gate.engine.handler = slow
    waiting = [await gate.connect() for _ in range(3)]
    for connection in waiting:
        await connection.send(post("/v1/completions", {"prompt": "a" * 1130}))
    await until(lambda: len(gate.engine.requests) == 3)
    assert (await gate.ask(post("/v1/completions", {"prompt": "a" * 1130}))).error["code"] == "tenant_overloaded"
    release.set()
    for connection in waiting:
        assert (await connection.answer()).status == 200
        connection.close()
    assert not gate.gate.tenant_server.buffered.total
    assert (await gate.ask(post("/v1/completions", {"prompt": "a" * 1130}))).status == 200
