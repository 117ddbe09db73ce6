"""Who gets which keyspace, and what an ordinary caller sees."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import re

from kvstrata.contract.policy.bundle import Rules
from kvstrata_sidecar.gate.http.server import ServerConnection

from .pki import client_context
from .stand_ins import EngineRequest, plain_answer
from .world import ACME, GLOBEX, KEYS, NOBODY, World, chat, entry, keyspace, post, until


async def test_a_tenant_is_served_under_its_keyspace_and_the_pinned_model(gate: World) -> None:
    answer = await gate.ask(post("/v1/chat/completions", chat()))
    assert answer.status == 200
    assert answer.json["choices"]
    request = gate.engine.requests[-1]
    assert request.json["cache_salt"] == keyspace("acme")
    assert request.json["model"] == "tiny"
    assert request.json["messages"] == [{"role": "user", "content": "hello"}]


async def test_the_engine_sees_only_headers_that_the_gate_wrote(gate: World) -> None:
    extra = "X-Vllm-Priority: -9\r\nX-Session-ID: s\r\nX-Request-Id: r\r\nX-data-parallel-rank: 1\r\nCookie: a=b\r\n"
    assert (await gate.ask(post("/v1/chat/completions?x=1", chat(), extra=extra))).status == 200
    head = gate.engine.requests[-1].head.decode()
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert {line.split(":")[0] for line in head.split("\r\n")[1:] if line} == {
        "Host", "Content-Type", "Content-Length", "X-Request-Id"
    }  # fmt: skip


async def test_the_caller_sees_no_header_of_the_engine(gate: World) -> None:
    answer = await gate.ask(post("/v1/chat/completions", chat()))
    assert "x-internal" not in answer.headers


async def test_two_tenants_get_two_keyspaces(gate: World) -> None:
    await gate.ask(post("/v1/completions", {"prompt": "a"}, ACME))
    await gate.ask(post("/v1/completions", {"prompt": "a"}, GLOBEX))
    assert [r.json["cache_salt"] for r in gate.engine.requests] == [keyspace("acme"), keyspace("globex")]


async def test_a_tenant_without_policy_gets_a_salt_that_never_comes_again(gate: World) -> None:
    for _ in range(3):
        assert (await gate.ask(post("/v1/completions", {"prompt": "a"}, NOBODY))).status == 200
    salts = [r.json["cache_salt"] for r in gate.engine.requests]
    assert len(set(salts)) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", salt) for salt in salts)


async def test_refuse_keeps_out_tenants_without_policy(gate: World) -> None:
    revision = await gate.publish([entry("acme")], Rules(unknown_tenants="Refuse"))
    await gate.acked(revision)
    answer = await gate.ask(post("/v1/completions", {"prompt": "a"}, NOBODY))
    assert (answer.status, answer.error["code"]) == (403, "unknown_tenant")
    assert not gate.engine.requests


async def test_a_suspended_tenant_is_answered_without_reuse(gate: World) -> None:
    revision = await gate.publish([entry("acme", suspended=True)])
    await gate.acked(revision)
    for _ in range(2):
        assert (await gate.ask(post("/v1/completions", {"prompt": "a"}))).status == 200
    salts = {r.json["cache_salt"] for r in gate.engine.requests}
    assert len(salts) == 2
    assert keyspace("acme") not in salts


async def test_reuse_off_gives_every_request_its_own_salt(gate: World) -> None:
    revision = await gate.publish([entry("acme")], Rules(reuse="Disabled"))
    await gate.acked(revision)
    for _ in range(2):
        await gate.ask(post("/v1/completions", {"prompt": "a"}))
    salts = {r.json["cache_salt"] for r in gate.engine.requests}
    assert len(salts) == 2
    assert keyspace("acme") not in salts


async def test_the_model_list_names_the_served_model_only_and_asks_no_engine(gate: World) -> None:
    answer = await gate.ask(f"GET /v1/models HTTP/1.1\r\nHost: g\r\nx-api-key: {ACME}\r\n\r\n".encode())
    assert [model["id"] for model in answer.json["data"]] == ["tiny"]
    assert not gate.engine.requests


async def test_another_model_is_not_found(gate: World) -> None:
    answer = await gate.ask(post("/v1/chat/completions", chat(model="gpt-4")))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert answer.error["message"] == "the model 'gpt-4' is not served here: use 'tiny', or leave `model` out"
    for odd, named in (("x" * 1000, f"the model {'x' * 128!r}"), (7, "a model that is no text")):
        answer = await gate.ask(post("/v1/chat/completions", chat(model=odd)))
        assert answer.error["message"].startswith(f"{named} is not served here: use 'tiny'"), answer.error
    assert not gate.engine.requests


async def test_anthropic_messages_are_served_under_the_keyspace(gate: World) -> None:
    body = {
        "model": "tiny", "max_tokens": 5, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    }  # fmt: skip
    head = f"POST /v1/messages?beta=true HTTP/1.1\r\nHost: g\r\nx-api-key: {ACME}\r\nContent-Type: application/json\r\n"
    data = json.dumps(body).encode()
    assert (await gate.ask(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)).status == 200
    seen = gate.engine.requests[-1].json
    assert gate.engine.requests[-1].path == "/v1/messages"
    assert seen == {
        "model": "tiny", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "messages": body["messages"],
        "cache_salt": keyspace("acme"),
    }  # fmt: skip


async def test_a_conversation_goes_on_with_the_answers_own_message(gate: World) -> None:
    asked = {"role": "user", "content": "hello"}
    first = await gate.ask(post("/v1/chat/completions", {"messages": [asked]}))
    answered = first.json["choices"][0]["message"]
    assert None in answered.values()
    second = await gate.ask(post("/v1/chat/completions", {"messages": [asked, answered, asked]}))
    assert second.status == 200, second.body
    assert gate.engine.requests[-1].json["messages"] == [asked, {"role": "assistant", "content": "hi"}, asked]


async def test_an_anthropic_conversation_goes_on_with_the_answers_own_content(gate: World) -> None:
    asked = {"role": "user", "content": "hello"}
    first = await gate.ask(post("/v1/messages", {"max_tokens": 5, "messages": [asked]}))
    answered = {"role": first.json["role"], "content": first.json["content"]}
    second = await gate.ask(post("/v1/messages", {"max_tokens": 5, "messages": [asked, answered, asked]}))
    assert second.status == 200, second.body
    assert gate.engine.requests[-1].json["messages"] == [asked, answered, asked]


async def test_a_connection_serves_one_request_after_another(gate: World) -> None:
    connection = await gate.connect()
    for number in range(3):
        await connection.send(post("/v1/completions", {"prompt": str(number)}))
        assert (await connection.answer()).status == 200
    connection.close()
    assert [r.json["prompt"] for r in gate.engine.requests] == ["0", "1", "2"]


async def test_a_refusal_of_a_whole_request_keeps_the_connection(gate: World) -> None:
    connection = await gate.connect()
    await connection.send(post("/v1/completions", {"prompt": "a", "cache_salt": "x"}))
    assert (await connection.answer()).status == 400
    await connection.send(post("/v1/completions", {"prompt": "b"}))
    assert (await connection.answer()).status == 200
    connection.close()


async def test_expect_100_continue_is_answered(gate: World) -> None:
    data = json.dumps({"prompt": "a"}).encode()
    connection = await gate.connect()
    head = post("/v1/completions", data, extra="Expect: 100-continue\r\n")[: -len(data)]
    await connection.send(head)
    assert (await connection.head())[0] == 100
    await connection.send(data)
    assert (await connection.answer()).status == 200
    connection.close()


async def test_a_chunked_body_is_read(gate: World) -> None:
    data = json.dumps({"prompt": "chunks"}).encode()
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {ACME}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    assert (await gate.ask(request)).status == 200
    assert gate.engine.requests[-1].json["prompt"] == "chunks"


async def test_an_error_of_the_engine_is_passed_on_without_the_keyspace(gate: World) -> None:
    async def leak(request, writer):  # type: ignore[no-untyped-def]
        from .stand_ins import whole

        salt = request.json["cache_salt"]
        await whole(writer, 400, json.dumps({"error": {"message": f"bad input {{'cache_salt': '{salt}'}}"}}).encode())

    gate.engine.handler = leak
    answer = await gate.ask(post("/v1/completions", {"prompt": "a"}))
    assert answer.status == 400
    assert b"bad input" in answer.body
    assert keyspace("acme").encode() not in answer.body


async def test_requests_without_a_known_key_never_reach_the_engine(gate: World) -> None:
    for head in ("", "Authorization: Bearer wrong\r\n", "Authorization: Basic x\r\n", "x-api-key: wrong\r\n"):
        data = b'{"prompt":"a"}'
        request = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\n{head}Content-Type: application/json\r\n"
        answer = await gate.ask(f"{request}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert not gate.engine.requests


async def test_a_key_of_another_model_gets_the_answer_of_a_key_that_nobody_has(gate: World) -> None:
    answers = [await gate.ask(post("/v1/completions", {"prompt": "a"}, key=key)) for key in ("of-another", "x" * 600)]
    assert {answer.status for answer in answers} == {401}
    (told,) = {answer.error["message"] for answer in answers}
    assert told.startswith("this model knows no such API key: each model has keys of its own")


async def test_an_entry_of_keys_without_a_field_is_named_in_the_pods_problem(gate: World) -> None:
    await gate.api.put(
        KEYS, {"keys.json": b'{"keys": [{"tenant": "acme", "sha256": "%s"}, {"tenant": "b"}]}' % (b"0" * 64)}
    )
    await until(lambda: "entry 2 of keys.json has no sha256" in gate.gate.state().problem)
    await gate.api.put(KEYS, {"keys.jsn": b"{}"})
    await until(lambda: "has no key keys.json" in gate.gate.state().problem)


async def test_a_key_that_is_removed_stops_working(gate: World) -> None:
    await gate.publish_keys(globex=GLOBEX)
    await until(lambda: len(gate.gate.keys.ring) == 1)
    assert (await gate.ask(post("/v1/completions", {"prompt": "a"}))).status == 401
    assert (await gate.ask(post("/v1/completions", {"prompt": "a"}, GLOBEX))).status == 200


async def test_without_a_bundle_nobody_is_served(world: World) -> None:
    async with world.started():
        await until(lambda: len(world.gate.keys.ring) == 3)
        answer = await world.ask(post("/v1/completions", {"prompt": "a"}))
        assert (answer.status, answer.error["code"]) == (503, "no_policy")
        assert (await world.get("/readyz")).status == 503
        assert (await world.get("/livez")).status == 200
        assert not world.engine.requests


async def test_too_many_requests_in_flight_are_refused(world: World) -> None:
    hold = asyncio.Event()

    async def wait(request, writer):  # type: ignore[no-untyped-def]
        from .stand_ins import plain_answer

        await hold.wait()
        await plain_answer(request, writer)

    world.engine.handler = wait
    await world.publish([entry("acme")])
    async with world.started(max_in_flight=1):
        await world.acked(1)
        await until(lambda: len(world.gate.keys.ring) == 3)
        first = asyncio.create_task(world.ask(post("/v1/completions", {"prompt": "a"})))
        await until(lambda: world.engine.requests)
        second = await world.ask(post("/v1/completions", {"prompt": "b"}))
        assert (second.status, second.headers["retry-after"]) == (429, "1")
        hold.set()
        assert (await first).status == 200


async def hold_the_answer(world: World) -> asyncio.Event:
    """Make the engine wait with its answers until the event is set."""
    hold = asyncio.Event()

    async def wait(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        await plain_answer(request, writer)

    world.engine.handler = wait
    return hold


async def test_one_tenant_cannot_take_the_places_of_the_others(world: World) -> None:
    hold = await hold_the_answer(world)
    await world.publish([entry("acme"), entry("globex")])
    async with world.started(max_in_flight=4, max_in_flight_per_tenant=1):
        await world.acked(1)
        await until(lambda: len(world.gate.keys.ring) == 3)
        first = asyncio.create_task(world.ask(post("/v1/completions", {"prompt": "a"})))
        await until(lambda: world.engine.requests)
        second = await world.ask(post("/v1/completions", {"prompt": "b"}))
        assert (second.status, second.error["code"]) == (429, "tenant_overloaded")
        assert second.headers["retry-after"] == "1"
        other = asyncio.create_task(world.ask(post("/v1/completions", {"prompt": "c"}, GLOBEX)))
        await until(lambda: len(world.engine.requests) == 2)
        hold.set()
        assert (await first).status == 200
        assert (await other).status == 200
        assert (await world.ask(post("/v1/completions", {"prompt": "d"}))).status == 200
        assert b'kvstrata_gate_refusals_total{reason="tenant_overloaded"} 1' in (await world.get("/metrics")).body


async def test_a_request_counts_as_many_times_as_it_asks_for_sequences(world: World) -> None:
    hold = await hold_the_answer(world)
    await world.publish([entry("acme"), entry("globex")])
    async with world.started(max_in_flight=6, max_in_flight_per_tenant=4):
        await world.acked(1)
        await until(lambda: len(world.gate.keys.ring) == 3)
        never = await world.ask(post("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}))
        assert (never.status, never.error["code"]) == (400, "bad_value")
        first = asyncio.create_task(world.ask(post("/v1/completions", {"prompt": ["a", "b"], "n": 2})))
        await until(lambda: world.engine.requests)
        assert (await world.ask(post("/v1/completions", {"prompt": "c"}))).error["code"] == "tenant_overloaded"
        assert (await world.ask(post("/v1/chat/completions", chat(n=3), GLOBEX))).error["code"] == "overloaded"
        second = asyncio.create_task(world.ask(post("/v1/chat/completions", chat(n=2), GLOBEX)))
        await until(lambda: len(world.engine.requests) == 2)
        assert (await world.ask(post("/v1/completions", {"prompt": "c"}, NOBODY))).error["code"] == "overloaded"
        hold.set()
        assert [(await first).status, (await second).status] == [200, 200]
        assert (await world.ask(post("/v1/completions", {"prompt": "d", "n": 4}))).status == 200


async def test_an_expired_key_is_refused_with_a_message(gate: World) -> None:
    digest = hashlib.sha256(ACME.encode()).hexdigest()
    keys = [{"tenant": "acme", "sha256": digest, "expires": "2020-01-01T00:00:00Z"}]
    await gate.api.put(KEYS, {"keys.json": json.dumps({"keys": keys}).encode()})
    await until(lambda: len(gate.gate.keys.ring) == 1)
    refused = await gate.ask(post("/v1/completions", {"prompt": "a"}))
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert "has expired" in refused.error["message"]


async def test_malformed_keys_leave_the_last_good_ones_in_force_and_say_so(gate: World) -> None:
    assert b"kvstrata_gate_api_keys_current 1" in (await gate.get("/metrics")).body
    await gate.api.put(KEYS, {"keys.json": b"{"})
    await until(lambda: "malformed" in gate.gate.state().problem)
    assert b"kvstrata_gate_api_keys_current 0" in (await gate.get("/metrics")).body
    assert (await gate.ask(post("/v1/completions", {"prompt": "a"}))).status == 200
    await gate.api.put(KEYS, {"keys.json": b'{"keys": [{}]}'})
    await until(lambda: "entry 1 of keys.json has no tenant" in gate.gate.state().problem)
    assert gate.gate.state().lasting
    await gate.publish_keys(acme=ACME)
    await until(lambda: not gate.gate.state().problem)
    assert not gate.gate.state().lasting
    assert b"kvstrata_gate_api_keys_current 1" in (await gate.get("/metrics")).body


async def test_connections_that_ended_leave_nothing_behind_for_the_collector(gate: World) -> None:
    # What a TLS connection buffers is 40 kB that the collector does not see.
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            connection = await gate.connect("https", client_context(gate.gate_tls, present=False))
            await connection.send(post("/v1/completions", {"prompt": "a"}))
            assert (await connection.answer()).status == 200
            connection.close()
        await until(lambda: not gate.gate.tenant_server.connections)
        await until(lambda: not any(isinstance(found, ServerConnection) for found in gc.get_objects()))
    finally:
        gc.enable()
