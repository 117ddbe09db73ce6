"""Bounds of half-open handshakes, of all connections and of one peer's."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.messages.pod_state import gate_server_name
from kvstrata.objects import sizing
from kvstrata_sidecar.gate.http import listener

from .pki import client_context
from .stand_ins import EngineRequest, plain_answer
from .world import MODEL, Answer, Connection, World, entry, post, until

ASK = post("/v1/completions", {"prompt": "a"})
HALF_OPEN = 10_000
CLIENT_HELLO_START = b"\x16\x03\x01\x02\x00\x01\x00"


@contextlib.asynccontextmanager
async def ready(world: World, **changes: Any) -> AsyncIterator[World]:
    revision = await world.publish([entry("acme")])
    async with world.started(**changes):
        await world.acked(revision)
        await until(lambda: len(world.gate.keys.ring) == 3)
        yield world


@contextlib.contextmanager
def open_sockets(port: int, count: int, address: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            plain = stack.enter_context(socket.socket())
            plain.bind((address, 0))
            plain.connect(("127.0.0.1", port))
            plain.setblocking(False)
            opened.append(plain)
        yield opened


def is_closed(plain: socket.socket) -> bool:
    try:
        return plain.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def ask_over_tls(port: int, tls: Path) -> Answer:
    context = client_context(tls, present=False)
    connection = Connection(
        *await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=gate_server_name(MODEL, "ns"))
    )
    try:
        await connection.send(ASK)
        return await asyncio.wait_for(connection.answer(), 20)
    finally:
        connection.close()


async def turned_away(world: World) -> dict[str, int]:
    page = (await world.get("/metrics")).body.decode()
    name = "kvstrata_gate_connections_turned_away_total{reason="
    lines = [line.removeprefix(name) for line in page.splitlines() if line.startswith(name)]
    return {reason.strip('"'): int(count) for reason, count in (line.split("} ") for line in lines)}


async def test_at_the_bound_only_a_request_ends_an_idle_callers_connection(world: World) -> None:
    async with ready(world, max_connections=1):
        server, port = world.gate.tenant_server, world.gate.ports["https"]
        idle = await world.connect()
        await idle.send(ASK)
        assert (await idle.answer()).status == 200
        silent = await world.connect("https", client_context(world.gate_tls, present=False))
        with open_sockets(port, 3):
            assert await world.gate.own_port.try_now(("127.0.0.1", port), world.gate._certificates["https"])
            await until(lambda: len(server.opening) == 4)
            assert b"kvstrata_gate_connections 5" in (await world.get("/metrics")).body
            assert await turned_away(world) == {"connections": 0, "address": 0, "handshakes": 0}
            await idle.send(ASK)
            assert (await idle.answer()).status == 200
            assert (await ask_over_tls(port, world.gate_tls)).status == 200
            assert await idle.closed()
        assert await turned_away(world) == {"connections": 1, "address": 0, "handshakes": 0}
        (waiting,) = server.opening
        waiting.deadline = 0.0
        assert await silent.closed()
        await until(lambda: not server.connections and not server.opening)
        assert not server._by_address.total


async def test_a_caller_that_waited_is_turned_away_once_it_asks_and_all_others_serve(world: World) -> None:
    release = asyncio.Event()

    async def slow(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await plain_answer(request, writer)

    world.engine.handler = slow
    async with ready(world, max_connections=1):
        served = await world.connect()
        await until(lambda: world.gate.tenant_server.connections)
        waiting = await world.connect()
        await until(lambda: world.gate.tenant_server.opening)
        await served.send(ASK)
        await until(lambda: world.engine.requests)
        await waiting.send(ASK)
        assert (await waiting.answer()).error["code"] == "too_many_connections"
        release.set()
        assert (await served.answer()).status == 200
        assert await waiting.closed()
        served.close()


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::"), ("2001:db8:0:1::9", "2001:db8:0:1::"), ("fe80::1%eth0", "fe80::"),
        ("::1", "::"), ("::ffff:192.0.2.1", "::ffff:192.0.2.1"), ("192.0.2.1", "192.0.2.1"),
    ],
)  # fmt: skip
def test_a_peer_of_ipv6_is_its_network(address: str, peer: str) -> None:
    assert listener.peer_of(address) == peer


async def test_addresses_of_one_network_of_ipv6_have_one_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class FromNetworks:
        """A listening socket whose first three callers have addresses of one network, and the next ones of another."""

        def __init__(self, real: socket.socket) -> None:
            self.real, self.accepted = real, 0

        def accept(self) -> Any:
            accepted, (_, port) = self.real.accept()
            self.accepted += 1
            return accepted, (f"2001:db8:0:{(self.accepted + 2) // 3}::{self.accepted}", port, 0, 0)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    async with ready(world, max_connections_per_address=2):
        server = world.gate.tenant_server
        (found,) = [one for one in server._listeners if one.port == world.gate.ports["http"]]
        found._socket = FromNetworks(found._socket)  # type: ignore[assignment]
        callers = [await world.connect() for _ in range(4)]
        await until(lambda: len(server.connections) == 3)
        assert [server._by_address.of(f"2001:db8:0:{network}::") for network in (1, 2)] == [2, 1]
        await callers[2].send(ASK)
        assert (await callers[2].answer()).status == 200
        assert server.turned_away["address"] == 1
        for caller in callers:
            caller.close()


async def test_beyond_the_bound_of_handshakes_the_oldest_of_the_busiest_address_ends(world: World) -> None:
    async with ready(world, max_handshakes=4):
        server, port = world.gate.tenant_server, world.gate.ports["https"]
        with open_sockets(port, 1, "127.0.0.2") as (other,), open_sockets(port, 3) as held:
            await until(lambda: len(server.opening) == 4)
            with open_sockets(port, 2) as newer:
                await until(lambda: server.turned_away["handshakes"] == 2)
                await until(lambda: is_closed(held[1]))
                assert [is_closed(plain) for plain in (other, *held, *newer)] == [False, True, True, *[False] * 3]
                assert (await ask_over_tls(port, world.gate_tls)).status == 200
        await until(lambda: not server.opening)
        assert await turned_away(world) == {"connections": 0, "address": 0, "handshakes": 3}


async def test_a_half_open_handshake_ends_in_time(world: World) -> None:
    async with ready(world):
        server = world.gate.tenant_server
        with open_sockets(world.gate.ports["https"], 1) as (held,):
            await until(lambda: server.opening)
            (connection,) = server.opening
            assert connection.deadline <= asyncio.get_running_loop().time() + server.limits.head_s
            connection.deadline = 0.0
            await until(lambda: not server.opening)
            await until(lambda: is_closed(held))


async def asked(address: str, port: int) -> int:
    connection = Connection(*await asyncio.open_connection(address, port))
    await connection.send(ASK)
    try:
        return (await asyncio.wait_for(connection.answer(), 20)).status
    finally:
        connection.close()


@pytest.mark.parametrize("has_ipv6", [True, False])
async def test_a_gate_listens_on_both_families_where_the_host_has_them(
    world: World, monkeypatch: pytest.MonkeyPatch, has_ipv6: bool
) -> None:
    if has_ipv6 and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    if not has_ipv6:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    async with ready(world, bind="::"):
        port = world.gate.ports["http"]
        assert await asked("127.0.0.1", port) == 200
        if has_ipv6:
            assert await asked("::1", port) == 200
        else:
            with pytest.raises(OSError):  # noqa: PT011
                await asked("::1", port)


async def test_a_handshake_that_fails_leaves_nothing(world: World) -> None:
    async with ready(world):
        server = world.gate.tenant_server
        plain = await world.connect("https")
        await plain.send(b"GET / HTTP/1.1\r\n\r\n")
        await plain.reader.read()
        await until(lambda: not server.connections)
        assert not server.opening
        assert not server._by_address.total


async def test_at_its_bound_an_address_loses_a_connection_of_its_own(world: World) -> None:
    async with ready(world, max_connections_per_address=2):
        server, port = world.gate.tenant_server, world.gate.ports["http"]
        with open_sockets(port, 1, "127.0.0.2") as (other,), open_sockets(port, 2) as held:
            await until(lambda: len(server.connections) == 3)
            assert (await world.ask(ASK)).status == 200
            assert [is_closed(other), sum(map(is_closed, held))] == [False, 1]
        assert await turned_away(world) == {"connections": 0, "address": 1, "handshakes": 0}
        assert b'kvstrata_gate_refusals_total{reason="too_many_connections"} 1' in (await world.get("/metrics")).body


@pytest.mark.parametrize("port", ["http", "https"])
async def test_an_address_whose_connections_all_serve_is_turned_away_and_others_are_not(
    world: World, port: str
) -> None:
    release = asyncio.Event()

    async def slow(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await plain_answer(request, writer)

    world.engine.handler = slow
    async with ready(world, max_connections_per_address=1):
        served = await world.connect()
        await served.send(ASK)
        await until(lambda: world.engine.requests)
        context = client_context(world.gate_tls, present=False) if port == "https" else None
        refused = await world.connect(port, context)
        answer = await refused.answer()
        assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
        assert await refused.closed()
        refused.close()
        await until(lambda: not world.gate.tenant_server.opening)
        release.set()
        assert (await served.answer()).status == 200
        served.close()


async def test_a_lack_of_file_descriptors_pauses_accepting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        def __init__(self, real: socket.socket) -> None:
            self.real, self.left = real, 1

        def accept(self) -> Any:
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return self.real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    monkeypatch.setattr(listener, "_PAUSE_S", 0.05)
    async with ready(world):
        (found,) = [one for one in world.gate.tenant_server._listeners if one.port == world.gate.ports["http"]]
        found._socket = Exhausted(found._socket)  # type: ignore[assignment]
        assert (await world.ask(ASK)).status == 200
        assert not found._socket.left  # type: ignore[attr-defined]


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = HALF_OPEN + 2000
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"a process may open {hard} files, and {needed} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def gate_process(world: World) -> AsyncIterator[tuple[int, dict[str, int]]]:
    """Run a gate in its own process; yields its process id and ports."""
    settings = world.settings(http_port=-1)
    flags = [f"--{field.name.replace('_', '-')}={getattr(settings, field.name)}" for field in fields(settings)]
    run = "from kvstrata_sidecar.gate.main import main; main()"
    log = world.directory / "log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", run, *flags,
            env={"PYTHONPATH": os.pathsep.join(sys.path)}, stdout=asyncio.subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
    try:
        await until(lambda: '"the gate listens"' in log.read_text())
        await until(lambda: '"a policy revision is acknowledged"' in log.read_text())
        (line,) = [line for line in log.read_text().splitlines() if '"the gate listens"' in line]
        yield process.pid, json.loads(line)["ports"]
    finally:
        process.terminate()
        await process.wait()


async def health(port: int, path: str) -> Answer:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    await connection.send(f"GET {path} HTTP/1.1\r\nHost: gate\r\n\r\n".encode())
    try:
        return await connection.answer()
    finally:
        connection.close()


def resident_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@pytest.mark.usefixtures("many_files")
async def test_ten_thousand_half_open_handshakes_leave_a_gate_within_its_memory_and_serving(world: World) -> None:
    await world.publish([entry("acme")])
    loop, served = asyncio.get_running_loop(), 0
    async with gate_process(world) as (pid, ports):
        with contextlib.ExitStack() as stack:
            for number in range(HALF_OPEN):
                plain = stack.enter_context(socket.socket())
                plain.setblocking(False)
                async with asyncio.timeout(60):
                    await loop.sock_connect(plain, ("127.0.0.1", ports["https"]))
                    if number % 2:
                        with contextlib.suppress(ConnectionError):
                            await loop.sock_sendall(plain, CLIENT_HELLO_START)
                if number % 1000 == 999:
                    assert (await ask_over_tls(ports["https"], world.gate_tls)).status == 200
                    served += 1
            page = (await health(ports["health"], "/metrics")).body.decode()
            held = next(line for line in page.splitlines() if line.startswith("kvstrata_gate_connections "))
            assert int(held.split()[1]) <= 256 + 1
            assert len(os.listdir(f"/proc/{pid}/fd")) < 600
        peak_bytes = resident_bytes(pid)
    print(f"peak resident set: {peak_bytes / 2**20:.0f} MiB")
    assert served == HALF_OPEN // 1000
    assert peak_bytes < sizing.GATE_LIMIT_BYTES // 2
