"""Parsing of bodies: its CPU time is shared between tenants, and large bodies do not stop the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Iterator

import pytest

from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.proxy import bodies, parser_pool
from kvstrata_sidecar.gate.proxy.parser_pool import BURST_S, INLINE_BYTES, INLINE_S, REFILL, CpuShares, ParserPool
from kvstrata_sidecar.gate.proxy.parsing import ParsedBody

from .world import GLOBEX, World, chat, entry, keyspace, post, until

LARGE = chat("a" * (INLINE_BYTES + 1))
LARGE_REQUEST = post("/v1/chat/completions", LARGE)
SMALL = post("/v1/completions", {"prompt": "a"})
SLOW = b'{"prompt":[1.1' + b",1.1e1" * 300_000 + b"]}"
"""Two megabytes that take the slower of the two parsers 0.1 s, and are refused then."""


@contextlib.asynccontextmanager
async def parsers() -> AsyncIterator[ParserPool]:
    pool = ParserPool("tiny", 8 * 2**20, asyncio.get_running_loop())
    try:
        yield pool
    finally:
        await pool.close()


def submit(pool: ParserPool, tenant: str, data: bytes) -> asyncio.Future[ParsedBody]:
    result = pool.parse(tenant, bodies.COMPLETIONS, bytearray(data))
    assert isinstance(result, asyncio.Future)
    return result


async def parser_of(world: World) -> int:
    """Have a parser process started, and return its id."""
    assert (await world.ask(LARGE_REQUEST)).status == 200
    (worker,) = world.gate.parser._idle
    return worker.process.pid


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Hold a parser process up while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def longest_pause_s(work: Awaitable[object]) -> float:
    """Return the longest CPU time of this thread between two looks at it while `work` runs."""
    task = asyncio.ensure_future(work)
    longest_s = 0.0
    while not task.done():
        begun_s = time.thread_time()
        await asyncio.sleep(0.002)
        longest_s = max(longest_s, time.thread_time() - begun_s)
    await task
    return longest_s


async def test_large_body_reaches_the_engine_as_a_small_one_does(gate: World) -> None:
    answer = await gate.ask(post("/v1/chat/completions", LARGE | {"stream": True, "user": "u"}))
    assert answer.status == 200
    assert b"usage" not in answer.body  # asked for by the gate only
    assert gate.engine.requests[-1].json == {
        **LARGE, "stream": True, "stream_options": {"include_usage": True}, "model": "tiny",
        "cache_salt": keyspace("acme"),
    }  # fmt: skip
    assert gate.gate.parser._idle


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"cache_salt": "x"}, 400, "forbidden_key", "cache_salt"),
        ({"model": "other"}, 404, "model_not_found", "model"),
    ],
)
async def test_refusal_of_a_large_body_names_its_reason_and_keeps_the_connection(
    gate: World, fields: dict[str, object], status: int, code: str, param: str
) -> None:
    connection = await gate.connect()
    await connection.send(post("/v1/chat/completions", LARGE | fields))
    answer = await connection.answer()
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param)
    assert not gate.engine.requests
    await connection.send(SMALL)
    assert (await connection.answer()).status == 200
    connection.close()
    assert gate.gate.tenants.in_flight == gate.gate.tenant_server.buffered.total == 0


async def test_loop_does_not_stop_for_the_worst_bodies(gate: World) -> None:
    async def ask() -> None:
        answer = await gate.ask(post("/v1/completions", SLOW))
        assert (answer.status, answer.error["code"]) == (400, "bad_value")

    # The client and the engine stand-in share this loop, so the bound is not that of the benchmark.
    assert await longest_pause_s(ask()) < 0.05
    (used_s, _) = gate.gate.parser.shares._used["acme"]
    assert used_s > 0.05  # though it was refused


async def test_salt_is_decided_after_parsing(gate: World) -> None:
    with stopped(await parser_of(gate)):
        asking = asyncio.create_task(gate.ask(LARGE_REQUEST))
        await until(lambda: gate.gate.tenants.parsing)
        await gate.acked(await gate.publish([entry("acme", "rolled"), entry("globex")]))
    assert (await asking).status == 200
    assert [request.json["cache_salt"] for request in gate.engine.requests] == [keyspace("acme"), keyspace("rolled")]


async def test_caller_that_leaves_while_its_body_is_parsed_leaves_nothing_behind(gate: World) -> None:
    with stopped(await parser_of(gate)):
        connections = [await gate.connect() for _ in range(2)]  # one in work, one that waits
        for connection in connections:
            await connection.send(LARGE_REQUEST)
        await until(lambda: gate.gate.tenants.in_flight == 2)
        for connection in connections:
            connection.close()
        await until(lambda: gate.gate.tenants.in_flight == gate.gate.tenant_server.buffered.total == 0)
        assert not gate.gate.parser._waiting
    assert (await gate.ask(LARGE_REQUEST)).status == 200
    assert len(gate.engine.requests) == 2
    assert b'path="/v1/chat/completions",code="499"} 2' in (await gate.get("/metrics")).body


async def test_bodies_in_parsing_count_as_in_flight(world: World) -> None:
    revision = await world.publish([entry("acme"), entry("globex")])
    async with world.started(max_in_flight_per_tenant=1, max_in_flight=2, shutdown_s=20.0):
        await world.acked(revision)
        await until(lambda: not world.gate.not_ready() and len(world.gate.keys.ring) == 3)
        with stopped(await parser_of(world)):
            asking = asyncio.create_task(world.ask(LARGE_REQUEST))
            await until(lambda: world.gate.tenants.in_flight == 1)
            assert (await world.ask(SMALL)).error["code"] == "tenant_overloaded"
            assert (await world.ask(post("/v1/completions", {"prompt": "a"}, GLOBEX))).status == 200
            world.gate.stop()  # waits for it
            await asyncio.sleep(0.3)
            assert not asking.done()
        assert (await asking).status == 200


async def test_parser_that_dies_fails_one_request_and_is_replaced(gate: World) -> None:
    pid = await parser_of(gate)
    os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(gate.ask(LARGE_REQUEST))
    await until(lambda: gate.gate.tenants.parsing)
    os.kill(pid, signal.SIGKILL)
    answer = await asking
    assert (answer.status, answer.error["code"]) == (503, "parsing")
    gate.gate.parser.shares.charge("acme", -gate.gate.parser.shares.used_s("acme"))
    assert await parser_of(gate) != pid


async def test_body_that_needs_too_much_memory_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_pool, "_WORKER_BYTES_PER_BODY_BYTE", 0)
    async with parsers() as pool:
        with pytest.raises(Refusal, match="too much memory") as refused:
            await submit(pool, "a", b'{"prompt": "' + "\U0001f600".encode() * 1_000_000 + b'"}')
        assert (refused.value.status, refused.value.reason) == (400, Reason.TOO_LARGE)


async def test_tenants_take_turns_and_a_tenant_has_one_body_in_work(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": "a" * INLINE_BYTES}).encode()
    order: list[str] = []
    async with parsers() as pool:
        results = [submit(pool, tenant, body) for tenant in "aaab"]
        assert pool._in_work == {"a", "b"}
        await asyncio.gather(*results)
        monkeypatch.setattr(parser_pool, "WORKERS", 1)
        for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
            submit(pool, name[0], body).add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
        await until(lambda: len(order) == 6)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_tenant_that_used_its_time_on_the_loop_is_parsed_elsewhere(gate: World) -> None:
    assert (await gate.ask(SMALL)).status == 200
    assert not gate.gate.parser._idle
    gate.gate.parser._inline.charge("acme", INLINE_S + REFILL * 60)
    assert (await gate.ask(SMALL)).status == 200
    assert gate.gate.parser._idle


async def test_tenant_that_used_up_its_share_is_refused_before_it_sends_a_body(gate: World) -> None:
    gate.gate.parser.shares.charge("acme", BURST_S + REFILL * 60)
    connection = await gate.connect()
    await connection.send(LARGE_REQUEST[: LARGE_REQUEST.index(b"\r\n\r\n") + 4])
    answer = await connection.answer()
    connection.close()
    assert (answer.status, answer.error["code"]) == (429, "parsing")
    assert 50 <= int(answer.headers["retry-after"]) <= 60
    assert (await gate.ask(post("/v1/completions", {"prompt": "a"}, GLOBEX))).status == 200


async def test_unknown_key_costs_no_parsing(gate: World) -> None:
    answer = await gate.ask(post("/v1/chat/completions", LARGE, "unknown"))
    assert (answer.status, answer.headers["connection"]) == (401, "close")
    parser = gate.gate.parser
    assert (parser._idle, parser._tasks, parser.shares._used) == ([], set(), {})


def test_share_refills_and_a_single_body_fits_whatever_its_size() -> None:
    now_s = 0.0
    shares = CpuShares(lambda: now_s)
    shares.require("a", 100 * BURST_S)
    shares.charge("a", 0.75 * BURST_S)
    shares.require("a", 0.25 * BURST_S)
    shares.require("b", BURST_S)
    with pytest.raises(Refusal) as refused:
        shares.require("a", 0.5 * BURST_S)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    now_s = 0.75 * BURST_S / REFILL
    shares.require("a", BURST_S)
    shares.charge("a", -1.0)
    assert shares.used_s("a") == 0.0
