"""Requests at the operator's port that are refused, and waits that end when they should."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from kvstrata.contract.messages.erase import ERASE_PATH
from kvstrata.contract.messages.key_delivery import CONTENT_TYPE, KEYS_PATH
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.messages.pools import POOL_PATH

from . import pki
from .test_control import poll
from .world import Answer, World, until


async def ask(world: World, method: str, path: str, headers: str = "", body: bytes = b"") -> Answer:
    connection = await world.connect("control", pki.client_context(world.operator_tls, present=True))
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: g\r\n{headers}"
        head += f"Content-Length: {len(body)}\r\n" if body or method == "POST" else ""
        await connection.send(f"{head}\r\n".encode() + body)
        return await asyncio.wait_for(connection.answer(), 20)
    finally:
        connection.close()


JSON = "Content-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code", "allow"),
    [
        ("GET", "/v1/elsewhere", "", 404, "not_found", ""),
        ("POST", "/v1/state", JSON, 405, "method", "get"),
        ("GET", ERASE_PATH, "", 405, "method", "post"),
        ("POST", POOL_PATH, JSON, 405, "method", "get"),
        ("PUT", KEYS_PATH, JSON, 405, "method", "get, post"),
        ("POST", ERASE_PATH, "", 415, "encoding", ""),
        ("POST", ERASE_PATH, "Content-Type: text/plain\r\n", 415, "encoding", ""),
        ("POST", ERASE_PATH, f"Content-Type: {CONTENT_TYPE}\r\n", 415, "encoding", ""),
        ("POST", KEYS_PATH, JSON, 415, "encoding", ""),
        ("GET", "/v1/state?after=x", "", 400, "bad_value", ""),
        ("GET", "/v1/state?wait=soon", "", 400, "bad_value", ""),
    ],
)
async def test_a_mistaken_request_is_refused(
    gate: World, method: str, path: str, headers: str, status: int, code: str, allow: str
) -> None:
    answer = await ask(gate, method, path, headers)
    assert (answer.status, answer.error["code"], answer.headers.get("allow", "")) == (status, code, allow)
    assert "kvstrata-ack-token" not in answer.headers


async def test_a_question_has_no_body(gate: World) -> None:
    assert (await ask(gate, "GET", "/v1/state", body=b"{}")).error["code"] == "too_large"
    assert (await ask(gate, "GET", "/v1/state", "Transfer-Encoding: chunked\r\n")).status == 413
    assert (await ask(gate, "GET", "/v1/state", "Content-Length: 0\r\n")).status == 200


async def test_another_caller_is_refused_and_recorded(gate: World) -> None:
    other = gate.authority.issue(gate.directory / "other", "kvstrata-gate", server=False)
    before = gate.gate.audit.events
    connection = await gate.connect("control", pki.client_context(other, present=True))
    await connection.send(b"GET /v1/state HTTP/1.1\r\nHost: g\r\n\r\n")
    answer = await asyncio.wait_for(connection.answer(), 20)
    assert (answer.status, answer.error["code"]) == (403, "unauthenticated")
    assert gate.gate.audit.events == before + 1
    await ask(gate, "GET", "/v1/elsewhere")
    assert gate.gate.audit.events == before + 1, "the operator's own mistakes are not in the audit log"


@pytest.mark.parametrize(
    "query", ["", "?", "?after=1", "?after=1&wait=0", "?after=1&wait=-5", "?wait=60", "?after=0&wait=60"]
)
async def test_a_question_is_answered_at_once(gate: World, query: str) -> None:
    begun = time.monotonic()
    answer = await ask(gate, "GET", f"/v1/state{query}")
    assert answer.status == 200
    assert PodState.decode(answer.body).acked == 1
    assert answer.headers["etag"].startswith('"')
    assert time.monotonic() - begun < 20


async def test_a_wait_without_news_lasts_until_its_end(gate: World) -> None:
    first = await poll(gate, 0, 0)
    begun = time.monotonic()
    second = await poll(gate, 1, 2.5, tag=first.headers["etag"])
    assert 2.4 < time.monotonic() - begun < 20
    assert second.headers["etag"] == first.headers["etag"]


async def test_every_waiting_question_gets_the_same_news(gate: World) -> None:
    waiting = [asyncio.create_task(poll(gate, 1, 60)) for _ in range(2)]
    await until(lambda: len(gate.gate.control._polls) == 2)
    gate.adapter.breaker = "open"
    answers = [await asyncio.wait_for(one, 20) for one in waiting]
    assert {PodState.decode(answer.body).tiers[0].breaker for answer in answers} == {"open"}
    assert not gate.gate.control._polls


async def test_a_caller_that_leaves_is_not_waited_for(gate: World) -> None:
    connection = await gate.connect("control", pki.client_context(gate.operator_tls, present=True))
    await connection.send(b"GET /v1/state?after=1&wait=60 HTTP/1.1\r\nHost: g\r\n\r\n")
    await until(lambda: gate.gate.control._polls)
    connection.close()
    await until(lambda: not gate.gate.control._polls)


async def test_news_that_comes_without_an_event_is_told_within_seconds(gate: World) -> None:
    waiting = asyncio.create_task(poll(gate, 1, 60))
    await until(lambda: gate.gate.control._polls)
    gate.gate.keys.problem = "the Secret is gone"
    answer = await asyncio.wait_for(waiting, 20)
    assert "the Secret is gone" in json.loads(answer.body)["problem"]
