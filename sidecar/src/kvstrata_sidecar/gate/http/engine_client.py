"""HTTP client for the engine and for LMCache's pages: keeps connections and streams answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import httptools

_KEEP_IDLE_S = 3.0
"""Below the engine server's five seconds for idle connections."""
_CONNECT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 8 * 1024 * 1024
_MAX_EVENT_BYTES = 4096
_SIZE_LINES = {len(line) + size + 2: line for size in range(1, _MAX_EVENT_BYTES + 1) for line in (b"%x\r\n" % size,)}
"""The first line of a chunk by the chunk's total length, which determines its size."""


def post_head(path: bytes, body_bytes: int, lines: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
    return head % (path, body_bytes, lines)


class Receiver(Protocol):
    """Receives an engine's answer. After the last piece or `engine_failed` nothing more comes."""

    def engine_head(self, status: int, content_type: bytes, length: int | None) -> None:
        """The head of the answer; `length` is None for a chunked one. `engine_body` follows at once."""

    def engine_body(self, data: bytes, last: bool) -> None:
        """A piece of the body without transfer framing, perhaps empty; with the `last` one the answer is complete."""

    def writer_of_events(self) -> Callable[[bytes], None] | None:
        """Return a writer for whole events until the next `engine_body`; None: all go through `engine_body`. It gets
        one chunk in the gate's own framing that ends an event and holds no `"usage"`."""

    def engine_failed(self, unreachable: bool) -> None:
        """The engine cannot be reached (`unreachable`), or it closed before the answer was complete."""


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One request under way, which its owner may pause, resume and cancel. `started`: any byte of an answer has
    arrived. `fresh`: the connection was opened for this call, so that its failure is the engine's."""

    payload: bytes | bytearray
    receiver: Receiver
    connection: EngineConnection | None = None
    cancelled: bool = False
    paused: bool = False
    started: bool = False
    fresh: bool = False

    def cancel(self) -> None:
        """Drop the connection at once: the engine then stops computing."""
        self.cancelled = True
        if self.connection is not None:
            self.connection.drop()

    def pause(self) -> None:
        self.paused = True
        if self.connection is not None:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        self.paused = False
        if self.connection is not None:
            self.connection.transport.resume_reading()


class EnginePool:
    """Connections to the path of a socket or to a port of this pod; the service limits requests in flight."""

    def __init__(self, address: str | int, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        self.loop = loop
        self._idle: deque[EngineConnection] = deque()
        self._connecting: set[asyncio.Task[None]] = set()

    def send(self, payload: bytes | bytearray, receiver: Receiver) -> Call:
        call = Call(payload, receiver)
        now = self.loop.time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < _KEEP_IDLE_S and not connection.transport.is_closing():
                connection.start(call)
                return call
            connection.transport.abort()
        self._open(call)
        return call

    async def get(
        self, path: str, *, timeout_s: float = _CONNECT_TIMEOUT_S, max_bytes: int = MAX_ANSWER_BYTES
    ) -> tuple[int, bytes]:
        payload = f"GET {path} HTTP/1.1\r\nHost: engine\r\n\r\n".encode()
        return await self.ask(payload, timeout_s=timeout_s, max_bytes=max_bytes)

    async def ask(self, payload: bytes, *, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> tuple[int, bytes]:
        """Return status and body of an answer; status 0 without a whole one of at most `max_bytes` in time."""
        answer = WholeAnswer(self.loop, max_bytes)
        answer.call = self.send(payload, answer)
        return await answer.within(timeout_s)

    def close(self) -> None:
        for task in self._connecting:
            task.cancel()
        while self._idle:
            self._idle.pop().transport.abort()

    def _open(self, call: Call) -> None:
        call.fresh = True
        task = self.loop.create_task(self._connect(call))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, call: Call) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, connection = await self._dial()
        except (OSError, TimeoutError):
            if not call.cancelled:
                call.receiver.engine_failed(True)
            return
        if call.cancelled:
            connection.transport.abort()
        else:
            connection.start(call)

    async def _dial(self) -> tuple[asyncio.BaseTransport, EngineConnection]:
        if isinstance(self.address, int):
            return await self.loop.create_connection(lambda: EngineConnection(self), "127.0.0.1", self.address)
        return await self.loop.create_unix_connection(lambda: EngineConnection(self), self.address)

    def failed(self, call: Call) -> None:
        """Retry on a new connection if a kept one died unused: the engine may have closed it before."""
        if call.cancelled:
            return
        if call.started or call.fresh:
            call.receiver.engine_failed(False)
        else:
            self._open(call)

    def keep(self, connection: EngineConnection) -> None:
        while self._idle and self.loop.time() - self._idle[0].idle_since >= _KEEP_IDLE_S:
            self._idle.popleft().transport.abort()
        self._idle.append(connection)


class EngineConnection(asyncio.Protocol):
    __slots__ = (
        "_between_chunks", "_content_type", "_done", "_head", "_keep", "_length", "_parser", "_pieces", "_pool",
        "_write_events", "call", "idle_since", "transport",
    )  # fmt: skip

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self.call: Call | None = None
        self.idle_since = 0.0
        self._parser: Any = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._reset()

    def _reset(self) -> None:
        self._content_type = b"application/octet-stream"
        self._length: int | None = None
        self._head = self._done = self._keep = self._between_chunks = False
        self._write_events: Callable[[bytes], None] | None = None

    def start(self, call: Call) -> None:
        self.call = call
        call.connection = self
        self.transport.write(call.payload)
        if call.paused:
            self.transport.pause_reading()

    def drop(self) -> None:
        self._write_events = None
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's signature)
        self._parser = None  # it refers to this object
        self._write_events = None
        call, self.call = self.call, None
        if call is not None:
            call.connection = None
            self._pool.failed(call)

    def data_received(self, data: bytes) -> None:
        write = self._write_events
        if (
            write is not None
            and (line := _SIZE_LINES.get(len(data))) is not None
            and data[: len(line)] == line
            and data[-4:] == b"\n\n\r\n"
            and b'"usage"' not in data
        ):
            # One whole event in the gate's own framing. The parser is between two chunks and does not need it. Most of
            # a gate's work is here, so it uses slices and a table instead of calls.
            write(data)
            return
        self._write_events = None
        call = self.call
        if call is None:
            self.transport.abort()
            return
        if not call.started:
            call.started = True
            call.payload = b""  # no retry from here on, and streams are long
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()
            return
        # The parser is between chunks if one is complete and no byte of the next one's head arrived with it: those are
        # digits, and if a line's end follows them, `on_chunk_header` is called.
        between_chunks = self._between_chunks and data.endswith(b"\r\n")
        if not call.cancelled:
            self._deliver(call)
            if between_chunks and not self._done:
                self._write_events = call.receiver.writer_of_events()
        if self._done and self.call is call:
            self._give_back(call)

    def _deliver(self, call: Call) -> None:
        receiver, pieces, last = call.receiver, self._pieces, self._done
        if self._head:
            self._head = False
            receiver.engine_head(self._parser.get_status_code(), self._content_type, self._length)
        elif not pieces and not last:
            return
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        receiver.engine_body(body, last)

    def _give_back(self, call: Call) -> None:
        self.call = None
        call.connection = None
        if self._keep and not self.transport.is_closing():
            self.transport.resume_reading()
            self.idle_since = self._pool.loop.time()
            self._reset()
            self._pool.keep(self)
        else:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Drop a connection with data after an answer: it would be read as part of the next one."""
        if self._done:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._done:
            return
        key = name.lower()
        if key == b"content-type":
            self._content_type = value
        elif key == b"content-length":
            self._length = int(value)

    def on_headers_complete(self) -> None:
        if not self._done:
            self._head = True
            # Once the message is complete the parser has forgotten its framing.
            self._keep = self._parser.should_keep_alive()

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_body(self, body: bytes) -> None:
        if not self._done:
            self._pieces.append(body)

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        self._done = True


class WholeAnswer:
    """Collects status and body of an answer; status 0 without one of at most `max_bytes`. `aborted`: by this side."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self.call: Call | None = None
        self.aborted = False
        self.future: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._status = 0
        self._body = bytearray()
        self._max_bytes = max_bytes

    def engine_head(self, status: int, content_type: bytes, length: int | None) -> None:  # noqa: ARG002
        self._status = status

    def engine_body(self, data: bytes, last: bool) -> None:
        self._body += data
        if len(self._body) > self._max_bytes:
            self._status, self._body = 0, bytearray()
            self.drop()
            last = True
        if last:
            self._end(self._status)

    def writer_of_events(self) -> None:
        return

    def engine_failed(self, unreachable: bool) -> None:  # noqa: ARG002
        self._end(0)

    async def within(self, timeout_s: float | None) -> tuple[int, bytes]:
        """Return status and body; status 0 if they do not come in time."""
        try:
            # Not wait_for: on Python 3.11 it swallows a cancellation that comes together with the answer.
            async with asyncio.timeout(timeout_s):
                return await self.future
        except TimeoutError:
            return 0, b""
        finally:
            self.drop()

    def abort(self) -> None:
        """End the call without an answer: the engine stops computing."""
        self.aborted = self.aborted or not self.future.done()
        self.drop()
        self._end(0)

    def drop(self) -> None:
        # A task that is cancelled while it waits cancels the future.
        if self.call is not None and (self.future.cancelled() or not self.future.done()):
            self.call.cancel()
        self.call = None

    def _end(self, status: int) -> None:
        if not self.future.done():
            self.future.set_result((status, bytes(self._body)))
