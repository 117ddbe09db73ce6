"""Renderings at the operator's port: who may ask, what is answered, and what is told to nobody."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstrata.clients.gate import MAX_WORK_PER_POD, GateClient, GateError, GateFailure
from kvstrata.contract.messages.adapter import TOKEN_BYTES
from kvstrata.contract.messages.pod_state import ACK_TOKEN_HEADER, gate_server_name
from kvstrata.contract.messages.pools import MAX_REQUEST_BYTES, RENDER_PATH, Rendered, RenderRefusal, RenderRequest
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata_sidecar.gate.control import render as rendering
from kvstrata_sidecar.gate.control import render as warming

from . import pki
from .stand_ins import EngineRequest, chat_message, whole
from .tokenizers import Merges
from .world import MODEL, Answer, World, entry, until

SECRET = "the marshal sleeps in the blue tower "
TEXT = PrefixSource(text=SECRET * 4)
CHAT = PrefixSource(chat={"messages": [{"role": "system", "content": SECRET * 4}]})
LIMIT = 2048


class TokenizingEngine:
    """Answers as vLLM does when it is asked for tokens."""

    def __init__(self) -> None:
        self.tokenizer = Merges([("t", "h"), ("th", "e")])
        self.asked: list[dict[str, Any]] = []
        self.status = 200
        self.held = asyncio.Event()
        self.held.set()

    async def __call__(self, request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        self.asked.append({"path": request.path, **request.json})
        await self.held.wait()
        if self.status != 200:
            said = {"error": {"message": f"cannot read {request.json}"}}
            await whole(writer, self.status, json.dumps(said).encode())
            return
        await whole(writer, 200, json.dumps(self.answer(request.path, request.json)).encode())

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/detokenize":
            return {"prompt": self.tokenizer.text(body["tokens"])}
        assert path == "/tokenize"
        text = body["prompt"] if "prompt" in body else chat_text(body)
        ids = self.tokenizer.ids(text)
        return {"count": len(ids), "max_model_len": LIMIT, "tokens": ids}


def chat_text(body: dict[str, Any]) -> str:
    said = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
    return said + ("<assistant>" if body["add_generation_prompt"] else "")


@pytest.fixture
async def pod(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A gate in force whose engine tokenizes, and whose patience between two renderings is none."""
    monkeypatch.setattr(rendering, "PAUSE_S", 0.0)
    world.engine.handler = TokenizingEngine()
    await world.publish([entry("acme")])
    async with world.started(render_id="f" * 16):
        await world.acked(1)
        # When it becomes ready, what was rendered before is forgotten.
        await until(lambda: world.gate.engine_ready)
        yield world


def engine_of(world: World) -> TokenizingEngine:
    assert isinstance(world.engine.handler, TokenizingEngine)
    return world.engine.handler


def posted(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: g\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def say(world: World, data: bytes, context: ssl.SSLContext | None = None) -> Answer:
    connection = await world.connect("control", context or pki.client_context(world.operator_tls, present=True))
    try:
        await connection.send(data)
        return await asyncio.wait_for(connection.answer(), 30)
    finally:
        connection.close()


async def asked(world: World, source: PrefixSource) -> Rendered:
    answer = await say(world, posted(RENDER_PATH, RenderRequest(source).encode()))
    assert answer.status == 200, answer.body
    assert answer.headers[ACK_TOKEN_HEADER.lower()] == "the-pods-token"
    return Rendered.decode(answer.body)


def names_of(world: World, ids: list[int]) -> bytes:
    return world.adapter.named(b"".join(one.to_bytes(TOKEN_BYTES, "little") for one in ids)).hashes


@pytest.mark.parametrize("source", [TEXT, CHAT])
async def test_the_operator_learns_the_names_of_chunks_that_no_continuation_changes(
    pod: World, source: PrefixSource
) -> None:
    made = await asked(pod, source)
    text = (
        source.text if source.text is not None else chat_text({**(source.chat or {}), "add_generation_prompt": False})
    )
    ids = engine_of(pod).tokenizer.ids(text)
    assert (made.total, made.chunk_tokens, made.max_model_tokens) == (len(ids), 16, LIMIT)
    assert 0 < made.tokens < made.total
    assert made.hashes == names_of(pod, ids[: made.tokens])
    assert (made.gate_boot, made.cache_boot, made.render_id) == (pod.gate.boot, "boot-1", "f" * 16)


async def test_the_tokens_go_to_the_adapter_as_they_are_numbered(pod: World) -> None:
    ids = (1, 256, 65_536, *range(29))
    pod.engine.handler = SmallVocabulary()
    made = await asked(pod, PrefixSource(token_ids=ids))
    assert made.hashes == names_of(pod, list(ids))
    assert made.chunks == 2


class SmallVocabulary(TokenizingEngine):
    """Takes tokens up to 65,536."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/completions":
            assert body["max_tokens"] == 1
            assert len(body["prompt"]) == 1
            assert len(body["cache_salt"]) == 32
            return {"choices": []}
        return super().answer(path, body)


async def test_a_prefix_that_is_too_long_says_how_long_it_is(pod: World) -> None:
    made = await asked(pod, PrefixSource(text="x" * LIMIT))
    assert (made.too_long, made.total, made.hashes) == (True, LIMIT, b"")
    assert len(engine_of(pod).asked) == 1


@pytest.mark.parametrize(
    "chat",
    [
        {"messages": [{"role": "system", "content": "x", "uuid": "y"}]},
        {"messages": [{"role": "system", "content": "x"}], "tools": [{"type": "function", "cache_salt": "y"}]},
    ],
)
async def test_what_no_caller_could_send_is_refused_before_the_engine_sees_it(pod: World, chat: dict[str, Any]) -> None:
    made = await asked(pod, PrefixSource(chat=chat))
    assert made.refused is RenderRefusal.SOURCE_REFUSED
    assert engine_of(pod).asked == []


async def test_a_prefix_is_rendered_as_the_engine_gets_it_from_a_caller(pod: World) -> None:
    said = {"role": "system", "content": SECRET * 4}
    source = PrefixSource(chat={"messages": [chat_message(content="x"), {**said, "name": None}]})
    made = await asked(pod, source)
    assert made.hashes
    questions = [question for question in engine_of(pod).asked if question["path"] == "/tokenize"]
    for question in questions:
        assert question["messages"][:2] == [{"role": "assistant", "content": "x"}, said]
    engine_of(pod).asked.clear()
    assert await asked(pod, source) == made
    assert engine_of(pod).asked == [], "it is remembered by what the operator sent"


async def test_what_the_engine_refuses_is_refused(pod: World) -> None:
    engine_of(pod).status = 400
    assert (await asked(pod, TEXT)).refused is RenderRefusal.SOURCE_REFUSED


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_an_engine_that_fails_is_asked_again_later(pod: World, status: int) -> None:
    engine_of(pod).status = status
    answer = await say(pod, posted(RENDER_PATH, RenderRequest(TEXT).encode()))
    assert answer.status == 503
    engine_of(pod).status = 200
    assert (await asked(pod, TEXT)).chunks > 0


async def test_what_was_rendered_is_remembered_for_as_long_as_the_cache_server_lives(pod: World) -> None:
    first = await asked(pod, TEXT)
    engine_of(pod).asked.clear()
    assert await asked(pod, TEXT) == first
    assert engine_of(pod).asked == []
    await pod.adapter.restart("boot-2")
    await until(lambda: pod.gate.enforcement.cache_boot == "boot-2")
    assert (await asked(pod, TEXT)).cache_boot == "boot-2"
    assert engine_of(pod).asked != []


async def test_what_an_engine_rendered_that_went_away_is_rendered_anew(pod: World) -> None:
    await asked(pod, TEXT)
    pod.engine.healthy = False
    await until(lambda: not pod.gate.engine_ready)
    pod.engine.healthy = True
    await until(lambda: pod.gate.engine_ready)
    engine_of(pod).asked.clear()
    await asked(pod, TEXT)
    assert engine_of(pod).asked != []


async def test_what_was_rendered_long_ago_is_rendered_anew(pod: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "KEPT_S", 0.0)
    await asked(pod, TEXT)
    engine_of(pod).asked.clear()
    await asked(pod, TEXT)
    assert engine_of(pod).asked != []


async def test_only_so_many_renderings_are_remembered(pod: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "KEPT", 1)
    for source in (TEXT, CHAT):
        await asked(pod, source)
    assert len(pod.gate.warming._known) == 1


async def test_without_a_cache_server_nothing_is_rendered(pod: World) -> None:
    await pod.adapter.stop()
    await until(lambda: pod.gate.enforcement.cache_boot == "")
    assert (await say(pod, posted(RENDER_PATH, RenderRequest(TEXT).encode()))).status == 503


async def test_one_prefix_is_rendered_at_a_time(pod: World) -> None:
    engine = engine_of(pod)
    engine.held.clear()
    waiting = [asyncio.create_task(asked(pod, source)) for source in (TEXT, CHAT)]
    await until(lambda: engine.asked)
    await asyncio.sleep(0.2)
    assert len(engine.asked) == 1
    engine.held.set()
    assert all(made.chunks for made in await asyncio.gather(*waiting))


async def test_a_caller_that_leaves_ends_the_engines_work(pod: World) -> None:
    engine = engine_of(pod)
    engine.held.clear()
    connection = await pod.connect("control", pki.client_context(pod.operator_tls, present=True))
    await connection.send(posted(RENDER_PATH, RenderRequest(TEXT).encode()))
    await until(lambda: engine.asked)
    connection.writer.transport.abort()
    await until(lambda: not pod.gate.control_server.tasks)
    engine.held.set()
    assert (await asked(pod, CHAT)).chunks > 0, "nothing is locked"


async def test_a_stopping_gate_waits_for_no_rendering(world: World) -> None:
    world.engine.handler = TokenizingEngine()
    engine_of(world).held.clear()
    await world.publish([entry("acme")])
    async with world.started():
        await world.acked(1)
        waiting = asyncio.create_task(asked(world, TEXT))
        await until(lambda: engine_of(world).asked)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)):
        await asyncio.wait_for(waiting, 20)


class TestWhoMayAsk:
    body = RenderRequest(TEXT).encode()

    async def test_another_name_of_the_same_authority_is_refused(self, pod: World) -> None:
        other = pod.authority.issue(pod.directory / "other", "kvstrata-gate", server=False)
        context = pki.client_context(other, present=True)
        assert (await say(pod, posted(RENDER_PATH, self.body), context)).status == 403
        assert engine_of(pod).asked == []

    async def test_a_client_without_certificate_gets_nothing(self, pod: World) -> None:
        context = pki.client_context(pod.operator_tls, present=False)
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await say(pod, posted(RENDER_PATH, self.body), context)

    @pytest.mark.parametrize(("port", "status"), [("http", 404), ("health", 413)])
    async def test_other_ports_do_not_know_the_path(self, pod: World, port: str, status: int) -> None:
        assert (await pod.ask(posted(RENDER_PATH, self.body), port)).status == status
        assert engine_of(pod).asked == []


class TestBounds:
    @pytest.mark.parametrize(
        ("data", "status"),
        [
            (posted(RENDER_PATH, b"{}", "text/plain"), 415),
            (posted(RENDER_PATH, b"{}"), 400),
            (posted(RENDER_PATH, b"["), 400),
            (posted(RENDER_PATH, b'{"contract":9,"prefix":{"text":"x"}}'), 400),
            (posted("/v1/state", b"{}"), 405),
            (posted("/v1/unheard-of", b"{}"), 404),
            (f"GET {RENDER_PATH} HTTP/1.1\r\nHost: g\r\n\r\n".encode(), 405),
            (b"GET /v1/state HTTP/1.1\r\nHost: g\r\nContent-Length: 1\r\n\r\nx", 413),
            (b"GET /v1/state HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413),
        ],
    )
    async def test_what_is_no_question_is_refused(self, pod: World, data: bytes, status: int) -> None:
        assert (await say(pod, data)).status == status

    async def test_a_body_beyond_the_bound_is_refused_by_its_length_alone(self, pod: World) -> None:
        head = f"POST {RENDER_PATH} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {MAX_REQUEST_BYTES + 1}\r\n\r\n".encode()
        assert (await say(pod, data)).status == 413

    async def test_the_largest_text_of_a_pool_is_taken(self, pod: World) -> None:
        largest = PrefixSource(text="\u0001" * 262_144)
        pod.engine.handler = TooLong()
        assert (await asked(pod, largest)).too_long

    async def test_as_many_of_the_largest_as_the_operator_sends_at_a_time_are_taken(self, pod: World) -> None:
        pod.engine.handler = engine = TooLong()
        engine.held.clear()
        texts = [PrefixSource(text=f"{number:06}" + "\u0001" * 262_138) for number in range(MAX_WORK_PER_POD)]
        waiting = [asyncio.create_task(asked(pod, one)) for one in texts]
        await until(lambda: len(pod.gate.control_server.tasks) == MAX_WORK_PER_POD)
        engine.held.set()
        assert all(made.too_long for made in await asyncio.gather(*waiting))


class TooLong(TokenizingEngine):
    """Says of every text that it is long."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/tokenize"
        return {"max_model_len": LIMIT, "tokens": [1] * 131_073}


async def test_no_log_line_and_no_error_holds_text_or_tokens(pod: World, capfd: pytest.CaptureFixture[str]) -> None:
    answers = [await say(pod, posted(RENDER_PATH, RenderRequest(source).encode())) for source in (TEXT, CHAT)]
    for status in (400, 500):
        engine_of(pod).status = status
        unseen = PrefixSource(text=f"{SECRET} {status}" * 4)
        answers.append(await say(pod, posted(RENDER_PATH, RenderRequest(unseen).encode())))
    answers.append(await say(pod, posted(RENDER_PATH, b'{"contract":1,"prefix":{"text":["%s"]}}' % SECRET.encode())))
    told = "".join(capfd.readouterr()) + "".join(answer.body.decode() for answer in answers)
    assert "was rendered" in told
    assert [word for word in ("marshal", "tower") if word in told] == []


async def test_the_same_prefix_has_the_same_names_in_every_pod(pod: World) -> None:
    first = await asked(pod, TEXT)
    pod.gate.warming._known.clear()
    assert hashlib.sha256((await asked(pod, TEXT)).hashes).digest() == hashlib.sha256(first.hashes).digest()


async def test_the_operators_own_client_asks_and_is_answered(pod: World) -> None:
    pem = [(pod.operator_tls / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")]
    async with GateClient(*pem, port=pod.gate.ports["control"]) as gates:
        made, token = await gates.render("127.0.0.1", gate_server_name(MODEL, "ns"), TEXT)
        assert (made, token) == (await asked(pod, TEXT), "the-pods-token")
        with pytest.raises(GateError) as refused:
            await gates.pool("127.0.0.1", gate_server_name(MODEL, "elsewhere"), "uid")
        assert refused.value.reason is GateFailure.TLS_FAILED
