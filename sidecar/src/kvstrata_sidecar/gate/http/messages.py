"""Interface of the server and its services: requests, limits, events of a response, and memory in use."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

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
    """Open ones, from the end of their TLS handshake on."""
    connections_per_address: int = 1024
    handshakes: int = 256
    """Those before it, and those that wait at a bound of the others and have not asked."""
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


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """`headers` by lower-case name, `path` without its query, `body` complete when served. The service's `check_head`
    sets `subject` for its `serve`, and the `id` of its answer. `peer` is the common name of the client's certificate,
    empty without one."""

    method: bytes = b""
    path: bytes = b""
    query: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    subject: Any = None
    id: bytes = b""
    peer: str = ""


class Exchange:
    """Events for the owner of a response; ignored by default."""

    __slots__ = ()

    def client_gone(self) -> None:
        """The caller has closed; nothing can be written any more."""

    def client_paused(self) -> None:
        """The caller reads too slowly: stop producing."""

    def client_resumed(self) -> None:
        """The caller has caught up."""


@dataclass(slots=True, eq=False)
class TaskExchange(Exchange):
    """A response that a task makes; the task ends when the caller has gone."""

    task: asyncio.Task[None]

    def client_gone(self) -> None:
        self.task.cancel()


@dataclass(slots=True, eq=False)
class Amounts:
    """Amounts by owner, and their total. Owners without any are forgotten."""

    total: int = 0
    _by_owner: dict[Hashable, int] = field(default_factory=dict)

    def of(self, owner: Hashable) -> int:
        return self._by_owner.get(owner, 0)

    def add(self, owner: Hashable, amount: int) -> None:
        self.total += amount
        if left := self.of(owner) + amount:
            self._by_owner[owner] = left
        else:
            self._by_owner.pop(owner, None)

    def remove(self, owner: Hashable, amount: int) -> None:
        """Must have been added for the same owner."""
        self.add(owner, -amount)


class Buffered(Amounts):
    """Bytes of requests in memory by caller. `check_head` identifies the caller."""

    __slots__ = ("_limits",)

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits

    def refusal(self, caller: Hashable, more: int) -> Refusal | None:
        if self.of(caller) + more > self._limits.buffered_bytes_per_caller:
            return Refusal(
                429, Reason.TENANT_OVERLOADED, "too many large requests of this tenant at once on this replica",
                retry_after_s=1,
            )  # fmt: skip
        if self.total + more > self._limits.buffered_bytes:
            return Refusal(503, Reason.OVERLOADED, "too many large requests at once", retry_after_s=1)
        return None
