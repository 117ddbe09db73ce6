"""Ordinary clients' HTTP: upgrades, absolute form, browsers, model lookups, trace context, Anthropic's errors."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from urllib.parse import quote

import pytest

from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.rate import RateLimit

from .stand_ins import EngineRequest, event, stream_head, whole
from .world import ACME, NOBODY, Answer, World, chat, entry, keyspace, post, until

CHAT = "/v1/chat/completions"
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
ORIGIN = "https://chat.example.com"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@asynccontextmanager
async def ready(world: World, **changes: str) -> AsyncIterator[World]:
    revision = await world.publish([entry("acme")])
    async with world.started(**changes):
        await world.acked(revision)
        await until(lambda: len(world.gate.keys.ring) == 3)
        yield world


def get(path: str, extra: str = "", host: str = "Host: gate\r\n") -> bytes:
    return f"GET {path} HTTP/1.1\r\n{host}Authorization: Bearer {ACME}\r\n{extra}\r\n".encode()


def chunked(extra: str, *pieces: bytes) -> bytes:
    head = post(CHAT, b"", extra=f"{extra}Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b"")
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))


@pytest.mark.parametrize(
    "extra",
    [
        H2C,
        "Connection: Upgrade\r\nUpgrade: websocket\r\n",
        "Upgrade: h2c\r\n",
        "Connection: upgrade\r\nUpgrade: TLS/1.2\r\n",
    ],
    ids=["h2c", "websocket", "without connection", "tls"],
)
@pytest.mark.parametrize("split", [0, 1, 40, 5000])
async def test_an_upgrade_is_ignored(gate: World, extra: str, split: int) -> None:
    """`split` bytes of the body come with the head, the rest later; the connection stays usable."""
    connection = await gate.connect()
    for number in range(2):
        request = post(CHAT, chat("x" * 3000 + str(number)), extra=extra)
        head = request.index(b"\r\n\r\n") + 4
        await connection.send(request[: head + split])
        await asyncio.sleep(0.02)
        await connection.send(request[head + split :])
        answer = await connection.answer()
        assert answer.status == 200, answer.body
        assert "upgrade" not in answer.headers
        assert gate.engine.requests[-1].json["messages"][0]["content"] == "x" * 3000 + str(number)
    for request in (get("/v1/models", extra), chunked(extra, b'{"messages":[{"role":"user",', b'"content":"y"}]}')):
        await connection.send(request)
        assert (await connection.answer()).status == 200
    assert gate.engine.requests[-1].json["messages"] == [{"role": "user", "content": "y"}]
    await connection.send(post(CHAT, chat()))
    assert (await connection.answer()).status == 200
    connection.close()


async def test_an_upgrade_may_wait_for_100_continue(gate: World) -> None:
    data = json.dumps(chat()).encode()
    connection = await gate.connect()
    await connection.send(post(CHAT, data, extra=f"{H2C}Expect: 100-continue\r\n")[: -len(data)])
    assert (await connection.head())[0] == 100
    await connection.send(data)
    assert (await connection.answer()).status == 200
    connection.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_with_http2_is_served(gate: World) -> None:
    url = f"http://127.0.0.1:{gate.gate.ports['http']}{CHAT}"
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--http2", "-m", "20", "-w", "%{http_code}", "-H", f"Authorization: Bearer {ACME}",
        "-H", "Content-Type: application/json", "-d", json.dumps(chat()), url, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert output.endswith(b"200")


@pytest.mark.parametrize("target", ["http://gate", "HTTP://gate:8080", "https://[::1]:8443", "http://gate.demo.svc"])
async def test_the_absolute_form_is_served(gate: World, target: str) -> None:
    assert (await gate.ask(post(target + CHAT, chat()))).status == 200
    assert gate.engine.requests[-1].path == CHAT
    assert (await gate.ask(get(f"{target}/v1/models?limit=5"))).status == 200
    assert (await gate.ask(get(target))).status == 404


@pytest.mark.parametrize(
    "host", ["Host: gate\r\n", "Host: [::1]:8443\r\n", "Host:\r\n", "host: gate.demo.svc:8443\r\n"]
)
async def test_a_host_is_any_valid_one(gate: World, host: str) -> None:
    assert (await gate.ask(get("/v1/models", host=host))).status == 200


@pytest.mark.parametrize("host", ["", "Host: a\r\nHost: a\r\n", "Host: a/b\r\n", "Host: u@a\r\n"])
async def test_a_request_without_one_valid_host_is_refused(gate: World, host: str) -> None:
    answer = await gate.ask(get("/v1/models", host=host))
    assert (answer.status, answer.error["code"]) == (400, "malformed_http")


async def test_the_model_list_has_the_engines_context_and_time(gate: World) -> None:
    (listed,) = (await gate.ask(get("/v1/models"))).json["data"]
    assert (listed["id"], listed["max_model_len"], listed["created"]) == ("tiny", 2048, 1_700_000_000)


@pytest.mark.parametrize(
    "models", [{}, [], {"data": []}, {"data": ["x"]}, {"data": [{"max_model_len": "x", "created": None}]}]
)
async def test_an_engine_without_facts_is_described_without_them(world: World, models: object) -> None:
    world.engine.models = models
    async with ready(world):
        (listed,) = (await world.ask(get("/v1/models"))).json["data"]
        assert listed.keys() == {"id", "object", "created", "owned_by"}
        assert abs(listed["created"] - time.time()) < 600


async def test_a_model_is_looked_up_by_its_id(world: World) -> None:
    async with ready(world, served_model="meta-llama/Llama-3.1-8B"):
        (listed,) = (await world.ask(get("/v1/models"))).json["data"]
        for path in (
            listed["id"],
            quote(listed["id"], safe=""),
            "meta-llama%2fLlama-3.1-8B",
            "meta%2Dllama/Llama-3.1-8B",
        ):
            answer = await world.ask(get(f"/v1/models/{path}"))
            assert (answer.status, answer.json) == (200, listed)
        for path in ("other", "", "meta-llama", "%ff", "meta-llama%252FLlama-3.1-8B"):
            answer = await world.ask(get(f"/v1/models/{path}"))
            assert (answer.status, answer.error["code"]) == (404, "model_not_found"), path
        assert (await world.ask(post("/v1/models/x", {}))).status == 405
        assert (await world.ask(b"GET /v1/models/x HTTP/1.1\r\nHost: g\r\n\r\n")).status == 401
        assert not world.engine.requests
        page = (await world.get("/metrics")).body
        assert b'kvstrata_gate_requests_total{tenant="acme",path="/v1/models",code="404"}' in page


def preflight(origin: str, path: str = CHAT) -> bytes:
    return (
        f"OPTIONS {path} HTTP/1.1\r\nHost: gate\r\nOrigin: {origin}\r\nAccess-Control-Request-Method: POST\r\n"
        "Access-Control-Request-Headers: authorization,content-type,x-stainless-os\r\n\r\n"
    ).encode()


def cors(answer: Answer) -> dict[str, str]:
    return {
        name: value for name, value in answer.headers.items() if name.startswith("access-control") or name == "vary"
    }


async def test_browsers_of_allowed_origins_may_call(world: World) -> None:
    async with ready(world, cors_origins=f"http://localhost:3000,{ORIGIN}"):
        answer = await world.ask(preflight(ORIGIN))
        assert (answer.status, answer.body) == (200, b"")
        allowed = {"access-control-allow-origin": ORIGIN, "access-control-expose-headers": "*", "vary": "origin"}
        assert cors(answer) == allowed | {
            "access-control-allow-methods": "get, post", "access-control-allow-headers": "authorization, *",
            "access-control-max-age": "7200",
        }  # fmt: skip
        header = f"Origin: {ORIGIN}\r\n"
        for request, status in (
            (post(CHAT, chat(), extra=header), 200),
            (post(CHAT, chat(), "wrong", extra=header), 401),
            (post(CHAT, {**chat(), "cache_salt": "x"}, extra=header), 400),
            (get("/v1/models", header), 200),
            (post(CHAT, chat(), extra=f"{header}Trailer: x\r\nContent-Encoding: gzip\r\n"), 415),
        ):
            answer = await world.ask(request)
            assert (answer.status, cors(answer)) == (status, allowed)

        async def stream(_: EngineRequest, writer: asyncio.StreamWriter) -> None:
            await stream_head(writer)
            await event(writer, {"choices": []})
            writer.write(b"0\r\n\r\n")

        world.engine.handler = stream
        answer = await world.ask(post(CHAT, chat(stream=True), extra=header))
        assert (answer.headers["content-type"], cors(answer)) == ("text/event-stream; charset=utf-8", allowed)


@pytest.mark.parametrize("origin", ["https://evil.example.com", "null", ORIGIN + ".evil.example.com", ORIGIN.upper()])
async def test_browsers_of_other_origins_may_not(world: World, origin: str) -> None:
    async with ready(world, cors_origins=ORIGIN):
        answer = await world.ask(preflight(origin))
        assert (answer.status, cors(answer)) == (405, {"vary": "origin"})
        assert cors(await world.ask(get("/v1/models", f"Origin: {origin}\r\n"))) == {"vary": "origin"}
        assert cors(await world.ask(get("/v1/models", f"Origin: {ORIGIN}\r\nOrigin: {origin}\r\n"))) == {
            "vary": "origin"
        }


async def test_no_origin_is_allowed_by_default(gate: World) -> None:
    answer = await gate.ask(preflight(ORIGIN))
    assert (answer.status, cors(answer)) == (405, {})
    assert cors(await gate.ask(get("/v1/models", f"Origin: {ORIGIN}\r\n"))) == {}


async def test_a_preflight_is_answered_without_a_key_and_options_are_not(world: World) -> None:
    async with ready(world, cors_origins=ORIGIN):
        connection = await world.connect()
        await connection.send(preflight(ORIGIN))
        assert (await connection.answer()).status == 200
        assert await connection.closed()
        connection.close()
        plain = f"OPTIONS {CHAT} HTTP/1.1\r\nHost: gate\r\nOrigin: {ORIGIN}\r\n\r\n".encode()
        assert (await world.ask(plain)).status == 405


@pytest.mark.parametrize(
    ("extra", "passed"),
    [
        (f"Traceparent: {PARENT}\r\n", {f"traceparent: {PARENT}"}),
        (
            f"traceparent: {PARENT}\r\ntracestate: congo=t61, 1a@v=x y\r\ntracestate: rojo=00f067aa0ba902b7\r\n",
            {f"traceparent: {PARENT}", "tracestate: congo=t61,1a@v=x y,rojo=00f067aa0ba902b7"},
        ),
        ("tracestate: a=1\r\n", set()),
        (f"traceparent: {PARENT}\r\ntraceparent: {PARENT}\r\n", set()),
        (f"traceparent: {PARENT.upper()}\r\n", set()),
        (f"traceparent: {PARENT}-00\r\n", set()),
        (f"traceparent: ff{PARENT[2:]}\r\n", set()),
        (f"traceparent: 00-{'0' * 32}-b7ad6b7169203331-01\r\n", set()),
        (f"traceparent: 00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01\r\n", set()),
        *(
            (f"traceparent: {PARENT}\r\ntracestate: {state}\r\n", {f"traceparent: {PARENT}"})
            for state in (
                "",
                ",",
                "a",
                "A=1",
                "a=1;b=2,=",
                "a=b=c",
                "a=\xff",
                ",".join(f"a{n}=1" for n in range(33)),
                f"a={'x' * 257}",
                ",".join(f"a{n}={'x' * 100}" for n in range(6)),
            )
        ),
        (f"traceparent: {PARENT}\r\nbaggage: user=1\r\nb3: 0\r\n", {f"traceparent: {PARENT}"}),
    ],
)
async def test_only_a_well_formed_trace_context_reaches_the_engine(gate: World, extra: str, passed: set[str]) -> None:
    data = json.dumps(chat()).encode()
    request = post(CHAT, data)
    head, rest = request.split(b"\r\n", 1)
    assert (await gate.ask(head + b"\r\n" + extra.encode("latin-1") + rest)).status == 200
    lines = gate.engine.requests[-1].head.decode().split("\r\n")[1:]
    assert {line for line in lines if line and not line.startswith(("Host:", "Content-", "X-Request-Id:"))} == passed


def engine_id(world: World) -> str:
    """Return the id that the engine got with the latest request."""
    (line,) = re.findall(rb"X-Request-Id: (.*)\r\n", world.engine.requests[-1].head)
    return str(line.decode())


@pytest.mark.parametrize("given", ["req-4711", "a", "5f0c.1D_2e", "x" * 128, " padded "])
async def test_a_callers_request_id_is_echoed_and_reaches_the_engine_with_a_random_end(gate: World, given: str) -> None:
    seen = set()
    for _ in range(2):
        answer = await gate.ask(post(CHAT, chat(), extra=f"X-Request-Id: {given}\r\n"))
        assert (answer.headers["x-request-id"], answer.headers["request-id"]) == ((given.strip().lower(),) * 2)
        assert re.fullmatch(f"{re.escape(given.strip())}-[0-9a-f]{{16}}", engine_id(gate))
        seen.add(engine_id(gate))
    assert len(seen) == 2


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a:b", "\u00e9", ACME, "a\r\nX-Request-Id: b", '"'])
async def test_a_request_without_a_usable_id_gets_a_random_one(gate: World, given: str) -> None:
    extra = f"X-Request-Id: {given}\r\n" if given else ""
    made = set()
    for _ in range(2):
        data = json.dumps(chat()).encode()
        head, rest = post(CHAT, data).split(b"\r\n", 1)
        answer = await gate.ask(head + b"\r\n" + extra.encode("latin-1") + rest)
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
        assert engine_id(gate).startswith(answer.headers["x-request-id"])
        made.add(answer.headers["x-request-id"])
    assert len(made) == 2


async def test_refusals_streams_and_models_carry_the_request_id_and_other_ports_do_not(world: World) -> None:
    async def fail(_: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await whole(writer, 400, b"{}")

    extra = "X-Request-Id: mine\r\n"
    async with ready(world):
        for request, status in (
            (post(CHAT, chat(), "wrong", extra=extra), 401),
            (post(CHAT, {**chat(), "cache_salt": "x"}, extra=extra), 400),
            (post(CHAT, chat(stream=True), extra=extra), 200),
            (get("/v1/models", extra), 200),
            (get("/elsewhere", extra), 404),
            (post(CHAT, chat(), extra=f"{extra}Trailer: {'x' * 40_000}\r\n"), 431),
        ):
            answer = await world.ask(request)
            assert (answer.status, answer.headers["x-request-id"]) == (status, "mine")
        world.engine.handler = fail
        assert (await world.ask(post(CHAT, chat(), extra=extra))).headers["x-request-id"] == "mine"
        assert "x-request-id" not in (await world.get("/livez")).headers


MESSAGES = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}},
         "invalid_request_error", "too long"),
        (400, {"object": "error", "message": "too long", "type": "x"}, "invalid_request_error", "too long"),
        (404, {"type": "error", "error": {"type": "internal_error", "message": "gone"}}, "not_found_error", "gone"),
        (413, {"error": {"message": "large"}}, "request_too_large", "large"),
        (422, {"detail": [{"loc": []}]}, "invalid_request_error", "the engine answered 422"),
        (429, {"error": "slow"}, "rate_limit_error", "the engine answered 429"),
        (500, {"error": {"message": "bad salt SALT"}}, "api_error", "bad salt [removed]"),
        (503, "busy", "overloaded_error", "the engine answered 503"),
    ],
)  # fmt: skip
async def test_the_engines_errors_on_messages_wear_anthropics_envelope(
    gate: World, status: int, body: object, kind: str, message: str
) -> None:
    async def fail(_: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await whole(writer, status, json.dumps(body).replace("SALT", keyspace("acme")).encode())

    gate.engine.handler = fail
    answer = await gate.ask(post("/v1/messages", MESSAGES))
    assert (answer.status, answer.json) == (status, {"type": "error", "error": {"type": kind, "message": message}})
    assert answer.headers["content-length"] == str(len(answer.body))
    other = await gate.ask(post(CHAT, chat()))
    if isinstance(body, dict):
        assert json.loads(other.body) == json.loads(json.dumps(body).replace("SALT", "[removed]"))
    else:
        assert other.error["message"] == message


async def test_an_engines_error_that_is_no_json_becomes_one(gate: World) -> None:
    async def fail(_: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await whole(writer, 500, b"Internal Server Error")

    gate.engine.handler = fail
    answer = await gate.ask(post(CHAT, chat()))
    assert (answer.status, answer.error["message"], answer.error["code"]) == (500, "the engine answered 500", "engine")


async def test_answers_have_the_time(gate: World) -> None:
    began = time.time()
    for answer in (await gate.ask(post(CHAT, chat())), await gate.ask(post(CHAT, chat(), "wrong"))):
        assert int(began) <= parsedate_to_datetime(answer.headers["date"].upper()).timestamp() <= time.time()


async def test_the_gates_own_refusals_on_messages_have_anthropics_types(gate: World) -> None:
    async def breaks(_: EngineRequest, writer: asyncio.StreamWriter) -> None:
        writer.close()

    gate.engine.handler = breaks
    for request, status, kind in (
        (post("/v1/messages", MESSAGES, "wrong"), 401, "authentication_error"),
        (post("/v1/messages", MESSAGES | {"model": "x"}), 404, "not_found_error"),
        (post("/v1/messages", {**MESSAGES, "cache_salt": "x"}), 400, "invalid_request_error"),
        (post("/v1/messages", b"x" * (8 * 1024 * 1024 + 1)), 413, "request_too_large"),
        (post("/v1/messages", MESSAGES), 502, "api_error"),
        (get("/v1/messages"), 405, "invalid_request_error"),
    ):
        answer = await gate.ask(request)
        assert (answer.status, answer.json["type"], answer.error["type"]) == (status, "error", kind)


async def test_an_engine_that_breaks_off_a_message_ends_the_stream_with_anthropics_error(gate: World) -> None:
    async def breaks(_: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        await event(writer, {"type": "ping"})
        await asyncio.sleep(0.05)
        writer.close()

    gate.engine.handler = breaks
    answer = await gate.ask(post("/v1/messages", {**MESSAGES, "stream": True}))
    last = answer.body.strip().split(b"\n\n")[-1].splitlines()
    assert last[0] == b"event: error"
    error = json.loads(last[1].removeprefix(b"data: "))
    assert (error["type"], error["error"]["type"], answer.complete) == ("error", "api_error", False)


COUNT = "/v1/messages/count_tokens"
COUNTED = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
    "system": "s", "tools": [{"name": "f", "input_schema": {"type": "object"}}], "model": "tiny",
}  # fmt: skip


@pytest.mark.parametrize("key", [ACME, NOBODY], ids=["with a policy", "without"])
async def test_tokens_are_counted_by_the_engine_without_a_salt_and_without_a_trace_in_counters(
    gate: World, key: str
) -> None:
    answer = await gate.ask(post(f"{COUNT}?beta=true", COUNTED, key))
    assert (answer.status, answer.json["input_tokens"]) == (200, 7)
    (seen,) = gate.engine.requests
    plain = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert (seen.path, seen.json) == (COUNT, {**COUNTED, "messages": [plain]})
    assert not gate.gate.tenants.sequences.total
    page = (await gate.get("/metrics")).body.decode()
    tenant = "acme" if key == ACME else "nobody"
    assert f'requests_total{{tenant="{tenant}",path="{COUNT}",code="200"}} 1' in page
    for counter in ("no_reuse_requests", "prompt_tokens", "uncounted_answers"):
        assert not re.search(f"^kvstrata_gate_{counter}_total{{.*}} [1-9]", page, re.MULTILINE), counter


async def test_counting_has_the_checks_of_a_message_and_anthropics_errors(world: World) -> None:
    async def fail(_: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await whole(writer, 404, b'{"detail":"Not Found"}')

    async with ready(world):
        for request, status, kind in (
            (post(COUNT, COUNTED, "wrong"), 401, "authentication_error"),
            (post(COUNT, {**COUNTED, "model": "x"}), 404, "not_found_error"),
            (post(COUNT, {**COUNTED, "cache_salt": "x"}), 400, "invalid_request_error"),
            (post(COUNT, {**COUNTED, "max_tokens": 5}), 400, "invalid_request_error"),
            (get(COUNT), 405, "invalid_request_error"),
        ):
            answer = await world.ask(request)
            assert (answer.status, answer.error["type"]) == (status, kind)
        assert not world.engine.requests
        world.engine.handler = fail
        answer = await world.ask(post(COUNT, COUNTED))
        assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
        await world.acked(await world.publish([entry("acme")], Rules(unknown_tenants="Refuse")))
        answer = await world.ask(post(COUNT, COUNTED, NOBODY))
        assert (answer.status, answer.error["type"]) == (403, "permission_error")


async def test_counting_is_charged_as_a_request_without_tokens(gate: World) -> None:
    rules = Rules(drain_timeout_s=1, rate=RateLimit(requests_per_minute=2, tokens_per_minute=100))
    await gate.acked(await gate.publish([entry("acme")], rules))
    remaining = []
    for _ in range(2):
        headers = (await gate.ask(post(COUNT, COUNTED))).headers
        remaining.append((headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]))
    assert remaining == [("1", "100"), ("0", "100")]
    assert (await gate.ask(post(COUNT, COUNTED))).status == 429
