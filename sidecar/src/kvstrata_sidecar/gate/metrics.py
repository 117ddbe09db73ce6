"""Metrics in Prometheus' text format, with a bounded number of tenants, and the pod's health pages.

The pages (/livez, /readyz, /metrics) are for kubelet and Prometheus: they hold no secret, and have no TLS.

Tenants past `max_tenants` are counted together as `_other`, so that no one can make the page grow; requests without a
tenant count as `_none`. Scopes in the cache server's memory, named by digits of their keyspace, have the same bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.http.messages import Limits, Request
from kvstrata_sidecar.gate.http.server import ServerConnection
from kvstrata_sidecar.prometheus_text import Histogram, Row, family

OTHER = "_other"
NO_TENANT = "_none"
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True, eq=False)
class TenantMetrics:
    """`uncounted` are answers without a report of their tokens, or of the cached ones among them."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    in_flight: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    no_reuse: int = 0
    uncounted: dict[str, int] = field(default_factory=lambda: {"all": 0, "cached": 0})
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))

    def tokens(self, prompt: int, completion: int, cached: int) -> None:
        """Negative counts were not reported."""
        self.prompt_tokens += max(prompt, 0)
        self.completion_tokens += max(completion, 0)
        self.cached_tokens += max(cached, 0)


BY_TENANT: tuple[tuple[str, str, str, Callable[[TenantMetrics], int]], ...] = (
    ("kvstrata_gate_in_flight_requests", "gauge", "Requests being answered.", lambda one: one.in_flight),
    ("kvstrata_gate_prompt_tokens_total", "counter", "Prompt tokens as the engine reports them.",
     lambda one: one.prompt_tokens),
    ("kvstrata_gate_completion_tokens_total", "counter", "Generated tokens as the engine reports them.",
     lambda one: one.completion_tokens),
    ("kvstrata_gate_cached_prompt_tokens_total", "counter",
     "Prompt tokens that came from the cache, as the engine reports them.", lambda one: one.cached_tokens),
    ("kvstrata_gate_no_reuse_requests_total", "counter",
     "Requests served with a random salt: unknown tenant, stale policy or reuse off.", lambda one: one.no_reuse),
)  # fmt: skip
"""Families by tenant: name, kind, help and value."""


@dataclass(eq=False)
class Metrics:
    """Gauges are set by their owners just before a page is made."""

    max_tenants: int
    refusals: Counter[str] = field(default_factory=Counter)
    turned_away: Mapping[str, int] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    usage: Sequence[ScopeUsage] = ()
    usage_left_out: int = 0
    _tenants: dict[str, TenantMetrics] = field(default_factory=dict)

    def tenant(self, name: str) -> TenantMetrics:
        """Return the numbers of `name`, or the shared ones once the bound is reached."""
        found = self._tenants.get(name)
        if found is None:
            if len(self._tenants) >= self.max_tenants and name not in (OTHER, NO_TENANT):
                return self.tenant(OTHER)
            found = self._tenants[name] = TenantMetrics()
        return found

    def page(self) -> bytes:
        return ("\n".join(self._lines()) + "\n").encode()

    def _lines(self) -> Iterator[str]:
        tenants = sorted(self._tenants.items())
        answers = (
            ({"tenant": name, "path": path, "code": str(code)}, count)
            for name, numbers in tenants
            for (path, code), count in sorted(numbers.requests.items())
        )
        yield from family("kvstrata_gate_requests_total", "counter", "Answers by tenant, path and status.", answers)
        for name, kind, text, figure in BY_TENANT:
            rows = [({"tenant": tenant}, figure(numbers)) for tenant, numbers in tenants]
            yield from family(name, kind, text, rows)
        yield from family(
            "kvstrata_gate_uncounted_answers_total", "counter",
            "Answers whose tokens, or the cached ones among them, the engine did not report in full.",
            (
                ({"tenant": name, "tokens": tokens}, count)
                for name, numbers in tenants
                for tokens, count in numbers.uncounted.items()
            ),
        )  # fmt: skip
        yield from family(
            "kvstrata_gate_time_to_first_token_seconds", "histogram",
            "From a whole request to the first byte of its streamed answer.",
            (({"tenant": name}, numbers.ttft) for name, numbers in tenants),
        )  # fmt: skip
        yield from family(
            "kvstrata_gate_refusals_total", "counter", "Requests that the gate refused, by reason.",
            _by_reason(sorted(self.refusals.items())),
        )  # fmt: skip
        yield from family(
            "kvstrata_gate_connections_turned_away_total", "counter",
            "Connections that were ended or refused at a bound of connections.", _by_reason(self.turned_away.items()),
        )  # fmt: skip
        yield from _memory(self.usage, self.max_tenants)
        yield from family(
            "kvstrata_gate_memory_scopes_unreported", "gauge", "Scopes left out of the cache server's report of use.",
            [({}, self.usage_left_out)],
        )  # fmt: skip
        for name, count in sorted(self.counters.items()):
            yield from family(name, "counter", "", [({}, count)])
        for name, value in sorted(self.gauges.items()):
            yield from family(name, "gauge", "", [({}, int(value) if value == int(value) else f"{value:g}")])


def _by_reason(counts: Iterable[tuple[str, int]]) -> Iterator[Row]:
    return (({"reason": reason}, count) for reason, count in counts)


def _memory(rows: Sequence[ScopeUsage], most: int) -> Iterator[str]:
    shown = [(row.scope or NO_TENANT, row) for row in rows[:most]]
    rest: dict[str, tuple[int, int]] = {}
    for row in rows[most:]:
        used_bytes, blocks = rest.get(row.tier, (0, 0))
        rest[row.tier] = (used_bytes + row.used_bytes, blocks + row.blocks)
    shown += [(OTHER, ScopeUsage(OTHER, tier, *sums)) for tier, sums in sorted(rest.items())]
    for name, text, figures in (
        ("used_bytes", "Bytes that a scope holds in the cache server's memory.", [row.used_bytes for _, row in shown]),
        ("blocks", "Blocks that a scope holds in the cache server's memory.", [row.blocks for _, row in shown]),
        ("limit_bytes", "Maximum for a scope there, if it has one.", [row.limit_bytes for _, row in shown]),
        ("guaranteed_bytes", "Bytes kept for a scope there.", [row.guaranteed_bytes for _, row in shown]),
    ):
        series = [
            ({"scope": scope, "tier": row.tier}, figure)
            for (scope, row), figure in zip(shown, figures, strict=True)
            if figure is not None
        ]
        yield from family(f"kvstrata_gate_memory_{name}", "gauge", text, series)


HEALTH_LIMITS = Limits(body_bytes=0, head_s=5.0, body_s=5.0, idle_s=5.0, stalled_write_s=5.0)
"""For a port without authentication that kubelet must always reach: no client keeps a connection for long."""


class HealthService:
    """Live while the event loop runs; ready while `not_ready` returns an empty string."""

    def __init__(self, not_ready: Callable[[], str], metrics_page: Callable[[], Awaitable[bytes]]) -> None:
        self._not_ready = not_ready
        self._metrics_page = metrics_page

    def check_head(self, request: Request) -> None:
        if request.path not in (b"/livez", b"/readyz", b"/metrics"):
            raise Refusal(404, Reason.NOT_FOUND, "the pages here are /livez, /readyz and /metrics")
        if request.method not in (b"GET", b"HEAD"):
            raise Refusal(405, Reason.METHOD, "use GET here", allow="GET, HEAD")

    def serve(self, request: Request, connection: ServerConnection) -> None:
        if request.path == b"/livez":
            connection.reply(200, b"ok\n", b"text/plain")
        elif request.path == b"/readyz":
            missing = self._not_ready()
            connection.reply(503 if missing else 200, (missing or "ok").encode() + b"\n", b"text/plain; charset=utf-8")
        else:
            connection.serve_by(self._scrape(connection))

    async def _scrape(self, connection: ServerConnection) -> None:
        connection.reply(200, await self._metrics_page(), b"text/plain; version=0.0.4; charset=utf-8")

    def refused(self, request: Request, refusal: Refusal) -> None:
        """Nothing to note."""
