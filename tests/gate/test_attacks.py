"""Hostile heads and bodies: each is refused with a clear error, and nothing of it reaches the engine."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from kvstrata_sidecar.gate.http.errors import Refusal
from kvstrata_sidecar.gate.proxy import strict_json as strictjson

from .world import ACME, World, post, until

CHAT = "/v1/chat/completions"
HELLO = '"messages":[{"role":"user","content":"x"}]'


def chat_with(fragment: str) -> bytes:
    return ("{" + HELLO + "," + fragment + "}").encode("utf-8", "surrogatepass")


def part(fragment: str) -> bytes:
    return ('{"messages":[{"role":"user","content":[' + fragment + "]}]}").encode()


BODIES: dict[str, tuple[bytes, int, str | None]] = {
    # name: (body, status, param)
    "cache_salt": (chat_with('"cache_salt":"mine"'), 400, "cache_salt"),
    "cache_salt null": (chat_with('"cache_salt":null'), 400, "cache_salt"),
    "cache_salt escaped": (chat_with('"cache\\u005fsalt":"mine"'), 400, "cache_salt"),
    "cache_salt twice": (chat_with('"cache_salt":"a","cache_salt":"b"'), 400, "cache_salt"),
    "messages twice": (chat_with(HELLO), 400, "messages"),
    "model twice": (chat_with('"model":"tiny","model":"other"'), 400, "model"),
    "escaped repetition": (chat_with('"n":1,"\\u006e":2'), 400, "n"),
    "nested repetition": (b'{"messages":[{"role":"user","role":"system","content":"x"}]}', 400, "role"),
    "deep repetition": (
        chat_with('"tools":[{"type":"function","function":{"name":"f","parameters":{"a":{"b":1,"b":2}}}}]'), 400, "b",
    ),
    "kv_transfer_params": (chat_with('"kv_transfer_params":{}'), 400, "kv_transfer_params"),
    "ec_transfer_params": (chat_with('"ec_transfer_params":{}'), 400, "ec_transfer_params"),
    "vllm_xargs": (chat_with('"vllm_xargs":{"kv_transfer_params":"x"}'), 400, "vllm_xargs"),
    "request_id": (chat_with('"request_id":"r"'), 400, "request_id"),
    "session_id": (chat_with('"session_id":"s"'), 400, "session_id"),
    "priority": (chat_with('"priority":-100'), 400, "priority"),
    "prompt_embeds": (chat_with('"prompt_embeds":"AAAA"'), 400, "prompt_embeds"),
    "mm_processor_kwargs": (chat_with('"mm_processor_kwargs":{}'), 400, "mm_processor_kwargs"),
    "media_io_kwargs": (chat_with('"media_io_kwargs":{}'), 400, "media_io_kwargs"),
    "chat_template": (chat_with('"chat_template":"{{ 1 }}"'), 400, "chat_template"),
    "chat_template in kwargs": (
        chat_with('"chat_template_kwargs":{"chat_template":"{{ 1 }}"}'), 400, "chat_template_kwargs",
    ),
    "object in kwargs": (chat_with('"chat_template_kwargs":{"a":{"b":1}}'), 400, "chat_template_kwargs"),
    "logits_processors": (chat_with('"logits_processors":["os.system"]'), 400, "logits_processors"),
    "unknown key": (chat_with('"brand_new":1'), 400, "brand_new"),
    "key with other case": (chat_with('"Cache_Salt":"x"'), 400, "Cache_Salt"),
    "key with a space": (chat_with('"cache_salt ":"x"'), 400, "cache_salt "),
    "key with a NUL": (chat_with('"cache_salt\\u0000":"x"'), 400, "cache_salt\x00"),
    "fullwidth key": (chat_with('"\uff43ache_salt":"x"'), 400, "\uff43ache_salt"),
    "surrogate key": (chat_with('"\\ud800":1'), 400, "?"),
    "part uuid": (part('{"type":"image_url","image_url":{"url":"data:x"},"uuid":"u"}'), 400,
                  "messages[0].content[0].uuid"),
    "part salt": (part('{"type":"text","text":"x","cache_salt":"u"}'), 400, "messages[0].content[0].cache_salt"),
    "part url": (part('{"type":"image_url","image_url":{"url":"http://169.254.169.254/"}}'), 400,
                 "messages[0].content[0].image_url.url"),
    "part file": (part('{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}'), 400,
                  "messages[0].content[0].image_url.url"),
    "part image_embeds": (part('{"type":"image_embeds","image_embeds":"AA"}'), 400, "messages[0].content[0].type"),
    "part without type": (part('{"image_url":"http://x"}'), 400, "messages[0].content[0].type"),
    "message key": (b'{"messages":[{"role":"user","content":"x","cache_salt":"y"}]}', 400, "messages[0].cache_salt"),
    "message is text": (b'{"messages":["x"]}', 400, "messages"),
    "no messages": (b"{}", 400, "messages"),
    "structured_outputs backend": (chat_with('"structured_outputs":{"_backend":"x"}'), 400,
                                   "structured_outputs._backend"),
    "stream is text": (chat_with('"stream":"true"'), 400, "stream"),
    "stream_options key": (chat_with('"stream":true,"stream_options":{"x":true}'), 400, "stream_options.x"),
    "NaN": (chat_with('"temperature":NaN'), 400, None),
    "Infinity": (chat_with('"temperature":Infinity'), 400, None),
    "-Infinity": (chat_with('"temperature":-Infinity'), 400, None),
    "1e999": (chat_with('"temperature":1e999'), 400, None),
    "huge integer": (chat_with('"seed":' + "9" * 40), 400, None),
    "enormous integer": (chat_with('"seed":' + "9" * 5000), 400, None),
    "lone surrogate": (chat_with('"user":"x","stop":"\\ud800"'), 400, None),
    "reversed surrogates": (chat_with('"stop":"\\udc00\\ud800"'), 400, None),
    "surrogate bytes": (chat_with('"stop":"\ud800"'), 400, None),
    "byte order mark": (b"\xef\xbb\xbf" + chat_with('"n":1'), 400, None),
    "UTF-16": (chat_with('"n":1').decode().encode("utf-16"), 400, None),
    "UTF-16 LE": (chat_with('"n":1').decode().encode("utf-16-le"), 400, None),
    "UTF-32": (chat_with('"n":1').decode().encode("utf-32"), 400, None),
    "Latin-1": (b'{"messages":[{"role":"user","content":"\xe9"}]}', 400, None),
    "overlong UTF-8": (b'{"messages":[{"role":"user","content":"\xc0\xaf"}]}', 400, None),
    "control character": (b'{"messages":[{"role":"user","content":"a\nb"}]}', 400, None),
    "trailing garbage": (chat_with('"n":1') + b"{}", 400, None),
    "trailing comma": (chat_with('"n":1,'), 400, None),
    "comment": (chat_with("/* */"), 400, None),
    "single quotes": (b"{'messages':[]}", 400, None),
    "NUL prefix": (b"\x00" + chat_with('"n":1'), 400, None),
    "empty": (b"", 400, None),
    "list": (b"[]", 400, None),
    "text": (b'"x"', 400, None),
    "nested lists": (chat_with('"stop":' + "[" * 65 + "]" * 65), 400, None),
    "deeply nested lists": (chat_with('"stop":' + "[" * 100_000 + "]" * 100_000), 400, None),
    "unbalanced lists": (b"[" * 1_000_000, 400, None),
    "wide lists": (chat_with('"stop":[' + ",".join(["[]"] * 700_000) + "]"), 400, None),
    "many quotes": (chat_with('"stop":' + "[" * 60 + "]" * 60) + b'"' * 4_000_000, 400, None),
    "many escaped quotes": (chat_with('"stop":' + "[" * 65) + b'"' + b'\\"' * 2_000_000, 400, None),
    "many keys": (("{" + ",".join(f'"{n}":1' for n in range(200_000)) + "}").encode(), 400, None),
    "many numbers": (chat_with('"stop_token_ids":[' + ",".join(["1"] * 1_100_000) + "]"), 400, None),
    "too large": (chat_with('"user":"' + "x" * (8 * 1024 * 1024) + '"'), 413, None),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
async def test_a_hostile_body_is_refused_before_the_engine(gate: World, name: str) -> None:
    body, status, param = BODIES[name]
    answer = await gate.ask(post(CHAT, body))
    assert answer.status == status
    assert answer.error["type"] == "invalid_request_error"
    if param is not None:
        assert answer.error["param"] == param
    assert not gate.engine.requests


COMPLETIONS: dict[str, tuple[str, dict[str, object], str]] = {
    "embeds in a completion": ("/v1/completions", {"prompt": "x", "prompt_embeds": "AA"}, "prompt_embeds"),
    "no prompt": ("/v1/completions", {}, "prompt"),
    "prompt object": ("/v1/completions", {"prompt": {"prompt_token_ids": [1], "cache_salt": "x"}}, "prompt"),
    "prompt of mixed kinds": ("/v1/completions", {"prompt": ["x", 1]}, "prompt"),
    "prompt of booleans": ("/v1/completions", {"prompt": [True]}, "prompt"),
    "messages in a completion": ("/v1/completions", {"prompt": "x", "messages": []}, "messages"),
    "Anthropic salt": ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "cache_salt": "y"},
                       "cache_salt"),
    "Anthropic transfer": ("/v1/messages", {"messages": [{"role": "user", "content": "x"}],
                                            "kv_transfer_params": {}}, "kv_transfer_params"),
    "Anthropic image by address": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [
                {"type": "image", "source": {"type": "url", "url": "http://x"}}]}]}]},
        "messages[0].content[0].content[0].source.url",
    ),
    "Anthropic server tool": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "b", "type": "bash_20250124"}]},
        "tools[0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPLETIONS)
async def test_a_hostile_value_is_named(gate: World, name: str) -> None:
    path, body, param = COMPLETIONS[name]
    answer = await gate.ask(post(path, body))
    assert (answer.status, answer.error["param"]) == (400, param)
    assert not gate.engine.requests


GOOD = ("{" + HELLO + "}").encode()
AUTH = f"Host: g\r\nAuthorization: Bearer {ACME}\r\n"
JSON = "Content-Type: application/json\r\n"
UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


def raw(line: str, headers: str, body: bytes = b"") -> bytes:
    return f"{line}\r\n{headers}\r\n".encode("latin-1") + body


def whole(headers: str, body: bytes = GOOD, line: str = f"POST {CHAT} HTTP/1.1") -> bytes:
    return raw(line, AUTH + headers + f"Content-Length: {len(body)}\r\n", body)


CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
HEADS: dict[str, tuple[bytes, int]] = {
    "unknown path": (whole(JSON, line="POST /v1/embeddings HTTP/1.1"), 404),
    "responses": (whole(JSON, line="POST /v1/responses HTTP/1.1"), 404),
    "pooling": (whole(JSON, line="POST /pooling HTTP/1.1"), 404),
    "invocations": (whole(JSON, line="POST /invocations HTTP/1.1"), 404),
    "batch": (whole(JSON, line=f"POST {CHAT}/batch HTTP/1.1"), 404),
    "message batches": (whole(JSON, line="POST /v1/messages/batches HTTP/1.1"), 404),
    "count chat tokens": (whole(JSON, line="POST /tokenize HTTP/1.1"), 404),
    "load adapter": (whole(JSON, line="POST /v1/load_lora_adapter HTTP/1.1"), 404),
    "engine metrics": (raw("GET /metrics HTTP/1.1", AUTH), 404),
    "engine docs": (raw("GET /openapi.json HTTP/1.1", AUTH), 404),
    "sleep": (whole(JSON, line="POST /sleep HTTP/1.1"), 404),
    "path with dots": (whole(JSON, line=f"POST /x/..{CHAT} HTTP/1.1"), 404),
    "encoded path": (whole(JSON, line="POST /v1/chat%2fcompletions HTTP/1.1"), 404),
    "double slash": (whole(JSON, line=f"POST /{CHAT} HTTP/1.1"), 404),
    "trailing slash": (whole(JSON, line=f"POST {CHAT}/ HTTP/1.1"), 404),
    "asterisk form": (raw("OPTIONS * HTTP/1.1", AUTH), 404),
    "GET chat": (raw(f"GET {CHAT} HTTP/1.1", AUTH), 405),
    "PUT chat": (whole(JSON, line=f"PUT {CHAT} HTTP/1.1"), 405),
    "POST models": (whole(JSON, line="POST /v1/models HTTP/1.1"), 405),
    "CONNECT": (raw("CONNECT engine:80 HTTP/1.1", AUTH), 404),
    "HTTP/1.0": (whole(JSON, line=f"POST {CHAT} HTTP/1.0"), 505),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no media type": (whole(""), 415),
    "form": (whole("Content-Type: application/x-www-form-urlencoded\r\n"), 415),
    "text": (whole("Content-Type: text/plain\r\n"), 415),
    "charset": (whole("Content-Type: application/json; charset=utf-16\r\n"), 415),
    "charset twice": (whole("Content-Type: application/json; charset=utf-8; charset=utf-7\r\n"), 415),
    "media type twice": (whole(JSON + "Content-Type: text/plain\r\n"), 400),
    "gzip": (whole(JSON + "Content-Encoding: gzip\r\n"), 415),
    "identity encoding": (whole(JSON + "Content-Encoding: identity\r\n"), 415),
    "CL and TE": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
                      CHUNKED), 400),
    "TE and CL": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
                      CHUNKED), 400),
    "two lengths": (whole(JSON + "Content-Length: 3\r\n"), 400),
    "same length twice": (whole(JSON + f"Content-Length: {len(GOOD)}\r\n"), 400),
    "length list": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Content-Length: 5, 5\r\n", GOOD), 400),
    "negative length": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Content-Length: -1\r\n", GOOD), 400),
    "signed length": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Content-Length: +5\r\n", GOOD), 400),
    "huge length": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Content-Length: 99999999999\r\n"), 413),
    "overflowing length": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Content-Length: 99999999999999999999999\r\n"),
                           400),
    "space before colon": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Content-Length : 5\r\n", GOOD), 400),
    "TE gzip": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Transfer-Encoding: gzip, chunked\r\n", CHUNKED), 400),
    "TE obscured": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Transfer-Encoding: xchunked\r\n", CHUNKED), 400),
    "TE twice": (raw(f"POST {CHAT} HTTP/1.1",
                     AUTH + JSON + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", CHUNKED), 400),
    "bad chunk size": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Transfer-Encoding: chunked\r\n",
                           b"0x5\r\nhello\r\n0\r\n\r\n"), 400),
    "trailer": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "Transfer-Encoding: chunked\r\n",
                    CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n"), 400),
    "folded header": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + "X-A: b\r\n c\r\n", GOOD), 400),
    "bare line feeds": (whole(JSON).replace(b"\r\n", b"\n"), 400),
    "NUL in a header": (whole(JSON + "X-A: a\x00b\r\n"), 400),
    "length and chunks with an upgrade": (
        raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + UPGRADE + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
            CHUNKED), 400,
    ),
    "pipelined with an upgrade": (whole(JSON + UPGRADE) + whole(JSON), 400),
    "another protocol behind an upgrade": (whole(JSON + UPGRADE) + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "trailer with an upgrade": (raw(f"POST {CHAT} HTTP/1.1", AUTH + JSON + UPGRADE + "Transfer-Encoding: chunked\r\n",
                                    CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n"), 400),
    "bad chunk size with an upgrade": (raw(f"POST {CHAT} HTTP/1.1",
                                           AUTH + JSON + UPGRADE + "Transfer-Encoding: chunked\r\n",
                                           b"0x5\r\nhello\r\n0\r\n\r\n"), 400),
    "too large with an upgrade": (raw(f"POST {CHAT} HTTP/1.1",
                                      AUTH + JSON + UPGRADE + "Content-Length: 99999999999\r\n"), 413),
    "unknown path with an upgrade": (whole(JSON + UPGRADE, line="POST /v1/embeddings HTTP/1.1"), 404),
    "no key with an upgrade": (raw(f"POST {CHAT} HTTP/1.1", "Host: g\r\n" + JSON + UPGRADE), 401),
    "unknown path in absolute form": (whole(JSON, line="POST http://engine/v1/embeddings HTTP/1.1"), 404),
    "absolute form twice": (whole(JSON, line=f"POST http://engine/http://engine{CHAT} HTTP/1.1"), 404),
    "absolute form of another scheme": (whole(JSON, line=f"POST ftp://engine{CHAT} HTTP/1.1"), 404),
    "absolute form with a user": (whole(JSON, line=f"POST http://u@engine{CHAT} HTTP/1.1"), 404),
    "no host": (whole(JSON).replace(b"Host: g\r\n", b""), 400),
    "host with a path": (whole(JSON).replace(b"Host: g\r\n", b"Host: g/v1\r\n"), 400),
    "host with a space": (whole(JSON).replace(b"Host: g\r\n", b"Host: g h\r\n"), 400),
    "unknown expectation": (whole(JSON + "Expect: 200-ok\r\n"), 417),
    "two keys": (whole(JSON + "Authorization: Bearer other\r\n"), 400),
    "keys that differ": (whole(JSON + "x-api-key: other\r\n"), 400),
    "two hosts": (whole(JSON + "Host: h\r\n"), 400),
    "pipelined": (whole(JSON) + whole(JSON), 400),
    "pipelined behind a refusal": (whole("") + whole(JSON), 415),
    "long target": (whole(JSON, line=f"POST {CHAT}?{'a' * 3000} HTTP/1.1"), 431),
    "many headers": (whole(JSON + "".join(f"X-{n}: 1\r\n" for n in range(120))), 431),
    "large head": (raw(f"POST {CHAT} HTTP/1.1", AUTH + f"X-A: {'a' * 40_000}"), 431),
    "large head in one piece": (whole(JSON + "".join(f"X-{n}: {'a' * 4000}\r\n" for n in range(10))), 431),
    "large head, whole": (whole(JSON + f"Cookie: a={'x' * 40_000}\r\n"), 431),
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
async def test_a_hostile_head_is_refused_before_the_engine(gate: World, name: str) -> None:
    data, status = HEADS[name]
    answer = await gate.ask(data)
    assert answer.status == status, answer.body
    assert answer.error["code"]
    assert not gate.engine.requests


@pytest.mark.parametrize(
    "name",
    [
        "CL and TE",
        "two lengths",
        "pipelined",
        "pipelined behind a refusal",
        "TE obscured",
        "folded header",
        "no host",
        "pipelined with an upgrade",
        "another protocol behind an upgrade",
        "length and chunks with an upgrade",
    ],
)
async def test_a_doubt_about_framing_costs_the_connection(gate: World, name: str) -> None:
    connection = await gate.connect()
    await connection.send(HEADS[name][0])
    assert (await connection.answer()).headers["connection"] == "close"
    assert await connection.closed()
    connection.close()


async def test_a_request_behind_one_in_flight_ends_both(gate: World) -> None:
    async def never(request, writer):  # type: ignore[no-untyped-def]
        await asyncio.Event().wait()

    gate.engine.handler = never
    connection = await gate.connect()
    await connection.send(whole(JSON))
    await until(lambda: gate.engine.requests)
    await connection.send(whole(JSON))
    assert await connection.closed()
    await until(lambda: not gate.gate.enforcement.in_flight)
    assert len(gate.engine.requests) == 1
    connection.close()


async def test_errors_on_messages_have_both_shapes(gate: World) -> None:
    answer = await gate.ask(post("/v1/messages", {"messages": [], "priority": 1}))
    assert answer.json["type"] == "error"
    assert answer.error["param"] == "priority"


def test_the_tables_hold_what_was_promised() -> None:
    assert len(BODIES) + len(COMPLETIONS) + len(HEADS) >= 100
    assert all(json.dumps(name) for name in (*BODIES, *HEADS))


@pytest.mark.parametrize("name", ["wide lists", "many quotes", "many escaped quotes", "many keys", "many numbers"])
def test_a_body_made_to_stall_the_parser_is_refused_in_little_time(name: str) -> None:
    begun = time.process_time()
    with pytest.raises(Refusal):
        strictjson.parse_object(BODIES[name][0])
    assert time.process_time() - begun < 0.5


async def test_a_head_that_dribbles_is_ended(gate: World) -> None:
    connection = await gate.connect()
    await connection.send(f"POST {CHAT} HTTP/1.1\r\nHost: g\r\n".encode())
    await until(lambda: any(one._head_bytes for one in gate.gate.tenant_server.connections))
    (served,) = gate.gate.tenant_server.connections
    assert served.deadline <= asyncio.get_running_loop().time() + gate.gate.tenant_server.limits.head_s
    served.deadline = 0.0
    assert (await connection.answer()).status == 408
    assert await connection.closed()
    connection.close()


async def test_an_idle_connection_is_closed_without_a_word(gate: World) -> None:
    connection = await gate.connect()
    await connection.send(post("/v1/completions", {"prompt": "a"}))
    await connection.answer()
    (served,) = gate.gate.tenant_server.connections
    served.deadline = 0.0
    assert await connection.closed()
    connection.close()


async def test_a_caller_who_stops_reading_for_too_long_is_dropped(gate: World) -> None:
    async def never(request, writer):  # type: ignore[no-untyped-def]
        await asyncio.Event().wait()

    gate.engine.handler = never
    connection = await gate.connect()
    await connection.send(whole(JSON))
    await until(lambda: gate.engine.requests)
    (served,) = gate.gate.tenant_server.connections
    assert served.deadline == float("inf")
    served.pause_writing()
    assert served.deadline < float("inf")
    served.deadline = 0.0
    assert await connection.closed()
    await until(lambda: not gate.gate.enforcement.in_flight)
    connection.close()
