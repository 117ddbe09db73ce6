"""Metrics in Prometheus' text format, with a bounded number of tenants, and the pod's health pages.

The pages (/livez, /readyz, /metrics) are for kubelet and Prometheus: they hold no secret, and have no TLS.

Tenants past `max_tenants` are counted together as `_other`, so that neither thousands of tenants nor an attacker can
make the page grow. Requests without a tenant count as `_none`. The same bound holds for scopes in the cache server's
memory, named by the first digits of their keyspace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.http.messages import Connection, Limits, Request

OTHER = "_other"
NO_TENANT = "_none"
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class TenantMetrics:
    __slots__ = (
        "cached_tokens", "completion_tokens", "in_flight", "no_reuse", "prompt_tokens", "requests", "ttft_buckets",
        "ttft_sum_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.in_flight = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.no_reuse = 0
        self.ttft_buckets = [0] * (len(TTFT_BUCKETS_S) + 1)
        self.ttft_sum_s = 0.0

    def answered(self, path: str, code: int) -> None:
        key = (path, code)
        self.requests[key] = self.requests.get(key, 0) + 1

    def first_token(self, seconds: float) -> None:
        """Count the time from a whole request to the first byte of its streamed answer."""
        self.ttft_buckets[bisect_left(TTFT_BUCKETS_S, seconds)] += 1
        self.ttft_sum_s += seconds

    def tokens(self, prompt: int, completion: int, cached: int) -> None:
        """Negative counts were not reported."""
        self.prompt_tokens += max(prompt, 0)
        self.completion_tokens += max(completion, 0)
        self.cached_tokens += max(cached, 0)


class Metrics:
    """Gauges are set by their owners just before a page is made."""

    def __init__(self, max_tenants: int) -> None:
        self.max_tenants = max_tenants
        self._tenants: dict[str, TenantMetrics] = {}
        self.refusals: dict[str, int] = {}
        self.gauges: dict[str, float] = {}
        self.counters: dict[str, int] = {}
        self.usage: Sequence[ScopeUsage] = ()
        self.usage_left_out = 0

    def tenant(self, name: str) -> TenantMetrics:
        """Return the numbers of `name`, or the shared ones once the bound is reached."""
        found = self._tenants.get(name)
        if found is None:
            if len(self._tenants) >= self.max_tenants and name not in (OTHER, NO_TENANT):
                return self.tenant(OTHER)
            found = self._tenants[name] = TenantMetrics()
        return found

    def refused(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def count(self, name: str, amount: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def page(self) -> bytes:
        return ("\n".join(self._lines()) + "\n").encode()

    def _lines(self) -> Iterator[str]:
        tenants = sorted(self._tenants.items())
        yield from _family("kvstrata_gate_requests_total", "counter", "Answers by tenant, path and status.")
        for name, numbers in tenants:
            for (path, code), count in sorted(numbers.requests.items()):
                labels = f'tenant="{_escape(name)}",path="{path}",code="{code}"'
                yield f"kvstrata_gate_requests_total{{{labels}}} {count}"
        yield from _by_tenant(
            "kvstrata_gate_in_flight_requests", "gauge", "Requests being answered.",
            ((name, numbers.in_flight) for name, numbers in tenants),
        )  # fmt: skip
        yield from _by_tenant(
            "kvstrata_gate_prompt_tokens_total", "counter", "Prompt tokens as the engine reports them.",
            ((name, numbers.prompt_tokens) for name, numbers in tenants),
        )  # fmt: skip
        yield from _by_tenant(
            "kvstrata_gate_completion_tokens_total", "counter", "Generated tokens as the engine reports them.",
            ((name, numbers.completion_tokens) for name, numbers in tenants),
        )  # fmt: skip
        yield from _by_tenant(
            "kvstrata_gate_cached_prompt_tokens_total", "counter",
            "Prompt tokens that came from the cache, as the engine reports them.",
            ((name, numbers.cached_tokens) for name, numbers in tenants),
        )  # fmt: skip
        yield from _by_tenant(
            "kvstrata_gate_no_reuse_requests_total", "counter",
            "Requests served with a random salt: unknown tenant, stale policy or reuse off.",
            ((name, numbers.no_reuse) for name, numbers in tenants),
        )  # fmt: skip
        yield from _family(
            "kvstrata_gate_time_to_first_token_seconds", "histogram",
            "From a whole request to the first byte of its streamed answer.",
        )  # fmt: skip
        for name, numbers in tenants:
            yield from _histogram("kvstrata_gate_time_to_first_token_seconds", name, numbers)
        yield from _family("kvstrata_gate_refusals_total", "counter", "Requests that the gate refused, by reason.")
        for reason, count in sorted(self.refusals.items()):
            yield f'kvstrata_gate_refusals_total{{reason="{reason}"}} {count}'
        yield from _memory(self.usage, self.max_tenants)
        yield from _family(
            "kvstrata_gate_memory_scopes_unreported", "gauge", "Scopes left out of the cache server's report of use."
        )
        yield f"kvstrata_gate_memory_scopes_unreported {self.usage_left_out}"
        for counter, count in sorted(self.counters.items()):
            yield from _family(counter, "counter", "")
            yield f"{counter} {count}"
        for gauge, value in sorted(self.gauges.items()):
            yield from _family(gauge, "gauge", "")
            yield f"{gauge} {value:g}" if value != int(value) else f"{gauge} {int(value)}"


def _family(name: str, kind: str, text: str) -> Iterator[str]:
    if text:
        yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _by_tenant(name: str, kind: str, text: str, values: Iterable[tuple[str, int]]) -> Iterator[str]:
    yield from _family(name, kind, text)
    for tenant, value in values:
        yield f'{name}{{tenant="{_escape(tenant)}"}} {value}'


def _histogram(family: str, tenant: str, numbers: TenantMetrics) -> Iterator[str]:
    total, label = 0, _escape(tenant)
    for bound, count in zip((*map(str, TTFT_BUCKETS_S), "+Inf"), numbers.ttft_buckets, strict=True):
        total += count
        yield f'{family}_bucket{{tenant="{label}",le="{bound}"}} {total}'
    yield f'{family}_sum{{tenant="{label}"}} {numbers.ttft_sum_s:.6f}'
    yield f'{family}_count{{tenant="{label}"}} {total}'


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
        family = f"kvstrata_gate_memory_{name}"
        yield from _family(family, "gauge", text)
        for (scope, row), figure in zip(shown, figures, strict=True):
            if figure is not None:
                yield f'{family}{{scope="{_escape(scope)}",tier="{_escape(row.tier)}"}} {figure}'


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


HEALTH_LIMITS = Limits(body_bytes=0, head_s=5.0, body_s=5.0, idle_s=5.0, stalled_write_s=5.0)
"""For a port without authentication that kubelet must always reach: no client keeps a connection for long."""


class HealthService:
    """Live while the event loop runs; ready while `not_ready` returns an empty string."""

    def __init__(self, not_ready: Callable[[], str], metrics_page: Callable[[], bytes]) -> None:
        self._not_ready = not_ready
        self._metrics_page = metrics_page

    def check_head(self, request: Request) -> None:
        if request.path not in (b"/livez", b"/readyz", b"/metrics"):
            raise Refusal(404, Reason.NOT_FOUND, "the pages here are /livez, /readyz and /metrics")
        if request.method != b"GET":
            raise Refusal(405, Reason.METHOD, "use GET here", allow="GET")

    def serve(self, request: Request, connection: Connection) -> None:
        if request.path == b"/livez":
            connection.reply(200, b"ok\n", b"text/plain")
        elif request.path == b"/readyz":
            missing = self._not_ready()
            connection.reply(503 if missing else 200, (missing or "ok").encode() + b"\n", b"text/plain; charset=utf-8")
        else:
            connection.reply(200, self._metrics_page(), b"text/plain; version=0.0.4; charset=utf-8")

    def refused(self, request: Request, refusal: Refusal) -> None:
        """Nothing to note."""
