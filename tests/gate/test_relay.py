"""Metrics of engine and LMCache on the gate's page: under their names, without salts, and never at a request's cost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kvstrata_sidecar.gate import relay
from kvstrata_sidecar.gate.relay import CACHE_NAMES, ENGINE_NAMES, relayed
from tests.support.metrics_page import families, series

from .stand_ins import EngineRequest, chunk, whole
from .world import World, chat, keyspace, post

ENGINE = b"""\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3"} 1.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1.2345678e+07
# TYPE kvstrata_gate_api_keys gauge
kvstrata_gate_api_keys 99
"""
CACHE = b"""\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3"} 1.0
# HELP lmcache_mp_lookups_requests_total Completed lookups.
# TYPE lmcache_mp_lookups_requests_total counter
lmcache_mp_lookups_requests_total{model_name="tiny"} 7.0
"""


async def engine_page(_: EngineRequest, writer: asyncio.StreamWriter) -> None:
    """As uvicorn answers: in chunks."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n")
    await chunk(writer, ENGINE[:100])
    await chunk(writer, ENGINE[100:])
    await chunk(writer, b"")


@contextlib.asynccontextmanager
async def cache_server(page: bytes) -> AsyncIterator[int]:
    """The port of a server with this page; the real one is in tests/dataplane."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                await whole(writer, 200, page)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_one_page_has_the_metrics_of_gate_engine_and_cache_server_under_their_names(world: World) -> None:
    world.engine.page = engine_page
    await world.engine.start()
    async with cache_server(CACHE) as port, world.started(cache_http_port=port):
        page = (await world.get("/metrics")).body.decode()
    reported = series(page)
    assert reported['vllm:num_requests_waiting{engine="0",model_name="tiny"}'] == 3
    assert reported['vllm:prompt_tokens_total{engine="0",model_name="tiny"}'] == 12_345_678
    assert reported['lmcache_mp_lookups_requests_total{model_name="tiny"}'] == 7
    assert reported['python_info{implementation="CPython",major="3"}'] == 1
    assert reported["kvstrata_gate_api_keys"] != 99, "only the gate's own page may say this"
    assert {source: reported[f'kvstrata_gate_relay_up{{source="{source}"}}'] for source in ("engine", "cache")} == {
        "engine": 1, "cache": 1,
    }  # fmt: skip
    await world.engine.stop()


async def test_callers_find_no_page_of_engine_or_cache_server(gate: World) -> None:
    gate.engine.page = engine_page
    for path in ("/metrics", "/metrics/", "/v1/metrics", "//metrics", "/load"):
        answer = await gate.get(path, "http")
        assert (answer.status, answer.error["code"]) == (404, "not_found"), path


async def test_a_server_that_is_away_leaves_the_rest_of_the_page(gate: World) -> None:
    reported = series((await gate.get("/metrics")).body.decode())
    assert reported['kvstrata_gate_relay_up{source="engine"}'] == 0
    assert reported['kvstrata_gate_relay_up{source="cache"}'] == 0
    assert reported["kvstrata_gate_engine_ready"] == 1


async def test_no_request_waits_for_a_page(gate: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answering = asyncio.Event(), asyncio.Event()

    async def late(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await answering.wait()
        await engine_page(request, writer)

    monkeypatch.setattr(relay, "DEADLINE_S", 60.0)
    gate.engine.page = late
    await asyncio.sleep(relay.FRESH_S + 0.05)
    scrape = asyncio.create_task(gate.get("/metrics"))
    await asked.wait()
    answer = await gate.ask(post("/v1/chat/completions", chat()))
    assert (answer.status, scrape.done()) == (200, False)
    answering.set()
    assert series((await scrape).body.decode())['kvstrata_gate_relay_up{source="engine"}'] == 1


async def test_a_page_that_does_not_come_costs_its_deadline(gate: World, monkeypatch: pytest.MonkeyPatch) -> None:
    never = asyncio.Event()

    async def hang(_: EngineRequest, __: asyncio.StreamWriter) -> None:
        await never.wait()

    monkeypatch.setattr(relay, "DEADLINE_S", 0.1)
    gate.engine.page = hang
    await asyncio.sleep(relay.FRESH_S + 0.05)
    assert series((await gate.get("/metrics")).body.decode())['kvstrata_gate_relay_up{source="engine"}'] == 0


async def test_a_page_beyond_the_bound_is_not_relayed(gate: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.engine.page = engine_page
    monkeypatch.setattr(relay, "MAX_PAGE_BYTES", len(ENGINE) - 1)
    await asyncio.sleep(relay.FRESH_S + 0.05)
    page = (await gate.get("/metrics")).body
    assert b'kvstrata_gate_relay_up{source="engine"} 0' in page
    assert b"vllm:" not in page


async def test_scrapes_that_come_together_share_one_fetch(gate: World) -> None:
    fetched = []

    async def count(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        fetched.append(request.path)
        await asyncio.sleep(0.05)
        await engine_page(request, writer)

    await asyncio.sleep(relay.FRESH_S + 0.05)
    gate.engine.page = count
    pages = await asyncio.gather(*(gate.get("/metrics") for _ in range(5)))
    assert len(fetched) == 1
    assert all(b"vllm:num_requests_waiting" in page.body for page in pages)


async def test_a_scraper_that_leaves_ends_no_other_scrape(gate: World) -> None:
    arrived = asyncio.Event()

    async def slow(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await asyncio.sleep(0.2)
        await engine_page(request, writer)

    await asyncio.sleep(relay.FRESH_S + 0.05)
    gate.engine.page = slow
    leaving = await gate.connect("health")
    await leaving.send(b"GET /metrics HTTP/1.1\r\nHost: gate\r\n\r\n")
    await arrived.wait()
    staying = asyncio.create_task(gate.get("/metrics"))
    leaving.close()
    assert b"vllm:num_requests_waiting" in (await staying).body


def test_no_line_with_a_salt_is_relayed_under_any_label() -> None:
    salt = keyspace("acme")
    page = (
        CACHE
        + f'lmcache_mp_lookups_requests_total{{cache_salt="{salt}",model_name="tiny"}} 1.0\n'
        'lmcache_mp_lookups_requests_total{cache_salt="short",model_name="tiny"} 1.0\n'
        f'lmcache_mp_lookups_requests_total{{model_name="tiny",scope="of {salt}"}} 1.0\n'.encode()
    )
    kept, left_out = relayed(page, CACHE_NAMES)
    assert left_out == 3
    assert list(families(kept.decode())) == ["lmcache_mp_lookups_requests_total"]
    assert (salt.encode() in kept, b"cache_salt" in kept) == (False, False)
    assert series(kept.decode()) == {'lmcache_mp_lookups_requests_total{model_name="tiny"}': 7}


def test_a_page_without_an_end_of_line_is_relayed_whole_and_rubbish_is_not() -> None:
    assert relayed(b'vllm:a{x="1"} 1\nvllm:b 2', ENGINE_NAMES) == (b'vllm:a{x="1"} 1\nvllm:b 2\n', 0)
    assert relayed(b"<html>\x00\xff vllm:a 1\n", ENGINE_NAMES) == (b"", 0)
