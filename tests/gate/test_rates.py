"""Rate limits of a tenant: buckets, headers, refusals, and their way from the bundle to an answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.rate import UNLIMITED, RateLimit
from kvstrata_sidecar.gate.http.errors import Refusal
from kvstrata_sidecar.gate.proxy.rates import Rates, estimated_tokens

from .stand_ins import EngineRequest, event, stream_head
from .world import NOBODY, Answer, World, chat, entry, post, until


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Tenant:
    """One tenant of a replica that sends requests."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.rates = Rates(self.clock)

    def send(self, limit: RateLimit, tokens: int = 0) -> int:
        """Send a request with this many tokens; return 0, or the seconds to wait if it is refused."""
        try:
            self.rates.check("acme", limit)
        except Refusal as refusal:
            return refusal.retry_after_s or -1
        self.rates.charge("acme", limit, requests=1)
        self.rates.charge("acme", limit, tokens=tokens)
        return 0

    def headers(self, limit: RateLimit) -> dict[str, str]:
        lines = self.rates.headers("acme", limit).decode().split("\r\n")
        return dict(line.removeprefix("x-ratelimit-").split(": ") for line in lines if line)


@pytest.fixture
def tenant() -> Tenant:
    return Tenant()


def test_a_minutes_requests_may_come_at_once_and_the_rest_evenly(tenant: Tenant) -> None:
    limit = RateLimit(requests_per_minute=6)
    assert [tenant.send(limit) for _ in range(7)] == [0] * 6 + [10]
    tenant.clock.now_s += 9
    assert tenant.send(limit) == 1
    tenant.clock.now_s += 1
    assert [tenant.send(limit), tenant.send(limit)] == [0, 10]
    tenant.clock.now_s += 3600
    assert [tenant.send(limit) for _ in range(7)] == [0] * 6 + [10]


def test_tokens_are_charged_afterwards_and_the_next_request_waits_for_them(tenant: Tenant) -> None:
    limit = RateLimit(tokens_per_minute=60)
    assert tenant.send(limit, tokens=180) == 0
    assert tenant.headers(limit) == {"limit-tokens": "60", "remaining-tokens": "0", "reset-tokens": "180s"}
    assert tenant.send(limit) == 121
    tenant.clock.now_s += 121
    assert tenant.send(limit) == 0


def test_headers_have_limit_rest_and_time_until_the_bucket_is_full(tenant: Tenant) -> None:
    limit = RateLimit(60, 6000)
    tenant.send(limit, tokens=150)
    assert tenant.headers(limit) == {
        "limit-requests": "60", "remaining-requests": "59", "reset-requests": "1s",
        "limit-tokens": "6000", "remaining-tokens": "5850", "reset-tokens": "2s",
    }  # fmt: skip
    assert tenant.headers(UNLIMITED) == {}


def test_a_changed_limit_applies_at_once_and_a_removed_one_is_forgotten(tenant: Tenant) -> None:
    one = RateLimit(requests_per_minute=1)
    assert [tenant.send(one), tenant.send(one)] == [0, 60]
    assert tenant.send(RateLimit(requests_per_minute=2)) == 0
    assert tenant.send(one)
    assert tenant.send(RateLimit(tokens_per_minute=5)) == 0
    assert [tenant.send(one), tenant.send(one)] == [0, 60]
    assert tenant.send(UNLIMITED) == 0
    assert tenant.send(one) == 0


def test_tenants_have_buckets_of_their_own(tenant: Tenant) -> None:
    limit = RateLimit(1, 1)
    tenant.send(limit, tokens=5)
    assert tenant.send(limit)
    tenant.rates.check("globex", limit)


@settings(deadline=None)
@given(st.integers(1, 50), st.lists(st.floats(0, 30), max_size=200))
def test_no_minute_has_more_than_twice_the_limit(per_minute: int, pauses_s: list[float]) -> None:
    tenant, limit, admitted = Tenant(), RateLimit(requests_per_minute=per_minute), list[float]()
    for pause_s in pauses_s:
        tenant.clock.now_s += pause_s
        if not tenant.send(limit):
            admitted.append(tenant.clock.now_s)
    for start in admitted:
        assert sum(start <= at < start + 60 for at in admitted) <= 2 * per_minute


def test_an_answer_without_usage_is_estimated_from_its_request_and_its_events() -> None:
    assert estimated_tokens(400, 7) == 107


async def in_force(gate: World, *, default: RateLimit = UNLIMITED, **limits: RateLimit) -> None:
    entries = [entry(name, rate=limits.get(name, UNLIMITED)) for name in ("acme", "globex")]
    await gate.acked(await gate.publish(entries, Rules(drain_timeout_s=1, rate=default)))


def limits_of(answer: Answer) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {name.removeprefix(prefix): text for name, text in answer.headers.items() if name.startswith(prefix)}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_tenant_over_its_limit_gets_429_in_both_shapes_until_the_limit_is_removed(
    gate: World, path: str
) -> None:
    await in_force(gate, acme=RateLimit(requests_per_minute=1))
    request = post(path, chat(max_tokens=5))
    first, second = await gate.ask(request), await gate.ask(request)
    assert first.status == 200
    assert limits_of(first) == {"limit-requests": "1", "remaining-requests": "0", "reset-requests": "60s"}
    assert (second.status, second.json["type"]) == (429, "error")
    assert (second.error["type"], second.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert second.headers["retry-after"] in ("59", "60")
    assert limits_of(second)["remaining-requests"] == "0"
    assert len(gate.engine.requests) == 1
    page = (await gate.get("/metrics")).body
    assert b'kvstrata_gate_refusals_total{reason="rate_limit_exceeded"} 1' in page
    await in_force(gate)
    third = await gate.ask(request)
    assert (third.status, limits_of(third)) == (200, {})


async def test_a_request_is_charged_for_each_of_its_sequences(gate: World) -> None:
    await in_force(gate, acme=RateLimit(requests_per_minute=10))
    first = await gate.ask(post("/v1/completions", {"prompt": ["a", "b"], "n": 6}))
    assert (first.status, limits_of(first)["remaining-requests"]) == (200, "0")
    second = await gate.ask(post("/v1/completions", {"prompt": "a"}))
    assert (second.status, int(second.headers["retry-after"]) > 6) == (429, True)


async def test_the_models_default_is_for_tenants_without_limits_and_without_a_policy(gate: World) -> None:
    await in_force(gate, default=RateLimit(1, 5000), acme=RateLimit(requests_per_minute=9))
    answers = {key: await gate.ask(post("/v1/completions", {"prompt": "a"}, key)) for key in ("key-of-acme", NOBODY)}
    assert limits_of(answers["key-of-acme"])["limit-requests"] == "9"
    assert limits_of(answers["key-of-acme"])["limit-tokens"] == "5000"
    assert limits_of(answers[NOBODY])["limit-requests"] == "1"
    assert (await gate.ask(post("/v1/completions", {"prompt": "a"}, NOBODY))).status == 429


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_charged_as_the_engine_reports_them(gate: World, stream: bool) -> None:
    await in_force(gate, acme=RateLimit(tokens_per_minute=9))
    first = await gate.ask(post("/v1/chat/completions", chat(stream=stream)))
    assert limits_of(first) == {"limit-tokens": "9", "remaining-tokens": "9", "reset-tokens": "0s"}
    second = await gate.ask(post("/v1/chat/completions", chat(stream=stream)))
    assert (second.status, second.headers["retry-after"]) == (429, "7")
    assert limits_of(second)["remaining-tokens"] == "0"


async def test_a_caller_who_leaves_before_the_usage_is_charged_an_estimate(gate: World) -> None:
    await in_force(gate, acme=RateLimit(tokens_per_minute=100_000))

    async def endless(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await stream_head(writer)
        for _ in range(20):
            await event(writer, {"choices": [{"delta": {"content": "x"}}]})
            await asyncio.sleep(0.005)
        await request.reader.read(1)

    handler, gate.engine.handler = gate.engine.handler, endless
    connection = await gate.connect()
    body = chat("x" * 4000, stream=True)
    await connection.send(post("/v1/chat/completions", body))
    await connection.head()
    for _ in range(20):
        await connection.chunk()
    connection.close()
    await until(lambda: not gate.gate.enforcement.in_flight)
    gate.engine.handler = handler
    answer = await gate.ask(post("/v1/chat/completions", chat()))
    charged = 100_000 - int(limits_of(answer)["remaining-tokens"])
    least = len(json.dumps(body)) // 4
    assert least - 100 < charged < least + 200
