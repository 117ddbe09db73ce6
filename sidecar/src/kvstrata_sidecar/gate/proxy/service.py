"""The tenants' service: authenticate, rewrite, grant, relay.

A `Relay` is one request under way. It couples the caller's connection and the engine's: a slow caller slows the
engine's socket, and a caller that disconnects ends the engine's work.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import orjson

from kvstrata.contract.messages.audit import NO_SCOPE, Action
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata_sidecar.gate.audit import Audit
from kvstrata_sidecar.gate.http.engine_client import Call, EnginePool
from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.http.messages import STATUS_LINES, Connection, Request
from kvstrata_sidecar.gate.metrics import NO_TENANT, Metrics, TenantMetrics
from kvstrata_sidecar.gate.policy.api_keys import Keys, credential, unauthenticated
from kvstrata_sidecar.gate.policy.enforcement import Enforcement
from kvstrata_sidecar.gate.policy.grants import decide
from kvstrata_sidecar.gate.proxy import bodies
from kvstrata_sidecar.gate.proxy import strict_json as strictjson
from kvstrata_sidecar.gate.proxy.usage import DocumentUsage, EventUsage

_EVENT_STREAM = b"text/event-stream"
_MAX_ERROR_BYTES = 256 * 1024
_POST_PATHS = frozenset(bodies.ENDPOINTS)


def random_salt() -> str:
    return secrets.token_hex(16)


class TenantService:
    def __init__(
        self,
        *,
        model: str,
        keys: Keys,
        enforcement: Enforcement,
        engine: EnginePool,
        metrics: Metrics,
        audit: Audit,
        clock: Callable[[], float],
        max_in_flight: int,
        max_in_flight_per_tenant: int,
        random_salt: Callable[[], str] = random_salt,
    ) -> None:
        self.model = model
        self.keys = keys
        self.enforcement = enforcement
        self.engine = engine
        self.metrics = metrics
        self.audit = audit
        self.clock = clock
        self.max_in_flight = max_in_flight
        self.max_in_flight_per_tenant = max_in_flight_per_tenant
        self._in_flight_by_tenant: dict[str, int] = {}
        self.random_salt = random_salt
        self._models = orjson.dumps(
            {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "kvstrata"}]}
        )

    def check_head(self, request: Request) -> None:
        path, method = request.path, request.method
        if path not in _POST_PATHS and path != bodies.MODELS_PATH:
            raise Refusal(404, Reason.NOT_FOUND, "this gate serves chat, completions, messages and the model list only")
        allowed = b"GET" if path == bodies.MODELS_PATH else b"POST"
        if method != allowed:
            raise Refusal(405, Reason.METHOD, f"use {allowed.decode()} here", allow=allowed.decode())
        tenant = self.keys.ring.tenant_of(credential(request.headers))
        if tenant is None:
            raise unauthenticated("this API key is not known")
        request.subject = tenant
        if b"content-encoding" in request.headers:
            raise Refusal(415, Reason.ENCODING, "send the body without content encoding")
        if method == b"POST":
            _require_json(request.headers.get(b"content-type", b""))

    def serve(self, request: Request, connection: Connection) -> None:
        tenant: str = request.subject
        if request.path == bodies.MODELS_PATH:
            decide(self.enforcement.bundle, tenant, self.enforcement.fresh(), self.random_salt)
            self._count(request, 200)
            connection.reply(200, self._models)
            return
        received_at = self.clock()
        endpoint = bodies.ENDPOINTS[request.path]
        grant = decide(self.enforcement.bundle, tenant, self.enforcement.fresh(), self.random_salt)
        if len(self.enforcement.in_flight) >= self.max_in_flight:
            raise Refusal(429, Reason.OVERLOADED, "too many requests in flight on this replica", retry_after_s=1)
        in_flight = self._in_flight_by_tenant.get(tenant, 0)
        if in_flight >= self.max_in_flight_per_tenant:
            raise Refusal(
                429, Reason.TENANT_OVERLOADED, "too many requests of this tenant in flight on this replica",
                retry_after_s=1,
            )  # fmt: skip
        body = strictjson.parse_object(request.body)
        self._check_model(body)
        rewritten = bodies.rewrite(endpoint, body)
        payload = strictjson.emit(rewritten.seal(self.model, grant.salt))
        numbers = self.metrics.tenant(tenant)
        relay = Relay(self, connection, numbers, tenant, endpoint.path, grant.salt, received_at)
        relay.strip_usage = rewritten.strip_usage
        # The engine may begin; no part of its answer, and no other policy, arrives before this call returns.
        relay.call = self.engine.send(_request_bytes(endpoint.path, payload), relay)
        self._in_flight_by_tenant[tenant] = in_flight + 1
        self.enforcement.admit(relay, tenant, grant.salt if grant.keyspace else "")
        if not grant.keyspace:
            numbers.no_reuse += 1
        self._record(Action.REQUESTS_SERVED if grant.keyspace else Action.REUSE_REFUSED, tenant, grant.withheld)
        connection.release_body(held_bytes=len(payload))
        connection.hold(relay)

    def ended(self, relay: Relay, tenant: str) -> None:
        left = self._in_flight_by_tenant.pop(tenant) - 1
        if left:
            self._in_flight_by_tenant[tenant] = left
        self.enforcement.release(relay)

    def refused(self, request: Request, refusal: Refusal) -> None:
        self.denied(refusal.reason, request.subject or "")
        self._count(request, refusal.status)

    def denied(self, reason: Reason, tenant: str) -> None:
        """Count a request that the gate refused or ended, by reason; an engine's failure is no refusal."""
        self.metrics.refused(str(reason))
        if reason is not Reason.ENGINE:
            self._record(Action.REQUESTS_REFUSED, tenant, str(reason))

    def _record(self, action: Action, tenant: str, reason: str) -> None:
        bundle = self.enforcement.bundle
        entry = bundle.entries.get(tenant) if bundle is not None else None
        scope = entry.keyspace[:SCOPE_DIGITS] if entry is not None else NO_SCOPE
        named = bundle is not None and bundle.root.rules.audit_tenants
        self.audit.request(action, reason, scope, tenant if named else "")

    def _count(self, request: Request, status: int) -> None:
        known = request.path in _POST_PATHS or request.path == bodies.MODELS_PATH
        endpoint = request.path.decode() if known else "other"
        self.metrics.tenant(request.subject or NO_TENANT).answered(endpoint, status)

    def _check_model(self, body: bodies.Json) -> None:
        asked = body.get("model")
        if asked is not None and asked != self.model:
            raise Refusal(
                404, Reason.MODEL, "this gate serves one model; see GET /v1/models", param="model",
                code="model_not_found",
            )  # fmt: skip


class Relay:
    __slots__ = (
        "_begun", "_chunked", "_connection", "_endpoint", "_error", "_head", "_numbers", "_over", "_received_at",
        "_salt", "_service", "_status", "_streaming", "_tenant", "_usage", "call", "strip_usage",
    )  # fmt: skip

    def __init__(
        self,
        service: TenantService,
        connection: Connection,
        numbers: TenantMetrics,
        tenant: str,
        endpoint: bytes,
        salt: str,
        received_at: float,
    ) -> None:
        self.call: Call | None = None
        self.strip_usage = False
        self._service = service
        self._connection = connection
        self._numbers = numbers
        self._tenant = tenant
        self._endpoint = endpoint
        self._salt = salt
        self._received_at = received_at
        self._status = 0
        self._begun = False
        self._chunked = False
        self._streaming = False
        self._over = False
        self._error: list[bytes] | None = None
        self._usage: EventUsage | DocumentUsage | None = None
        self._head = b""
        """The head for the caller, until it is written together with the first piece."""
        numbers.in_flight += 1

    def engine_head(self, status: int, content_type: bytes, length: int | None) -> None:
        """Send the gate's own head for a success; hold an error back, to remove the salt from it."""
        self._status = status
        self._connection.let_go()
        if status != 200:
            self._error = []
            return
        self._streaming = content_type.startswith(_EVENT_STREAM)
        self._usage = EventUsage(self.strip_usage) if self._streaming else DocumentUsage()
        self._chunked = length is None or self._streaming
        framing = b"Transfer-Encoding: chunked\r\n" if self._chunked else b"Content-Length: %d\r\n" % (length or 0)
        kind = b"text/event-stream; charset=utf-8" if self._streaming else b"application/json"
        extra = b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n" if self._streaming else b""
        self._head = b"%sContent-Type: %s\r\n%s%s%s" % (
            STATUS_LINES[200], kind, framing, extra, self._connection.head_end(),
        )  # fmt: skip
        self._begun = True

    def engine_body(self, data: bytes, last: bool) -> None:
        """Forward a piece, in its own chunk if the answer is chunked; end the answer with the last one."""
        usage = self._usage
        if usage is None:
            self._hold_error(data)
            if last:
                self._reply_error()
            return
        if data:
            if self._received_at:
                self._note_first(usage)
            data = usage.feed(data)
        if last:
            data += usage.end()
        out = self._head + self._framed(data)
        self._head = b""
        if last:
            if self._chunked:
                out += b"0\r\n\r\n"
            self._connection.transport.write(out)
            self._numbers.tokens(usage.usage.prompt, usage.usage.completion, usage.usage.cached)
            self._finish(self._status)
            self._connection.end()
        elif out:
            self._connection.transport.write(out)

    def writer_of_events(self) -> Callable[[bytes], None] | None:
        """Return the caller's transport for a stream after its first piece, while no part of an event is held back."""
        usage = self._usage
        if self._over or self._received_at or not isinstance(usage, EventUsage) or usage.holds_back:
            return None
        return self._connection.transport.write

    def engine_failed(self, unreachable: bool) -> None:
        """Answer 503 or 502 while possible; later report it in the stream and cut it."""
        if unreachable:
            self._fail(Refusal(503, Reason.ENGINE, "the engine is not ready", retry_after_s=1))
        else:
            self._fail(Refusal(502, Reason.ENGINE, "the engine closed the connection before its answer was complete"))

    def client_gone(self) -> None:
        """End the engine's work; counted as status 499, as in nginx."""
        self._cancel()
        self._finish(499)

    def client_paused(self) -> None:
        if self.call is not None:
            self.call.pause()

    def client_resumed(self) -> None:
        if self.call is not None:
            self.call.resume()

    def abort(self) -> None:
        """End this request after the drain timeout of its removed keyspace."""
        self._cancel()
        self._fail(
            Refusal(503, Reason.POLICY_CHANGED, "the cache policy changed while this request ran", retry_after_s=0)
        )

    def _note_first(self, usage: EventUsage | DocumentUsage) -> None:
        if isinstance(usage, EventUsage):
            self._numbers.first_token(self._service.clock() - self._received_at)
        self._received_at = 0.0

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self._chunked else data

    def _hold_error(self, data: bytes) -> None:
        assert self._error is not None  # noqa: S101
        if sum(map(len, self._error)) + len(data) <= _MAX_ERROR_BYTES:
            self._error.append(data)

    def _reply_error(self) -> None:
        # The engine's validation errors may quote the body, and with it the keyspace.
        body = b"".join(self._error or ()).replace(self._salt.encode(), b"[removed]")
        status = self._status if self._status in STATUS_LINES and self._status >= 400 else 502
        self._finish(status)
        self._connection.reply(status, body)

    def _fail(self, refusal: Refusal) -> None:
        if self._over:
            return
        self._finish(refusal.status)
        self._service.denied(refusal.reason, self._tenant)
        if not self._begun:
            self._connection.reply(refusal.status, refusal.body(), extra=refusal.headers())
            return
        if self._streaming:
            event = b"event: error\ndata: " if self._endpoint == bodies.MESSAGES.path else b"data: "
            self._connection.transport.write(self._framed(event + refusal.body() + b"\n\n"))
        self._connection.end_broken()

    def _cancel(self) -> None:
        if self.call is not None:
            self.call.cancel()

    def _finish(self, status: int) -> None:
        if not self._over:
            self._over = True
            self.call = None  # it refers to this relay, and so to the caller's connection
            self._connection.let_go()
            self._numbers.in_flight -= 1
            self._numbers.answered(self._endpoint.decode(), status)
            self._service.ended(self, self._tenant)


def _require_json(content_type: bytes) -> None:
    if content_type == b"application/json":
        return
    kind, _, parameters = content_type.lower().partition(b";")
    if kind.strip() != b"application/json":
        raise Refusal(415, Reason.ENCODING, "send 'Content-Type: application/json'")
    charset = parameters.replace(b" ", b"").replace(b'"', b"")
    if charset not in (b"", b"charset=utf-8", b"charset=utf8"):
        raise Refusal(415, Reason.ENCODING, "the body is UTF-8 and nothing else")


def _request_bytes(path: bytes, payload: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (path, len(payload)) + payload
