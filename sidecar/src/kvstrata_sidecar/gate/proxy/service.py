"""The tenants' service: authenticate, rewrite, grant, relay.

A `Parsing` is a request whose body is parsed by another process, a `Relay` one under way. A slow caller slows the
engine's socket, and a caller that disconnects ends the engine's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import unquote_to_bytes

import orjson

from kvstrata.contract.messages.audit import NO_SCOPE, Action
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata_sidecar.gate.audit import Audit
from kvstrata_sidecar.gate.http.engine_client import Call, EnginePool, post_head
from kvstrata_sidecar.gate.http.errors import Reason, Refusal, bad_request, engine_error
from kvstrata_sidecar.gate.http.messages import STATUS_LINES, Amounts, Exchange, Request
from kvstrata_sidecar.gate.http.server import ServerConnection
from kvstrata_sidecar.gate.metrics import NO_TENANT, Metrics, TenantMetrics
from kvstrata_sidecar.gate.policy.api_keys import UNKNOWN_KEY, credential, unauthenticated
from kvstrata_sidecar.gate.policy.bundle_watch import KeyWatch
from kvstrata_sidecar.gate.policy.enforcement import Enforcement
from kvstrata_sidecar.gate.policy.grants import Grant, decide, rate_limit
from kvstrata_sidecar.gate.proxy import bodies
from kvstrata_sidecar.gate.proxy.bodies import Shape
from kvstrata_sidecar.gate.proxy.correlation import engine_lines, request_id
from kvstrata_sidecar.gate.proxy.parser_pool import ParserPool
from kvstrata_sidecar.gate.proxy.parsing import ParsedBody, require_model
from kvstrata_sidecar.gate.proxy.rates import Rates, estimated_tokens
from kvstrata_sidecar.gate.proxy.usage import DocumentUsage, EventUsage, Usage

_EVENT_STREAM = b"text/event-stream"
_MAX_ERROR_BYTES = 256 * 1024
_MODEL_PREFIX = bodies.MODELS_PATH + b"/"

random_salt = partial(secrets.token_hex, 16)


@dataclass(kw_only=True, eq=False)
class TenantService:
    """`sequences` counts those that the engine computes, by tenant."""

    model: str
    keys: KeyWatch
    enforcement: Enforcement
    engine: EnginePool
    parser: ParserPool
    metrics: Metrics
    audit: Audit
    clock: Callable[[], float]
    now_s: Callable[[], float]
    max_in_flight: int
    max_in_flight_per_tenant: int
    parsing: set[Parsing] = field(default_factory=set)
    sequences: Amounts = field(default_factory=Amounts)

    def __post_init__(self) -> None:
        self.rates = Rates(self.clock)
        self.describe(b"")

    def describe(self, models: bytes) -> None:
        """Describe the model to callers as the engine's list of models does: its context, and since when it runs."""
        found: dict[str, object] = {}
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            listed = orjson.loads(models)["data"][0]
            found = {key: listed[key] for key in ("created", "max_model_len") if isinstance(listed.get(key), int)}
        described = {"id": self.model, "object": "model", "created": int(self.now_s()), "owned_by": "kvstrata", **found}
        self._model = orjson.dumps(described)
        self._models = orjson.dumps({"object": "list", "data": [described]})

    def check_head(self, request: Request) -> None:
        request.id = request_id(request.headers)
        about_models = _is_about_models(request.path)
        if request.path not in bodies.ENDPOINTS and not about_models:
            raise Refusal(404, Reason.NOT_FOUND, "this gate serves chat, completions, messages and the model list only")
        allowed = "GET" if about_models else "POST"
        if request.method != allowed.encode():
            raise Refusal(405, Reason.METHOD, f"use {allowed} here", allow=allowed)
        tenant = self.keys.ring.tenant_of(credential(request.headers), self.now_s())
        if tenant is None:
            raise unauthenticated(UNKNOWN_KEY)
        request.subject = tenant
        if b"content-encoding" in request.headers:
            raise Refusal(415, Reason.ENCODING, "send the body without content encoding")
        if not about_models:
            _require_json(request.headers.get(b"content-type", b""))
            self.parser.shares.require(tenant)

    def serve(self, request: Request, connection: ServerConnection) -> None:
        tenant: str = request.subject
        received_at = self.clock()
        self._grant(tenant)
        if _is_about_models(request.path):
            self._reply_models(request, connection)
            return
        self.rates.check(tenant, rate_limit(self.enforcement.bundle, tenant))
        self._check_in_flight(tenant, 1)
        parsed = self.parser.parse(tenant, bodies.ENDPOINTS[request.path], request.body)
        if isinstance(parsed, ParsedBody):
            self.send(request, connection, received_at, parsed)
        else:
            Parsing(self, request, connection, received_at, parsed)

    def _grant(self, tenant: str) -> Grant:
        enforcement = self.enforcement
        return decide(enforcement.bundle, tenant, enforcement.fresh(), enforcement.withheld, random_salt)

    @property
    def in_flight(self) -> int:
        """Requests of tenants, warm-ups and probes that have not ended."""
        return len(self.enforcement.in_flight) + len(self.parsing)

    def send(self, request: Request, connection: ServerConnection, received_at: float, parsed: ParsedBody) -> None:
        """Send a request to the engine under the policy in force. Raises Refusal if that grants nothing."""
        tenant: str = request.subject
        grant = self._grant(tenant)
        limit = rate_limit(self.enforcement.bundle, tenant)
        self.rates.check(tenant, limit)
        self._check_in_flight(tenant, parsed.shape.sequences)
        numbers = self.metrics.tenant(tenant)
        generates = bodies.ENDPOINTS[request.path].generates
        sent = parsed.seal(grant.salt if generates else None)
        sent[:0] = post_head(request.path, len(sent), engine_lines(request.id, request.headers))
        counts_events = limit.tokens_per_minute is not None
        relay = Relay(
            self, connection, numbers, tenant, request.path, parsed.shape, grant.salt, len(sent), counts_events,
            received_at,
        )  # fmt: skip
        # The engine may begin; no part of its answer, and no other policy, arrives before this call returns.
        relay.call = self.engine.send(sent, relay)
        self.sequences.add(tenant, parsed.shape.sequences)
        self.rates.charge(tenant, limit, requests=parsed.shape.sequences)
        relay.rate_headers = self.rates.headers(tenant, limit)
        self.enforcement.admit(relay, tenant, grant.salt if grant.keyspace and generates else "")
        if generates:
            numbers.no_reuse += not grant.keyspace
            action = Action.REQUESTS_SERVED if grant.keyspace else Action.REUSE_REFUSED
            self._record(action, tenant, grant.withheld, request)
        connection.release_body(held_bytes=len(sent))
        connection.hold(relay)

    def _reply_models(self, request: Request, connection: ServerConnection) -> None:
        if request.path == bodies.MODELS_PATH:
            answer = self._models
        else:
            named = unquote_to_bytes(request.path.removeprefix(_MODEL_PREFIX)).decode(errors="replace")
            require_model(named, self.model)
            answer = self._model
        self._count(request, 200)
        connection.reply(200, answer)

    def ended(self, relay: Relay, tenant: str, tokens: int) -> None:
        self.rates.charge(tenant, rate_limit(self.enforcement.bundle, tenant), tokens=tokens)
        self.sequences.remove(tenant, relay.shape.sequences)
        self.enforcement.release(relay)

    def refused(self, request: Request, refusal: Refusal) -> None:
        request.id = request.id or request_id(request.headers)
        self.denied(refusal.reason, request.subject or "", request)
        self._count(request, refusal.status)

    def denied(self, reason: Reason, tenant: str, request: Request) -> None:
        """Count a request that the gate refused or ended, by reason; an engine's failure is no refusal."""
        self.metrics.refusals[str(reason)] += 1
        if reason is not Reason.ENGINE:
            self._record(Action.REQUESTS_REFUSED, tenant, str(reason), request)

    def _record(self, action: Action, tenant: str, reason: str, request: Request) -> None:
        bundle = self.enforcement.bundle
        entry = bundle.entries.get(tenant) if bundle is not None else None
        scope = entry.keyspace[:SCOPE_DIGITS] if entry is not None else NO_SCOPE
        named = bundle is not None and bundle.root.rules.audit_tenants
        self.audit.request(action, reason, scope, tenant if named else "", request.id.decode())

    def _count(self, request: Request, status: int) -> None:
        path = bodies.MODELS_PATH if _is_about_models(request.path) else request.path
        endpoint = path.decode() if path in (*bodies.ENDPOINTS, bodies.MODELS_PATH) else "other"
        self.metrics.tenant(request.subject or NO_TENANT).requests[endpoint, status] += 1

    def _check_in_flight(self, tenant: str, sequences: int) -> None:
        """Raise Refusal if the engine would compute more sequences than the limits allow."""
        if sequences > min(self.max_in_flight, self.max_in_flight_per_tenant):
            raise bad_request(Reason.BAD_VALUE, "this gate does not take as many sequences at once", "n")
        if self.sequences.total + sequences > self.max_in_flight:
            raise Refusal(429, Reason.OVERLOADED, "too many requests in flight on this replica", retry_after_s=1)
        if self.sequences.of(tenant) + sequences > self.max_in_flight_per_tenant:
            raise Refusal(
                429, Reason.TENANT_OVERLOADED, "too many requests of this tenant in flight on this replica",
                retry_after_s=1,
            )  # fmt: skip


@dataclass(slots=True, eq=False)
class Parsing(Exchange):
    """A request whose body is parsed by another process. Its salt is decided after that, as policy may change."""

    service: TenantService
    request: Request
    connection: ServerConnection
    received_at: float
    parsed: asyncio.Future[ParsedBody]

    def __post_init__(self) -> None:
        self.service.parsing.add(self)
        self.service.sequences.add(self.request.subject, 1)
        self.connection.hold(self)
        self.parsed.add_done_callback(self._send)

    def client_gone(self) -> None:
        """Counted as status 499, as in nginx."""
        if self._end():
            self.parsed.cancel()
            self.service.metrics.tenant(self.request.subject).requests[self.request.path.decode(), 499] += 1

    def _send(self, parsed: asyncio.Future[ParsedBody]) -> None:
        if parsed.cancelled():
            return
        error = parsed.exception()
        if not self._end():
            return
        try:
            if error is not None:
                raise error
            self.service.send(self.request, self.connection, self.received_at, parsed.result())
        except Refusal as refusal:
            self.connection.refuse(refusal)

    def _end(self) -> bool:
        """Return False if it has ended before."""
        if self not in self.service.parsing:
            return False
        self.service.parsing.remove(self)
        self.service.sequences.remove(self.request.subject, 1)
        return True


@dataclass(slots=True, eq=False, repr=False)
class Relay(Exchange):
    """A request under way. `received_at` is 0 once the first piece of the answer has come. `_head` is the head for the
    caller, until it is written together with that piece."""

    service: TenantService
    connection: ServerConnection
    numbers: TenantMetrics
    tenant: str
    endpoint: bytes
    shape: Shape
    salt: str
    request_bytes: int
    counts_events: bool
    received_at: float
    call: Call | None = None
    rate_headers: bytes = b""
    _status: int = 0
    _begun: bool = False
    _chunked: bool = False
    _streaming: bool = False
    _over: bool = False
    _error: bytes = b""
    _usage: EventUsage | DocumentUsage | None = None
    _head: bytes = b""

    def __post_init__(self) -> None:
        self.numbers.in_flight += 1

    def engine_head(self, status: int, content_type: bytes, length: int | None) -> None:
        """Send the gate's own head for a success; hold an error back, to remove the salt from it."""
        self._status = status
        self.connection.let_go()
        if status != 200:
            return
        self._streaming = content_type.startswith(_EVENT_STREAM)
        several = self.shape.sequences > 1
        self._usage = EventUsage(self.shape.strip_usage, several) if self._streaming else DocumentUsage(several)
        self._chunked = length is None or self._streaming
        framing = b"Transfer-Encoding: chunked\r\n" if self._chunked else b"Content-Length: %d\r\n" % (length or 0)
        kind = b"text/event-stream; charset=utf-8" if self._streaming else b"application/json"
        extra = b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n" if self._streaming else b""
        self._head = b"%sContent-Type: %s\r\n%s%s%s%s" % (
            STATUS_LINES[200], kind, framing, extra, self.rate_headers, self.connection.head_end(),
        )  # fmt: skip
        self._begun = True

    def engine_body(self, data: bytes, last: bool) -> None:
        """Forward a piece, in its own chunk if the answer is chunked; end the answer with the last one."""
        usage = self._usage
        if usage is None:
            if len(self._error) + len(data) <= _MAX_ERROR_BYTES:
                self._error += data
            if last:
                self._reply_error()
            return
        if data:
            if self.received_at:
                if self._streaming:
                    self.numbers.ttft.add(self.service.clock() - self.received_at)
                self.received_at = 0.0
            data = usage.feed(data)
        if last:
            data += usage.end()
        out = self._head + self._framed(data)
        self._head = b""
        if last:
            if self._chunked:
                out += b"0\r\n\r\n"
            self.connection.transport.write(out)
            self._finish(self._status)
            self.connection.end()
        elif out:
            self.connection.transport.write(out)

    def writer_of_events(self) -> Callable[[bytes], None] | None:
        """Return the caller's transport for a stream after its first piece, while no part of an event is held back."""
        usage = self._usage
        if self._over or self.received_at or not isinstance(usage, EventUsage) or usage.held:
            return None
        return self._write_event if self.counts_events else self.connection.transport.write

    def _write_event(self, chunk: bytes) -> None:
        if self._usage is not None:
            self._usage.events += 1
        self.connection.transport.write(chunk)

    def engine_failed(self, unreachable: bool) -> None:
        """Answer 503 or 502 while possible; later report it in the stream and cut it."""
        self._status = self._status or 502  # no answer has begun: there is none to count
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

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self._chunked else data

    def _reply_error(self) -> None:
        # The engine's validation errors may quote the body, and with it the keyspace.
        body = self._error.replace(self.salt.encode(), b"[removed]")
        status = self._status if self._status in STATUS_LINES and self._status >= 400 else 502
        self._finish(status)
        self.connection.reply(status, engine_error(self.endpoint, status, body), extra=self.rate_headers)

    def _fail(self, refusal: Refusal) -> None:
        if self._over:
            return
        body = refusal.body(self.endpoint)
        self._finish(refusal.status)
        self.service.denied(refusal.reason, self.tenant, self.connection.request)
        if not self._begun:
            self.connection.reply(refusal.status, body, extra=refusal.headers())
            return
        if self._streaming:
            event = b"event: error\ndata: " if self.endpoint == bodies.MESSAGES.path else b"data: "
            self.connection.transport.write(self._framed(event + body + b"\n\n"))
        self.connection.end_broken()

    def _cancel(self) -> None:
        if self.call is not None:
            self.call.cancel()

    def _finish(self, status: int) -> None:
        if not self._over:
            self._over = True
            self.call = None  # it refers to this relay, and so to the caller's connection
            self.connection.let_go()
            self.numbers.in_flight -= 1
            self.numbers.requests[self.endpoint.decode(), status] += 1
            self.service.ended(self, self.tenant, self._count_tokens())

    def _count_tokens(self) -> int:
        """Count the tokens that the engine reported; return their number, an estimate without a whole report."""
        if self._status not in (0, 200) or not bodies.ENDPOINTS[self.endpoint].generates:
            return 0
        answer = self._usage
        usage = answer.usage if answer is not None else Usage()
        # Of several sequences the engine reports the cached tokens of one.
        cached = usage.cached if self.shape.sequences == 1 else -1
        self.numbers.tokens(usage.prompt, usage.completion, cached)
        reported = max(usage.prompt, 0) + max(usage.completion, 0)
        if answer is not None and answer.is_final:
            self.numbers.uncounted["cached"] += cached < 0
            return reported
        self.numbers.uncounted["all"] += 1
        return max(reported, estimated_tokens(self.request_bytes, answer.events if answer is not None else 0))


def _require_json(content_type: bytes) -> None:
    if content_type == b"application/json":
        return
    kind, _, parameters = content_type.lower().partition(b";")
    if kind.strip() != b"application/json":
        raise Refusal(415, Reason.ENCODING, "send 'Content-Type: application/json'")
    charset = parameters.replace(b" ", b"").replace(b'"', b"")
    if charset not in (b"", b"charset=utf-8", b"charset=utf8"):
        raise Refusal(415, Reason.ENCODING, "the body is UTF-8 and nothing else")


def _is_about_models(path: bytes) -> bool:
    return path == bodies.MODELS_PATH or path.startswith(_MODEL_PREFIX)
