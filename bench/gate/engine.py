"""The engine stand-in: answers chat completions as vLLM frames them, and costs next to nothing.

`python -m bench.gate.engine --socket PATH --port PORT`: the same server on a unix socket and on a TCP port of the
loopback. A request with `"stream": true` gets `max_tokens` events, the first at once and then one every
`EVENT_INTERVAL_S`; each event's text is `@` and the time of CLOCK_MONOTONIC (nanoseconds) at which it was written.
`GET /last` returns the body of the last request, so that a benchmark can see how a proxy changed it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from pathlib import Path

import uvloop

EVENT_INTERVAL_S = 0.02

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": ?true')
_USAGE = re.compile(rb'"include_usage": ?true')
_EVENTS = re.compile(rb'"max_tokens": ?(\d+)')
_TOKENS = {"prompt_tokens": 2048, "completion_tokens": 64, "total_tokens": 2112}
_ANSWER = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion",
        "created": 1760000000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "one token, another " * 16},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {**_TOKENS, "prompt_tokens_details": {"cached_tokens": 1024}},
    },
    separators=(",", ":"),
).encode()
_CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1760000000,'
    b'"model":"tiny","choices":[{"index":0,"delta":{"content":"@%020d"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_USAGE_CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1760000000,'
    b'"model":"tiny","choices":[],"usage":%s}\n\n'
) % json.dumps(_TOKENS, separators=(",", ":")).encode()
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class Engine(asyncio.Protocol):
    """One connection; requests come one after another."""

    last_body = b"{}"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pieces: list[bytes] = []
        self._missing = 0
        self._head = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's signature)
        """Let running streams see that the caller has disconnected."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Collect a request by its Content-Length and answer it."""
        self._pieces.append(data)
        if self._missing:
            self._missing -= len(data)
            if self._missing:
                return
        else:
            data = b"".join(self._pieces)
            end = data.find(b"\r\n\r\n")
            self._pieces = [data]
            if end < 0:
                return
            found = _LENGTH.search(data, 0, end)
            self._head = data[:end]
            self._missing = (int(found[1]) if found else 0) - (len(data) - end - 4)
            self._pieces = [data[end + 4 :]]
            if self._missing:
                return
        body = b"".join(self._pieces)
        self._pieces = []
        self._answer(body)

    def _answer(self, body: bytes) -> None:
        if self._head.startswith(b"GET "):
            self._whole(Engine.last_body if self._head.startswith(b"GET /last ") else b"{}")
            return
        Engine.last_body = body
        if _STREAM.search(body):
            events = _EVENTS.search(body)
            self._stream(int(events[1]) if events else 1, _USAGE.search(body) is not None)
        else:
            self._whole(_ANSWER)

    def _whole(self, body: bytes) -> None:
        assert self._transport is not None  # noqa: S101
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )

    def _stream(self, events: int, usage: bool) -> None:
        assert self._transport is not None  # noqa: S101
        self._transport.write(_STREAM_HEAD + _chunked(_CHUNK % time.monotonic_ns()))
        self._next(self._loop.time(), events - 1, usage)

    def _next(self, at: float, left: int, usage: bool) -> None:
        if left:
            at += EVENT_INTERVAL_S
            self._loop.call_at(at, self._event, at, left, usage)
        elif self._transport is not None:
            tail = _chunked(_USAGE_CHUNK) if usage else b""
            self._transport.write(tail + _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _event(self, at: float, left: int, usage: bool) -> None:
        if self._transport is not None:
            self._transport.write(_chunked(_CHUNK % time.monotonic_ns()))
            self._next(at, left - 1, usage)


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(socket_path: Path, port: int) -> None:
    """Serve until cancelled."""
    loop = asyncio.get_running_loop()
    by_socket = await loop.create_unix_server(lambda: Engine(loop), str(socket_path), backlog=1024)
    by_port = await loop.create_server(lambda: Engine(loop), "127.0.0.1", port, backlog=1024)
    await asyncio.gather(by_socket.serve_forever(), by_port.serve_forever())


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.socket, arguments.port))


if __name__ == "__main__":
    main()
