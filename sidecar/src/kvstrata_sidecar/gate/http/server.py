"""HTTP/1.1 server: one request at a time, read whole, refused on any doubt.

A protocol on raw asyncio with llhttp as the parser; no task per request. Anything that two parsers could frame
differently is refused (repeated framing headers, Content-Length with Transfer-Encoding, pipelining, HTTP/1.0), because
the gate must never disagree with a proxy in front of it about where a request ends. The rest is as RFC 9110 and 9112
have it: an `Upgrade` is ignored, the absolute form is served, `Host` is required.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from typing import Any, Protocol

import httptools

from kvstrata_sidecar.gate.http.errors import Reason, Refusal, bad_request
from kvstrata_sidecar.gate.http.listener import Accepted, Listener
from kvstrata_sidecar.gate.http.messages import STATUS_LINES, Amounts, Buffered, Exchange, Limits, Request, TaskExchange
from kvstrata_sidecar.gate.http.tls import ServerTls

_SINGLE = frozenset(
    (b"content-length", b"content-type", b"content-encoding", b"transfer-encoding", b"authorization", b"x-api-key",
     b"host", b"expect", b"if-none-match")
)  # fmt: skip
_LINGER_S = 2.0
_AUTHORITY = rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]"
_HOST = re.compile(_AUTHORITY + rb"*")
_ABSOLUTE_FORM = re.compile(rb"https?://" + _AUTHORITY + rb"+(?=[/?]|$)", re.IGNORECASE)
_PREFLIGHT_HEADERS = (
    b"Access-Control-Allow-Methods: GET, POST\r\nAccess-Control-Allow-Headers: Authorization, *\r\n"
    b"Access-Control-Max-Age: 7200\r\n"
)


class Service(Protocol):
    def check_head(self, request: Request) -> None:
        """Raise Refusal for a bad head, before a body is read."""

    def serve(self, request: Request, connection: ServerConnection) -> None:
        """Answer, now or later, by calls on `connection`. May raise Refusal."""

    def refused(self, request: Request, refusal: Refusal) -> None:
        """Record a refusal that the connection answers."""


@dataclass(eq=False)
class HttpServer:
    """`allowed_origins` are those of browsers (CORS). With `closing_after_response` every response closes its
    connection: while draining, so that callers move to other pods, and always for ports with one-off requests.
    `serves_probes`: HTTP/1.0 is served, too, as load balancers' probes speak it.
    `opening` has, oldest first, connections in a TLS handshake, those that wait at a bound and have not asked, and
    those that are turned away until they are closed; `connections` has all others."""

    service: Service
    limits: Limits
    loop: asyncio.AbstractEventLoop
    allowed_origins: Collection[bytes] = ()
    closing_after_response: bool = False
    serves_probes: bool = False
    connections: dict[ServerConnection, None] = field(default_factory=dict)
    opening: dict[ServerConnection, None] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _by_address: Amounts = field(default_factory=Amounts)
    _sweeper: asyncio.TimerHandle | None = None
    _listeners: list[Listener] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffered = Buffered(self.limits)
        # By the bound of `Limits`: of all connections, of one peer address's, of those in a handshake.
        self.turned_away = {"connections": 0, "address": 0, "handshakes": 0}

    def listen(self, host: str, port: int, tls: ServerTls | None) -> int:
        """Return the port, which is any free one for 0; the first call starts the timeout sweeper."""
        listener = Listener(self._accept, (host, port), tls, self.limits, self.loop)
        self._listeners.append(listener)
        if self._sweeper is None:
            self._sweep()
        return listener.port

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self.tasks:
            task.cancel()
        for connection in (*self.connections, *self.opening):
            connection.abort()

    def forget(self, connection: ServerConnection) -> None:
        """End the count of a connection that is closed, or will be at once."""
        self.opening.pop(connection, None)
        if connection in self.connections:
            del self.connections[connection]
            self._by_address.remove(connection.address, 1)

    def _accept(self, address: str) -> ServerConnection:
        if len(self.opening) >= self.limits.handshakes:
            self._end_handshake()
        connection = ServerConnection(self, address)
        self.opening[connection] = None
        return connection

    def _end_handshake(self) -> None:
        """End the oldest handshake of the address that has most of them."""
        by_address = Counter(connection.address for connection in self.opening)
        victim = max(self.opening, key=lambda connection: by_address[connection.address])
        self.turned_away["handshakes"] += 1
        self.forget(victim)
        victim.abort()

    def admit(self, connection: ServerConnection, *, asks: bool) -> None:
        """Count a connection whose handshake succeeded. At a bound one that `asks` ends another without a request, and
        one that does not waits. Raises Refusal (503) if all others serve."""
        address, reason, others = connection.address, "", list[ServerConnection]()
        if self._by_address.of(address) >= self.limits.connections_per_address:
            reason, others = "address", [c for c in self.connections if c.address == address]
        elif len(self.connections) >= self.limits.connections:
            reason, others = "connections", list(self.connections)
        if reason:
            victim = min((c for c in others if not c.serving), key=lambda c: c.patience_left, default=None)
            if victim is not None and not asks:
                return
            self.turned_away[reason] += 1
            refusal = Refusal(503, Reason.CONNECTIONS, "too many connections to this replica", retry_after_s=1)
            if victim is None:
                raise refusal
            self.service.refused(victim.request, refusal)
            self.forget(victim)
            victim.abort()
        del self.opening[connection]
        self.connections[connection] = None
        self._by_address.add(address, 1)

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in [c for c in (*self.connections, *self.opening) if c.deadline <= now]:
            connection.expired()
        self._sweeper = self.loop.call_later(1.0, self._sweep)


class ServerConnection(Accepted):
    """One client connection. Between `hold` and `end` its transport belongs to the owner of the response."""

    __slots__ = (
        "_complete", "_exchange", "_expect", "_head_bytes", "_head_done", "_held_bytes", "_ignores_upgrade",
        "_is_ambiguous", "_is_preflight", "_keep_alive", "_lingering", "_named_bytes", "_parser", "_refusal", "_target",
        "address", "deadline", "paused", "peer", "request", "server", "serving", "transport",
    )  # fmt: skip

    def __init__(self, server: HttpServer, address: str) -> None:
        super().__init__()
        self.server = server
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self.address = address
        self.peer = ""
        self.deadline = server.loop.time() + server.limits.head_s
        self.paused = False
        self._held_bytes = 0
        self._exchange: Exchange | None = None
        self.serving = False
        self._lingering = False
        self._parser: Any = None
        self._reset()

    def _reset(self) -> None:
        self.request = Request()
        self._target = b""
        self._head_bytes = self._named_bytes = 0
        self._head_done = self._complete = self._expect = False
        self._keep_alive = True
        self._refusal: Refusal | None = None
        self._is_ambiguous = self._is_preflight = self._ignores_upgrade = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if self not in self.server.opening:  # ended during its handshake
            self.transport.abort()
            return
        if not self._admitted(asks=False):
            return
        self._parser = httptools.HttpRequestParser(self)
        self.peer = common_name(transport.get_extra_info("peercert") or {})
        self.deadline = self.server.loop.time() + self.server.limits.head_s

    def opening_failed(self) -> None:
        self.server.forget(self)

    def _admitted(self, *, asks: bool) -> bool:
        try:
            self.server.admit(self, asks=asks)
        except Refusal as refusal:
            self._lingering, self._complete, self._keep_alive = True, not asks, False
            self.refuse(refusal)
            return False
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's signature)
        self.server.forget(self)
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
        if self._lingering or (self in self.server.opening and not self._admitted(asks=True)):
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
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(bad_request(Reason.MALFORMED_HTTP, f"malformed HTTP request ({error})"))
        if not self._head_done and self._head_bytes > self.server.limits.head_bytes:
            self._refuse(self._head_too_large())
        if self._refusal is not None:
            self.refuse(self._refusal)
        elif self._complete:
            self._serve()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # llhttp stops behind such a head: another parser reads the body, by the same framing headers.
            if self._refusal is None:
                self._ignores_upgrade = False
                self._parser = httptools.HttpRequestParser(_BodyReader(self))
                self._parser.feed_data(_framing_head(self.request.headers))
                self._parser.feed_data(data[upgrade.args[0] :])

    # Parser callbacks must not raise: they record a refusal, which data_received answers.

    def on_message_begin(self) -> None:
        if self._complete:
            self._refuse(bad_request(Reason.PIPELINING, "pipelining is not supported"))

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self.server.limits.target_bytes:
            self._refuse(Refusal(431, Reason.TOO_LARGE, "the request's target is too long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Refuse trailers and repeated framing or authentication headers; lines of other headers form a list."""
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
            headers[key] = headers[key] + b", " + value if key in headers else value
            self._named_bytes += len(name) + len(value)
            if self._named_bytes > self.server.limits.head_bytes:
                self._refuse(self._head_too_large())

    def on_headers_complete(self) -> None:
        self._head_done = True
        if self._refusal is not None or self._complete:
            return
        try:
            self._check_framing()
            if not self._is_preflight:
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
    def patience_left(self) -> tuple[bool, float]:
        """Order in which connections without a request in service are ended; those that send a body are last."""
        return self._head_done and not self._lingering, self.deadline

    def on_message_complete(self) -> None:
        self._complete = not self._ignores_upgrade

    def _check_framing(self) -> None:
        request, headers = self.request, self.request.headers
        is_probe = self.server.serves_probes and self._parser.get_http_version() == "1.0"
        if self._parser.get_http_version() != "1.1" and not is_probe:
            raise Refusal(505, Reason.MALFORMED_HTTP, "only HTTP/1.1 is supported")
        request.method = self._parser.get_method()
        absolute = _ABSOLUTE_FORM.match(self._target)
        target = self._target[absolute.end() :] if absolute is not None else self._target
        request.path, _, request.query = target.partition(b"?")
        request.peer = self.peer
        self._keep_alive = self._parser.should_keep_alive()
        self._ignores_upgrade = self._parser.should_upgrade()
        host = headers.get(b"host")
        if (host is None and not is_probe) or (host is not None and not _HOST.fullmatch(host.strip())):
            raise bad_request(Reason.MALFORMED_HTTP, "exactly one valid Host header is needed")
        self._is_preflight = (
            request.method == b"OPTIONS"
            and headers.get(b"origin") in self.server.allowed_origins
            and b"access-control-request-method" in headers
        )
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

    def _head_too_large(self) -> Refusal:
        return Refusal(431, Reason.TOO_LARGE, f"the request's head exceeds {self.server.limits.head_bytes} bytes")

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
        if self._is_preflight:
            self._keep_alive = False  # it has no key
            self.reply(200, b"", extra=_PREFLIGHT_HEADERS)
            return
        try:
            self.server.service.serve(self.request, self)
        except Refusal as refusal:
            self.refuse(refusal)

    def hold(self, exchange: Exchange) -> None:
        """Notify `exchange` about this caller until the response ends."""
        self._exchange = exchange
        if self.paused:
            exchange.client_paused()

    def serve_by(self, work: Coroutine[Any, Any, None]) -> None:
        """Have a task make the response; it ends when the caller has gone."""
        task = self.server.loop.create_task(work)
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)
        self.hold(TaskExchange(task))

    def refuse(self, refusal: Refusal) -> None:
        self.server.service.refused(self.request, refusal)
        if not self._complete or self._is_ambiguous or self.request.subject is None:
            self._keep_alive = False
        self.reply(refusal.status, refusal.body(self.request.path), extra=refusal.headers())

    def reply(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """Send a whole response; `extra` are further lines of its head."""
        head = b"%sContent-Type: %s\r\nContent-Length: %d\r\n%s%s" % (
            STATUS_LINES[status], content_type, len(body), extra, self.head_end(),
        )  # fmt: skip
        self.transport.write(head if self.request.method == b"HEAD" else head + body)
        self.end()

    def head_end(self) -> bytes:
        """Return the last lines of a response's head."""
        if self.server.closing_after_response:
            self._keep_alive = False
        end = b"Date: %s\r\n%s\r\n" % (_date(int(time.time())), b"" if self._keep_alive else b"Connection: close\r\n")
        if self.request.id:
            end = b"X-Request-Id: %s\r\nRequest-Id: %s\r\n%s" % (self.request.id, self.request.id, end)
        if not self.server.allowed_origins:
            return end
        origin = self.request.headers.get(b"origin")
        if origin not in self.server.allowed_origins:
            return b"Vary: Origin\r\n" + end
        return b"Vary: Origin\r\nAccess-Control-Allow-Origin: %s\r\nAccess-Control-Expose-Headers: *\r\n" % origin + end

    def end(self) -> None:
        """The response is written: await the next request, or close."""
        self._exchange = None
        self.serving = False
        self._forget_body()
        now = self.server.loop.time()
        if self._keep_alive:
            if b"upgrade" in self.request.headers:
                self._parser = httptools.HttpRequestParser(self)
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
        """Send buffered data, then close without ending the response, so that the caller sees it cut."""
        self._exchange = None
        self._forget_body()
        self.deadline = self.server.loop.time() + self.server.limits.body_s
        self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

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
        """The body is no longer needed; `held_bytes` of it count as buffered until `let_go`."""
        self._forget_body()
        self._held_bytes = held_bytes
        self.server.buffered.add(self.request.subject, held_bytes)

    def let_go(self) -> None:
        self.server.buffered.remove(self.request.subject, self._held_bytes)
        self._held_bytes = 0


@lru_cache(maxsize=1)
def _date(now_s: int) -> bytes:
    return formatdate(now_s, usegmt=True).encode()


class _BodyReader:
    """Passes the events of a request's body, behind the head of `_framing_head`, on to its connection."""

    def __init__(self, connection: ServerConnection) -> None:
        self.on_body = connection.on_body
        self.on_message_begin = connection.on_message_begin
        self.on_message_complete = connection.on_message_complete
        self._on_trailer = connection.on_header
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            self._on_trailer(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False


def _framing_head(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the head of a request with only the framing of `headers`, which a parser accepted before."""
    lines = [name + b": " + headers[name] for name in (b"content-length", b"transfer-encoding") if name in headers]
    return b"\r\n".join((b"POST / HTTP/1.1", *lines, b"", b""))


def common_name(certificate: dict[str, Any]) -> str:
    """Return the common name of a verified certificate from `ssl`, or an empty string."""
    named = (pair for part in certificate.get("subject", ()) for pair in part)
    return next((str(value) for key, value in named if key == "commonName"), "")
