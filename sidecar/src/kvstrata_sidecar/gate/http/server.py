"""HTTP/1.1 server: one request at a time, read whole, refused on any doubt.

A protocol on raw asyncio with llhttp as the parser; no task per request. Anything that two parsers could frame
differently is refused (repeated framing headers, Content-Length with Transfer-Encoding, pipelining, upgrades,
HTTP/1.0), because the gate must never disagree with a proxy in front of it about where a request ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools

from kvstrata_sidecar.gate.http.errors import Reason, Refusal, bad_request
from kvstrata_sidecar.gate.http.messages import STATUS_LINES, Buffered, Exchange, Limits, Request, Service

_SINGLE = frozenset(
    (b"content-length", b"content-type", b"content-encoding", b"transfer-encoding", b"authorization", b"x-api-key",
     b"host", b"expect", b"if-none-match")
)  # fmt: skip
_LINGER_S = 2.0


class HttpServer:
    def __init__(self, service: Service, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.service = service
        self.limits = limits
        self.loop = loop
        self.connections: set[ServerConnection] = set()
        self.buffered = Buffered(limits)
        self.closing_after_response = False
        """Every response closes its connection: set while draining, so that callers move to other pods, and always for
        ports with one-off requests."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._listeners: list[asyncio.Server] = []

    async def listen(self, **arguments: Any) -> asyncio.Server:
        """As `loop.create_server`; the first call starts the timeout sweeper."""
        if arguments.get("ssl") is not None:
            # No other limit covers a connection during its handshake or after it was turned away.
            arguments.setdefault("ssl_handshake_timeout", self.limits.head_s)
            arguments.setdefault("ssl_shutdown_timeout", self.limits.tls_shutdown_s)
        listener = await self.loop.create_server(lambda: ServerConnection(self), **arguments)
        self._listeners.append(listener)
        if self._sweeper is None:
            self._sweep()
        return listener

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in tuple(self.connections):
            connection.abort()

    def make_room(self) -> bool:
        """Make room for one connection, if necessary by ending one without a request; False if all serve."""
        if len(self.connections) < self.limits.connections:
            return True
        victim = min((c for c in self.connections if not c.serving), key=_patience_left, default=None)
        if victim is None:
            return False
        refusal = Refusal(503, Reason.CONNECTIONS, "too many connections to this replica")
        self.service.refused(victim.request, refusal)
        self.connections.discard(victim)  # `connection_lost` is called later
        victim.abort()
        return True

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in [c for c in self.connections if c.deadline <= now]:
            connection.expired()
        self._sweeper = self.loop.call_later(1.0, self._sweep)


def _patience_left(connection: ServerConnection) -> tuple[bool, float]:
    # A connection with an accepted head that sends a body is ended last.
    return connection.sends_body, connection.deadline


class ServerConnection(asyncio.Protocol):
    """One client connection. Between `serve` and `end` it belongs to an exchange."""

    __slots__ = (
        "_complete", "_exchange", "_expect", "_head_bytes", "_head_done", "_held_bytes", "_is_ambiguous", "_keep_alive",
        "_lingering", "_parser", "_refusal", "_target", "deadline", "paused", "peer", "request", "server", "serving",
        "transport",
    )  # fmt: skip

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self.peer = ""
        self.deadline = 0.0
        self.paused = False
        self._held_bytes = 0
        self._exchange: Exchange | None = None
        self.serving = False
        self._lingering = False
        self._parser: Any = httptools.HttpRequestParser(self)
        self._reset()

    def _reset(self) -> None:
        self.request = Request()
        self._target = b""
        self._head_bytes = 0
        self._head_done = False
        self._complete = False
        self._expect = False
        self._keep_alive = True
        self._refusal: Refusal | None = None
        self._is_ambiguous = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if not self.server.make_room():
            self._turn_away()
            return
        certificate = transport.get_extra_info("peercert")
        if certificate:
            self.peer = common_name(certificate)
        self.deadline = self.server.loop.time() + self.server.limits.head_s
        self.server.connections.add(self)

    def _turn_away(self) -> None:
        refusal = Refusal(503, Reason.CONNECTIONS, "too many connections to this replica", retry_after_s=1)
        self._lingering = True
        self._keep_alive = False
        self.server.service.refused(self.request, refusal)
        body = refusal.body()
        self.transport.write(
            b"%sContent-Type: application/json\r\nContent-Length: %d\r\n%s%s%s"
            % (STATUS_LINES[refusal.status], len(body), refusal.headers(), self.head_end(), body)
        )
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's signature)
        self.server.connections.discard(self)
        # The parser refers to this object and keeps it, with TLS buffers, until a full garbage collection.
        self._parser = None
        self._forget_body()
        self.let_go()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()

    def pause_writing(self) -> None:
        self.paused = True
        if self._exchange is not None:
            self.deadline = self.server.loop.time() + self.server.limits.stalled_write_s
            self._exchange.client_paused()

    def resume_writing(self) -> None:
        self.paused = False
        if self._exchange is not None:
            self.deadline = float("inf")
            self._exchange.client_resumed()

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self.serving:
            # Bytes behind a whole request: no clean answer is possible in the middle of another one.
            self.server.service.refused(self.request, bad_request(Reason.PIPELINING, "pipelining is not supported"))
            self.abort()
            return
        if not self._head_done:
            if self._head_bytes == 0:
                self.deadline = self.server.loop.time() + self.server.limits.head_s
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(bad_request(Reason.MALFORMED_HTTP, "protocol upgrades are not supported"))
        except httptools.HttpParserError as error:
            self._refuse(bad_request(Reason.MALFORMED_HTTP, f"malformed HTTP request ({error})"))
        if not self._head_done and self._head_bytes > self.server.limits.head_bytes:
            self._refuse(Refusal(431, Reason.TOO_LARGE, "the request's head is too large"))
        if self._refusal is not None:
            self.refuse(self._refusal)
        elif self._complete:
            self._serve()

    # Parser callbacks must not raise: they record a refusal, which data_received answers.

    def on_message_begin(self) -> None:
        if self._complete:
            self._refuse(bad_request(Reason.PIPELINING, "pipelining is not supported"))

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self.server.limits.target_bytes:
            self._refuse(Refusal(431, Reason.TOO_LARGE, "the request's target is too long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A repeated framing or authentication header is refused, and so is a trailer."""
        if self._refusal is not None:
            return
        headers = self.request.headers
        key = name.lower()
        if self._head_done:
            self._refuse(bad_request(Reason.MALFORMED_HTTP, "trailers are not supported"))
        elif key in headers and key in _SINGLE:
            self._refuse(bad_request(Reason.MALFORMED_HTTP, f"the header {key.decode()} is given more than once"))
        elif len(headers) >= self.server.limits.headers:
            self._refuse(Refusal(431, Reason.TOO_LARGE, "the request has too many headers"))
        else:
            headers[key] = value

    def on_headers_complete(self) -> None:
        self._head_done = True
        if self._refusal is not None or self._complete:
            return
        try:
            self._check_framing()
            self.server.service.check_head(self.request)
        except Refusal as refusal:
            self._refuse(refusal)
            return
        self.deadline = self.server.loop.time() + self.server.limits.body_s
        if self._expect:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._refusal is not None or self._complete:
            return
        request, server = self.request, self.server
        if len(request.body) + len(body) > server.limits.body_bytes:
            self._refuse(self._too_large())
        elif (refusal := server.buffered.refusal(request.subject, len(body))) is not None:
            self._refuse(refusal)
        else:
            request.body += body
            server.buffered.add(request.subject, len(body))

    @property
    def sends_body(self) -> bool:
        """Whether a request's head was accepted and its body is arriving."""
        return self._head_done and not self.serving and not self._lingering

    def on_message_complete(self) -> None:
        self._complete = True

    def _check_framing(self) -> None:
        request, headers = self.request, self.request.headers
        if self._parser.get_http_version() != "1.1":
            raise Refusal(505, Reason.MALFORMED_HTTP, "only HTTP/1.1 is supported")
        request.method = self._parser.get_method()
        request.path, _, request.query = self._target.partition(b"?")
        request.peer = self.peer
        self._keep_alive = self._parser.should_keep_alive()
        if b"upgrade" in headers:
            raise bad_request(Reason.MALFORMED_HTTP, "protocol upgrades are not supported")
        encoding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
        if encoding is not None and length is not None:
            raise bad_request(Reason.MALFORMED_HTTP, "Content-Length and Transfer-Encoding exclude each other")
        if encoding is not None and encoding.strip().lower() != b"chunked":
            raise bad_request(Reason.MALFORMED_HTTP, "the only transfer encoding supported is 'chunked'")
        if length is not None and int(length) > self.server.limits.body_bytes:
            raise self._too_large()
        expect = headers.get(b"expect")
        if expect is not None and expect.lower() != b"100-continue":
            raise Refusal(417, Reason.MALFORMED_HTTP, "the only expectation supported is '100-continue'")
        self._expect = expect is not None and not self._complete

    def _too_large(self) -> Refusal:
        return Refusal(413, Reason.TOO_LARGE, f"the body exceeds {self.server.limits.body_bytes} bytes")

    def _refuse(self, refusal: Refusal) -> None:
        if refusal.reason in (Reason.MALFORMED_HTTP, Reason.PIPELINING):
            self._is_ambiguous = True
        if self._refusal is None:
            self._refusal = refusal

    def _serve(self) -> None:
        self.serving = True
        self.deadline = float("inf")
        try:
            self.server.service.serve(self.request, self)
        except Refusal as refusal:
            self.refuse(refusal)

    def hold(self, exchange: Exchange) -> None:
        self._exchange = exchange
        if self.paused:
            exchange.client_paused()

    def refuse(self, refusal: Refusal) -> None:
        self.server.service.refused(self.request, refusal)
        if not self._complete or self._is_ambiguous or self.request.subject is None:
            self._keep_alive = False
        self.reply(refusal.status, refusal.body(), extra=refusal.headers())

    def reply(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        head = b"%sContent-Type: %s\r\nContent-Length: %d\r\n%s%s" % (
            STATUS_LINES[status], content_type, len(body), extra, self.head_end(),
        )  # fmt: skip
        self.transport.write(head + body)
        self.end()

    def head_end(self) -> bytes:
        if self.server.closing_after_response:
            self._keep_alive = False
        return b"\r\n" if self._keep_alive else b"Connection: close\r\n\r\n"

    def end(self) -> None:
        self._exchange = None
        self.serving = False
        self._forget_body()
        now = self.server.loop.time()
        if self._keep_alive:
            self._reset()
            self.deadline = now + self.server.limits.idle_s
            return
        self._lingering = True
        if self._complete:
            self.deadline = now + self.server.limits.stalled_write_s
            self.transport.close()
        else:
            # Closing with unread data would reset the connection before the caller reads the answer.
            self.deadline = now + _LINGER_S

    def end_broken(self) -> None:
        self._exchange = None
        self._forget_body()
        self.deadline = self.server.loop.time() + self.server.limits.body_s
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    def expired(self) -> None:
        """Answer a half-sent request with 408, drop everything else."""
        begun = self._head_bytes > 0 and not self.serving and not self._lingering
        self.deadline = float("inf")
        if begun:
            self._keep_alive = False
            self.refuse(Refusal(408, Reason.TIMEOUT, "the request was not sent in time"))
        else:
            self.abort()

    def _forget_body(self) -> None:
        self.server.buffered.remove(self.request.subject, len(self.request.body))
        self.request.body = bytearray()

    def release_body(self, held_bytes: int) -> None:
        self._forget_body()
        self._held_bytes = held_bytes
        self.server.buffered.add(self.request.subject, held_bytes)

    def let_go(self) -> None:
        self.server.buffered.remove(self.request.subject, self._held_bytes)
        self._held_bytes = 0


def common_name(certificate: dict[str, Any]) -> str:
    """Return the common name of a verified certificate from `ssl`, or an empty string."""
    for part in certificate.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return ""
