"""The operator's requests over mutual TLS: state, pools, erasure, keys.

`GET /v1/state?after=<acked revision>&wait=<seconds>` is answered at once if the acknowledged revision is not `after`;
otherwise when anything in the state changes, and after `wait` seconds at the latest. With the last entity tag as
`If-None-Match`, changes between two polls are also reported at once. A caller that disconnects ends its other work.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from kvstrata.contract import ContractError
from kvstrata.contract.messages.audit import Action
from kvstrata.contract.messages.key_delivery import CONTENT_TYPE
from kvstrata.contract.messages.pod_state import ACK_TOKEN_HEADER, OPERATOR_COMMON_NAME, STATE_PATH, PodState
from kvstrata.contract.messages.pools import MAX_REQUEST_BYTES
from kvstrata.contract.wire import Message
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.adapter_link import without_counts
from kvstrata_sidecar.gate.audit import Audit
from kvstrata_sidecar.gate.http.errors import Reason, Refusal, bad_request
from kvstrata_sidecar.gate.http.messages import Limits, Request
from kvstrata_sidecar.gate.http.server import ServerConnection

MAX_WAIT_S = 120.0
CONTROL_LIMITS = Limits(body_bytes=MAX_REQUEST_BYTES, buffered_bytes=16 * MAX_REQUEST_BYTES)
"""Half of the buffer is one caller's; the operator, the only caller, may have eight requests under way."""

_TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Route:
    """Work for the operator. `decode` reads a POST's body, or a GET's query, and raises ContractError; without it
    `work` takes a body of data keys, and overwrites it. `work` may raise Refusal."""

    decode: Callable[[bytes], Any] | None
    work: Callable[[Any], Awaitable[Message]]

    async def answer(self, asked: bytes | bytearray) -> bytes:
        """Raises Refusal: 400 for a malformed request, and those of the work."""
        if self.decode is None:
            return (await self.work(asked)).encode()
        try:
            request = self.decode(bytes(asked))
        except ContractError:
            raise bad_request(Reason.BAD_VALUE, "the body is no request for this path") from None
        return (await self.work(request)).encode()


@dataclass(eq=False)
class ControlService:
    """`routes` has the requests beside the state, by method and path."""

    state: Callable[[], PodState]
    token_file: Path
    loop: asyncio.AbstractEventLoop
    routes: Mapping[tuple[bytes, str], Route]
    audit: Audit
    _polls: set[ServerConnection] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._methods: dict[str, tuple[bytes, ...]] = {STATE_PATH: (b"GET",)}
        for method, path in self.routes:
            self._methods[path] = (*self._methods.get(path, ()), method)

    def check_head(self, request: Request) -> None:
        if request.peer != OPERATOR_COMMON_NAME:
            raise Refusal(403, Reason.UNAUTHENTICATED, "this port is the operator's")
        request.subject = request.peer
        path, method = request.path.decode("latin-1"), request.method
        methods = self._methods.get(path)
        if methods is None:
            raise Refusal(404, Reason.NOT_FOUND, f"the paths here are {', '.join(self._methods)}")
        if method not in methods:
            allowed = b", ".join(methods).decode()
            raise Refusal(405, Reason.METHOD, f"use {allowed} here", allow=allowed)
        if method == b"POST":
            wanted = CONTENT_TYPE if self.routes[method, path].decode is None else "application/json"
            if request.headers.get(b"content-type") != wanted.encode():
                raise Refusal(415, Reason.ENCODING, f"send 'Content-Type: {wanted}'")
        has_body = request.headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in request.headers
        if method == b"GET" and has_body:
            raise Refusal(413, Reason.TOO_LARGE, "a question without a body is asked here")

    def serve(self, request: Request, connection: ServerConnection) -> None:
        route = self.routes.get((request.method, request.path.decode("latin-1")))
        if route is not None:
            asked = request.body if request.method == b"POST" else request.query
            connection.serve_by(self._run(connection, route, asked))
            return
        query = parse_qs(request.query.decode("latin-1"))
        try:
            after = int(query.get("after", ["-1"])[0])
            wait_s = min(max(float(query.get("wait", ["0"])[0]), 0.0), MAX_WAIT_S)
        except ValueError:
            raise bad_request(Reason.BAD_VALUE, "'after' is a revision and 'wait' a number of seconds") from None
        state = self.state()
        tag = entity_tag(state)
        known = request.headers.get(b"if-none-match", tag)
        if state.acked != after or known != tag or not wait_s > 0:
            self._answer(connection, state)
        else:
            connection.serve_by(self._poll(connection, tag, wait_s))

    def refused(self, request: Request, _: Refusal) -> None:
        """Record foreign callers only; the operator logs its own mistakes."""
        if request.peer != OPERATOR_COMMON_NAME:
            self.audit.request(Action.REQUESTS_REFUSED, "not_the_operator")

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Answer waiting callers; the server then ends their tasks."""
        for connection in self._polls:
            self._answer(connection, self.state())

    async def _run(self, connection: ServerConnection, route: Route, asked: bytes | bytearray) -> None:
        try:
            answer = await route.answer(asked)
        except Refusal as refusal:
            connection.refuse(refusal)
        except Exception as error:
            log.warning("work for the operator failed", error=type(error).__name__)
            connection.refuse(Refusal(500, Reason.ENGINE, "this could not be done"))
        else:
            self._reply(connection, answer, b"")

    async def _poll(self, connection: ServerConnection, tag: bytes, wait_s: float) -> None:
        give_up_at_s = self.loop.time() + wait_s
        self._polls.add(connection)
        try:
            while entity_tag(self.state()) == tag and (left_s := give_up_at_s - self.loop.time()) > 0:
                # Freshness ends without an event, so the state is also checked periodically.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(_TICK_S, left_s)):
                        await self._changed.wait()
        finally:
            self._polls.discard(connection)
        self._answer(connection, self.state())

    def _answer(self, connection: ServerConnection, state: PodState) -> None:
        self._reply(connection, state.encode(), b"ETag: %s\r\n" % entity_tag(state))

    def _reply(self, connection: ServerConnection, body: bytes, extra: bytes) -> None:
        try:
            token = self.token_file.read_bytes().strip()
        except OSError:
            connection.refuse(Refusal(503, Reason.NO_POLICY, "the pod's token cannot be read", retry_after_s=1))
            return
        connection.reply(200, body, extra=b"%s: %s\r\n%s" % (ACK_TOKEN_HEADER.encode(), token, extra))


def entity_tag(state: PodState) -> bytes:
    """Return a tag that changes with everything worth an answer: not with ages, counters and use."""
    tiers = tuple(map(without_counts, state.tiers))
    stable = replace(state, fresh_age_ms=0, tiers=tiers, usage=(), usage_left_out=0, tier_usage=())
    return b'"%s"' % hashlib.sha256(stable.encode()).hexdigest()[:16].encode()
