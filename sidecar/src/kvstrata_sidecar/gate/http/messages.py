"""Interface between the server and its services: requests, calls, limits, and memory in use for requests."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from kvstrata_sidecar.gate.http.errors import Reason, Refusal

STATUS_LINES = {
    code: f"HTTP/1.1 {code} {phrase}\r\n".encode()
    for code, phrase in {
        100: "Continue", 200: "OK", 201: "Created", 204: "No Content", 400: "Bad Request", 401: "Unauthorized",
        403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout",
        413: "Content Too Large", 415: "Unsupported Media Type", 417: "Expectation Failed",
        422: "Unprocessable Content", 429: "Too Many Requests", 431: "Request Header Fields Too Large",
        500: "Internal Server Error", 501: "Not Implemented", 502: "Bad Gateway", 503: "Service Unavailable",
        504: "Gateway Timeout", 505: "HTTP Version Not Supported",
    }.items()
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    connections: int = 256
    head_bytes: int = 32 * 1024
    headers: int = 100
    target_bytes: int = 2048
    body_bytes: int = 8 * 1024 * 1024
    buffered_bytes: int = 64 * 1024 * 1024
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0
    stalled_write_s: float = 300.0
    tls_shutdown_s: float = 5.0
    """Timeout for a caller's answer to the end of TLS, and for unread data."""

    @property
    def buffered_bytes_per_caller(self) -> int:
        """One caller's part of `buffered_bytes`: half, so that none locks out others, but at least one body."""
        return max(self.buffered_bytes // 2, self.body_bytes)


class Request:
    """`headers` by lower-case name, `path` without its query, `body` complete when served."""

    __slots__ = ("body", "headers", "method", "path", "peer", "query", "subject")

    def __init__(self) -> None:
        self.method = b""
        self.path = b""
        self.query = b""
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.subject: Any = None
        """Set by the service's `check_head`, for its `serve`."""
        self.peer = ""
        """Common name of the client's certificate; empty without one."""


class Connection(Protocol):
    """A service answers on it."""

    @property
    def transport(self) -> asyncio.Transport:
        """For the owner of the response, between `hold` and `end`."""

    def hold(self, exchange: Exchange) -> None:
        """Notify `exchange` about this caller until the response ends."""

    def release_body(self, held_bytes: int) -> None:
        """The body is no longer needed; `held_bytes` of it count as buffered until `let_go`."""

    def let_go(self) -> None:
        """The service holds nothing of the request any more."""

    def head_end(self) -> bytes:
        """Return the last lines of a response's head."""

    def reply(self, status: int, body: bytes, content_type: bytes = ..., extra: bytes = ...) -> None:
        """Send a whole response and end the exchange."""

    def refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal."""

    def end(self) -> None:
        """The response is written: await the next request, or close."""

    def end_broken(self) -> None:
        """Send buffered data, then close without ending the response, so that the caller sees it cut."""


class Exchange(Protocol):
    """Events for the owner of a response."""

    def client_gone(self) -> None:
        """The caller has closed; nothing can be written any more."""

    def client_paused(self) -> None:
        """The caller reads too slowly: stop producing."""

    def client_resumed(self) -> None:
        """The caller has caught up."""


class Service(Protocol):
    def check_head(self, request: Request) -> None:
        """Raise Refusal for a bad head, before a body is read."""

    def serve(self, request: Request, connection: Connection) -> None:
        """Answer, now or later, by calls on `connection`. May raise Refusal."""

    def refused(self, request: Request, refusal: Refusal) -> None:
        """Record a refusal that the connection answers."""


class Buffered:
    """Bytes of requests in memory, in total and by caller. `check_head` identifies the caller."""

    __slots__ = ("_by_caller", "_limits", "total")

    def __init__(self, limits: Limits) -> None:
        self.total = 0
        self._limits = limits
        self._by_caller: dict[Hashable, int] = {}

    def refusal(self, caller: Hashable, more: int) -> Refusal | None:
        if self._by_caller.get(caller, 0) + more > self._limits.buffered_bytes_per_caller:
            return Refusal(
                429, Reason.TENANT_OVERLOADED, "too many large requests of this tenant at once on this replica",
                retry_after_s=1,
            )  # fmt: skip
        if self.total + more > self._limits.buffered_bytes:
            return Refusal(503, Reason.OVERLOADED, "too many large requests at once", retry_after_s=1)
        return None

    def add(self, caller: Hashable, count: int) -> None:
        if count:
            self.total += count
            self._by_caller[caller] = self._by_caller.get(caller, 0) + count

    def remove(self, caller: Hashable, count: int) -> None:
        """Must have been added for the same caller."""
        if count:
            self.total -= count
            left = self._by_caller.pop(caller) - count
            if left:
                self._by_caller[caller] = left
