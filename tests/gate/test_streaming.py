"""Streams: first byte, usage, cancellation, backpressure, and ends that are not clean."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from kvstrata_sidecar.gate.http import engine_client
from kvstrata_sidecar.gate.http.engine_client import Call, EnginePool, Receiver

from .stand_ins import EngineRequest, chunk, event, plain_answer, stream_head, whole
from .world import World, chat, post, until


def data_events(body: bytes) -> list[object]:
    """Return what the `data:` lines of a stream hold."""
    lines = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part.startswith(b"data: ")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def metric(page: bytes, line_start: str) -> float:
    """Return the value of the metric whose line starts so."""
    found = [line for line in page.decode().splitlines() if line.startswith(line_start)]
    assert len(found) == 1, found
    return float(found[0].rsplit(" ", 1)[1])


async def test_a_stream_arrives_event_by_event(gate: World) -> None:
    step = asyncio.Event()

    async def slow(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        await event(writer, {"choices": [{"delta": {"content": "first"}}]})
        await step.wait()
        await chunk(writer, b"data: [DONE]\n\n")
        await chunk(writer, b"")

    gate.engine.handler = slow
    connection = await gate.connect()
    await connection.send(post("/v1/chat/completions", chat(stream=True)))
    status, headers = await connection.head()
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert b"first" in await asyncio.wait_for(connection.chunk(), 60)
    step.set()
    assert await connection.chunk() == b"data: [DONE]\n\n"
    assert await connection.chunk() == b""
    connection.close()


async def test_the_usage_event_that_the_gate_asked_for_is_counted_and_removed(gate: World) -> None:
    answer = await gate.ask(post("/v1/chat/completions", chat(stream=True)))
    assert gate.engine.requests[-1].json["stream_options"] == {"include_usage": True}
    events = data_events(answer.body)
    assert len(events) == 3
    assert events[-1] == "[DONE]"
    assert b"usage" not in answer.body
    page = (await gate.get("/metrics")).body
    assert metric(page, 'kvstrata_gate_prompt_tokens_total{tenant="acme"}') == 7
    assert metric(page, 'kvstrata_gate_completion_tokens_total{tenant="acme"}') == 2
    assert metric(page, 'kvstrata_gate_cached_prompt_tokens_total{tenant="acme"}') == 4
    assert metric(page, 'kvstrata_gate_time_to_first_token_seconds_count{tenant="acme"}') == 1


async def test_the_usage_event_that_the_caller_asked_for_arrives(gate: World) -> None:
    answer = await gate.ask(post("/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True})))
    events = data_events(answer.body)
    assert len(events) == 4
    assert isinstance(events[2], dict)
    assert events[2]["usage"]["prompt_tokens"] == 7


async def test_the_usage_of_a_whole_answer_is_counted_and_left_in_it(gate: World) -> None:
    answer = await gate.ask(post("/v1/chat/completions", chat()))
    assert answer.json["usage"]["prompt_tokens"] == 7
    page = (await gate.get("/metrics")).body
    assert metric(page, 'kvstrata_gate_prompt_tokens_total{tenant="acme"}') == 7


async def test_a_caller_who_leaves_ends_the_engines_work_at_once(gate: World) -> None:
    async def endless(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        while True:
            await event(writer, {"choices": [{"delta": {"content": "x"}}]})
            await asyncio.sleep(0.01)

    gate.engine.handler = endless
    connection = await gate.connect()
    await connection.send(post("/v1/chat/completions", chat(stream=True)))
    await connection.head()
    await connection.chunk()
    before = gate.engine.disconnects
    connection.close()
    await until(lambda: gate.engine.disconnects > before)
    await until(lambda: not gate.gate.enforcement.in_flight)
    page = (await gate.get("/metrics")).body
    assert metric(page, 'kvstrata_gate_requests_total{tenant="acme",path="/v1/chat/completions",code="499"}') == 1
    assert metric(page, UNCOUNTED % "all") == 1


UNCOUNTED = 'kvstrata_gate_uncounted_answers_total{tenant="acme",tokens="%s"}'


async def test_a_stream_that_ends_before_its_usage_is_counted_as_uncounted(gate: World) -> None:
    async def broken(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        usage = {"prompt_tokens": 5, "completion_tokens": 1}
        await event(writer, {"choices": [{"delta": {"content": "x"}}], "usage": usage})
        writer.close()

    gate.engine.handler = broken
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await gate.ask(post("/v1/chat/completions", chat(stream=True, stream_options=options)))
    assert not answer.complete
    page = (await gate.get("/metrics")).body
    assert metric(page, UNCOUNTED % "all") == 1
    assert metric(page, 'kvstrata_gate_prompt_tokens_total{tenant="acme"}') == 5


async def test_answers_that_report_all_tokens_and_errors_are_not_uncounted(gate: World) -> None:
    await gate.ask(post("/v1/chat/completions", chat(stream=True)))
    await gate.ask(post("/v1/chat/completions", chat()))
    await gate.ask(post("/v1/messages", chat(max_tokens=5)))

    async def failing(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await whole(writer, 400, b'{"error":{}}')

    gate.engine.handler = failing
    assert (await gate.ask(post("/v1/chat/completions", chat()))).status == 400

    async def closing(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        writer.close()

    gate.engine.handler = closing
    assert (await gate.ask(post("/v1/chat/completions", chat()))).status == 502
    page = (await gate.get("/metrics")).body
    assert [metric(page, UNCOUNTED % tokens) for tokens in ("all", "cached")] == [0, 0]


async def test_the_cached_tokens_of_several_sequences_are_unknown(gate: World) -> None:
    details = []
    for body in ({"prompt": ["a", "b"]}, {"prompt": "a", "n": 4}, {"prompt": ["a"]}):
        answer = await gate.ask(post("/v1/completions", body))
        assert int(answer.headers["content-length"]) == len(answer.body)
        details.append(answer.json["usage"]["prompt_tokens_details"])
    assert details == [None, None, {"cached_tokens": 4}]
    page = (await gate.get("/metrics")).body
    assert [metric(page, UNCOUNTED % tokens) for tokens in ("all", "cached")] == [0, 2]
    assert metric(page, 'kvstrata_gate_cached_prompt_tokens_total{tenant="acme"}') == 4
    assert metric(page, 'kvstrata_gate_prompt_tokens_total{tenant="acme"}') == 21


async def test_a_whole_answer_of_many_megabytes_is_counted(gate: World) -> None:
    async def long(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        answer = {"choices": [{"text": "x" * (3 << 20)}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
        await whole(writer, 200, json.dumps(answer).encode())

    gate.engine.handler = long
    await gate.ask(post("/v1/completions", {"prompt": "a"}))
    page = (await gate.get("/metrics")).body
    assert metric(page, 'kvstrata_gate_completion_tokens_total{tenant="acme"}') == 2
    assert metric(page, UNCOUNTED % "all") == 0


async def test_a_caller_who_leaves_before_the_first_byte_ends_the_engines_work(gate: World) -> None:
    closed = asyncio.Event()

    async def silent(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        try:
            assert await request.reader.read(1) == b""
        except ConnectionError:
            pass
        closed.set()

    gate.engine.handler = silent
    connection = await gate.connect()
    await connection.send(post("/v1/chat/completions", chat()))
    await until(lambda: gate.engine.requests)
    connection.close()
    await asyncio.wait_for(closed.wait(), 60)


async def test_a_caller_who_does_not_read_slows_the_engine_down(gate: World) -> None:
    sent = 0
    block = b"data: " + b"x" * 65_536 + b"\n\n"
    blocks = 1200

    async def flood(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await stream_head(writer)
        for _ in range(blocks):
            await chunk(writer, block)
            sent += 1
        await chunk(writer, b"")

    gate.engine.handler = flood
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", gate.gate.ports["http"]))
    await loop.sock_sendall(raw, post("/v1/chat/completions", chat(stream=True)))
    await until(lambda: sent > 0)
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.3)
    assert sent < blocks * 0.5, "the engine was never held back"
    received = 0
    while received < blocks * len(block):
        data = await asyncio.wait_for(loop.sock_recv(raw, 1 << 20), 20)
        assert data
        received += len(data)
    await until(lambda: sent == blocks)
    raw.close()


async def test_an_engine_that_dies_before_its_answer_is_a_502(gate: World) -> None:
    async def die(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        writer.close()
        raise ConnectionError

    gate.engine.handler = die
    answer = await gate.ask(post("/v1/chat/completions", chat()))
    assert (answer.status, answer.error["type"]) == (502, "server_error")
    assert not gate.gate.enforcement.in_flight


async def test_an_engine_that_dies_in_a_stream_cuts_it_visibly(gate: World) -> None:
    async def die(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        await event(writer, {"choices": [{"delta": {"content": "x"}}]})
        writer.close()
        raise ConnectionError

    gate.engine.handler = die
    answer = await gate.ask(post("/v1/chat/completions", chat(stream=True)))
    assert not answer.complete
    events = data_events(answer.body)
    assert isinstance(events[-1], dict)
    assert events[-1]["error"]["code"] == "engine"


async def test_an_engine_that_is_not_there_is_a_503(gate: World) -> None:
    await gate.engine.stop()
    await asyncio.sleep(0.05)
    answer = await gate.ask(post("/v1/chat/completions", chat()))
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"


async def test_a_kept_connection_that_the_engine_closed_costs_no_request(gate: World) -> None:
    async def answer_and_close(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await plain_answer(request, writer)
        if len(gate.engine.requests) % 2:
            writer.close()
            raise ConnectionError

    gate.engine.handler = answer_and_close
    for number in range(6):
        assert (await gate.ask(post("/v1/completions", {"prompt": str(number)}))).status == 200


async def test_an_event_in_pieces_is_put_together(gate: World) -> None:
    async def pieces(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        stream = (
            b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[],"usage":{"prompt_tokens":3}}\n\n'
        )
        for byte in stream + b"data: [DONE]\n\n":
            await chunk(writer, bytes([byte]))
        await chunk(writer, b"")

    gate.engine.handler = pieces
    answer = await gate.ask(post("/v1/chat/completions", chat(stream=True)))
    assert answer.body == b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'


async def pause() -> None:
    """Give the gate time to read what was sent before more is sent."""
    await asyncio.sleep(0.05)


async def test_chunks_that_are_framed_in_other_ways_are_framed_anew(gate: World) -> None:
    data = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    size = b"%x" % len(data)
    lines = (size, size, b"00" + size, size.upper(), size + b";name=value", size)
    forwarded = asyncio.Semaphore(0)

    async def odd(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        for line in lines:
            writer.write(line + b"\r\n" + data + b"\r\n")
            await writer.drain()
            await forwarded.acquire()
        await chunk(writer, b"")

    gate.engine.handler = odd
    connection = await gate.connect()
    await connection.send(post("/v1/chat/completions", chat(stream=True)))
    await connection.head()
    anew = size + b"\r\n" + data + b"\r\n"
    for _ in lines:
        # One after the other: pieces that come at once may go on as one.
        assert await asyncio.wait_for(connection.reader.readexactly(len(anew)), 60) == anew
        forwarded.release()
    assert await asyncio.wait_for(connection.reader.readexactly(5), 60) == b"0\r\n\r\n"
    connection.close()


async def test_text_that_looks_like_a_chunk_stays_text(gate: World) -> None:
    first, forged = b"data: first\n\n", b"a\r\ndata: no\n\n\r\n"
    text = b'data: "' + forged + b'"\n\n'

    async def forge(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        for _ in range(2):
            await chunk(writer, first)
            await pause()
        head, _, tail = (b"%x\r\n%s\r\n" % (len(text), text)).partition(forged)
        for piece in (head, forged, tail):
            writer.write(piece)
            await writer.drain()
            await pause()
        await chunk(writer, first)
        await chunk(writer, b"")

    gate.engine.handler = forge
    answer = await gate.ask(post("/v1/chat/completions", chat(stream=True)))
    assert answer.body == first * 2 + text + first


async def test_whole_events_do_not_overtake_the_beginning_of_another(gate: World) -> None:
    whole_event, half, rest = b"data: 1\n\n", b"data: begun, ", b"ended\n\n"
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5}}\n\n'
    pieces = (whole_event, whole_event, half, rest, whole_event, half, rest + whole_event, usage, whole_event)

    async def mixed(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        for piece in pieces:
            await chunk(writer, piece)
            await pause()
        await chunk(writer, b"")

    gate.engine.handler = mixed
    answer = await gate.ask(post("/v1/chat/completions", chat(stream=True)))
    assert answer.body == b"".join(pieces).replace(usage, b"")
    page = (await gate.get("/metrics")).body
    assert metric(page, 'kvstrata_gate_prompt_tokens_total{tenant="acme"}') == 5


async def test_what_comes_behind_an_answer_is_no_part_of_the_next(gate: World) -> None:
    async def talkative(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        body = b'{"of":"%d"}' % len(gate.engine.requests)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            + b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{"of":"none"}HTTP/1.1 200 OK\r\nx-half: '
        )
        await writer.drain()

    gate.engine.handler = talkative
    for number in range(1, 4):
        answer = await gate.ask(post("/v1/completions", {"prompt": "x"}))
        assert (answer.status, answer.json) == (200, {"of": str(number)})


async def test_a_text_about_usage_is_not_mistaken_for_usage(gate: World) -> None:
    async def quote(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        await event(writer, {"choices": [{"delta": {"content": '"usage": {"choices": []}'}}], "usage": None})
        await chunk(writer, b"data: [DONE]\n\n")
        await chunk(writer, b"")

    gate.engine.handler = quote
    answer = await gate.ask(post("/v1/chat/completions", chat(stream=True)))
    assert len(data_events(answer.body)) == 2


async def test_connections_to_the_engine_are_used_again(gate: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "_KEEP_IDLE_S", 3600.0)
    for stream in (False, True, False):
        await gate.ask(post("/v1/chat/completions", chat(stream=stream)))
    # The gate's own health checks use the same connections.
    assert gate.engine.connections <= 2


async def test_a_health_check_that_is_cancelled_with_its_answer_ends(gate: World) -> None:
    pool = EnginePool(str(gate.engine.socket_path), asyncio.get_running_loop())
    receivers: list[Receiver] = []

    def send(payload: bytes, receiver: Receiver) -> Call:
        receivers.append(receiver)
        return Call(payload, receiver)

    pool.send = send  # type: ignore[method-assign]
    check = asyncio.create_task(pool.get("/health"))
    await until(lambda: receivers)
    receivers[0].engine_head(200, b"", 0)
    receivers[0].engine_body(b"", True)
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
