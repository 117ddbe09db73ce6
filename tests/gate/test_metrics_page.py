"""A gate's page of metrics is what Prometheus' own library for Python reads."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata_sidecar.gate.metrics import Metrics
from tests.support.metrics_page import families, series

from .world import World, until


@given(st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=5))
def test_a_tenant_of_any_name_is_on_the_page_with_what_was_counted(names: set[str]) -> None:
    metrics = Metrics(max_tenants=5)
    for number, name in enumerate(sorted(names)):
        metrics.tenant(name).tokens(number, 0, 0)
        metrics.tenant(name).ttft.add(0.3)
        metrics.tenant(name).requests["/v1/completions", 200] += 1
    page = families(metrics.page().decode())
    told = {sample.labels["tenant"]: sample.value for sample in page["kvstrata_gate_prompt_tokens_total"].samples}
    assert told == {name: number for number, name in enumerate(sorted(names))}
    first = page["kvstrata_gate_time_to_first_token_seconds"].samples
    assert {sample.value for sample in first if sample.labels.get("le") in ("0.5", "+Inf")} <= {1.0}
    assert {sample.value for sample in first if sample.labels.get("le") == "0.25"} <= {0.0}


async def test_the_page_of_a_gate_that_serves_is_read(gate: World) -> None:
    assert series((await gate.get("/metrics")).body.decode())["kvstrata_gate_api_keys_current"] == 1


PAGE = """\
# HELP kvstrata_gate_requests_total Answers by tenant, path and status.
# TYPE kvstrata_gate_requests_total counter
kvstrata_gate_requests_total{tenant="a\\\\b\\"c\\n",path="/v1/completions",code="200"} 2
kvstrata_gate_requests_total{tenant="a\\\\b\\"c\\n",path="/v1/completions",code="429"} 1
# HELP kvstrata_gate_in_flight_requests Requests being answered.
# TYPE kvstrata_gate_in_flight_requests gauge
kvstrata_gate_in_flight_requests{tenant="a\\\\b\\"c\\n"} 3
# HELP kvstrata_gate_prompt_tokens_total Prompt tokens as the engine reports them.
# TYPE kvstrata_gate_prompt_tokens_total counter
kvstrata_gate_prompt_tokens_total{tenant="a\\\\b\\"c\\n"} 7
# HELP kvstrata_gate_completion_tokens_total Generated tokens as the engine reports them.
# TYPE kvstrata_gate_completion_tokens_total counter
kvstrata_gate_completion_tokens_total{tenant="a\\\\b\\"c\\n"} 5
# HELP kvstrata_gate_cached_prompt_tokens_total Prompt tokens that came from the cache, as the engine reports them.
# TYPE kvstrata_gate_cached_prompt_tokens_total counter
kvstrata_gate_cached_prompt_tokens_total{tenant="a\\\\b\\"c\\n"} 4
# HELP kvstrata_gate_no_reuse_requests_total Requests served with a random salt: unknown tenant, stale policy or reuse off.
# TYPE kvstrata_gate_no_reuse_requests_total counter
kvstrata_gate_no_reuse_requests_total{tenant="a\\\\b\\"c\\n"} 1
# HELP kvstrata_gate_uncounted_answers_total Answers whose tokens, or the cached ones among them, the engine did not report in full.
# TYPE kvstrata_gate_uncounted_answers_total counter
kvstrata_gate_uncounted_answers_total{tenant="a\\\\b\\"c\\n",tokens="all"} 2
kvstrata_gate_uncounted_answers_total{tenant="a\\\\b\\"c\\n",tokens="cached"} 0
# HELP kvstrata_gate_time_to_first_token_seconds From a whole request to the first byte of its streamed answer.
# TYPE kvstrata_gate_time_to_first_token_seconds histogram
BUCKETS
kvstrata_gate_time_to_first_token_seconds_sum{tenant="a\\\\b\\"c\\n"} 100.260000
kvstrata_gate_time_to_first_token_seconds_count{tenant="a\\\\b\\"c\\n"} 3
# HELP kvstrata_gate_refusals_total Requests that the gate refused, by reason.
# TYPE kvstrata_gate_refusals_total counter
kvstrata_gate_refusals_total{reason="method"} 1
kvstrata_gate_refusals_total{reason="timeout"} 2
# HELP kvstrata_gate_connections_turned_away_total Connections that were ended or refused at a bound of connections.
# TYPE kvstrata_gate_connections_turned_away_total counter
kvstrata_gate_connections_turned_away_total{reason="address"} 4
# HELP kvstrata_gate_memory_used_bytes Bytes that a scope holds in the cache server's memory.
# TYPE kvstrata_gate_memory_used_bytes gauge
kvstrata_gate_memory_used_bytes{scope="a1",tier="dram"} 500
# HELP kvstrata_gate_memory_blocks Blocks that a scope holds in the cache server's memory.
# TYPE kvstrata_gate_memory_blocks gauge
kvstrata_gate_memory_blocks{scope="a1",tier="dram"} 9
# HELP kvstrata_gate_memory_limit_bytes Maximum for a scope there, if it has one.
# TYPE kvstrata_gate_memory_limit_bytes gauge
kvstrata_gate_memory_limit_bytes{scope="a1",tier="dram"} 800
# HELP kvstrata_gate_memory_guaranteed_bytes Bytes kept for a scope there.
# TYPE kvstrata_gate_memory_guaranteed_bytes gauge
# HELP kvstrata_gate_memory_scopes_unreported Scopes left out of the cache server's report of use.
# TYPE kvstrata_gate_memory_scopes_unreported gauge
kvstrata_gate_memory_scopes_unreported 6
# TYPE counted_total counter
counted_total 3
# TYPE half gauge
half 0.5
# TYPE whole gauge
whole 12345678
"""  # noqa: E501
BUCKETS = {
    "0.01": 0, "0.025": 0, "0.05": 0, "0.1": 0, "0.25": 1, "0.5": 2, "1.0": 2, "2.5": 2, "5.0": 2, "10.0": 2,
    "30.0": 2, "60.0": 2, "+Inf": 3,
}  # fmt: skip


def test_the_page_is_this_one() -> None:
    metrics = Metrics(max_tenants=1)
    numbers = metrics.tenant('a\\b"c\n')
    for status in (429, 200, 200):
        numbers.requests["/v1/completions", status] += 1
    numbers.in_flight, numbers.no_reuse = 3, 1
    numbers.uncounted["all"] = 2
    numbers.tokens(7, 5, -1)
    numbers.tokens(-1, -1, 4)
    for seconds in (0.01 + 0.01 + 0.13, 0.25 + 0.001, 100 - 0.141):
        numbers.ttft.add(seconds)
    for reason in ("timeout", "method", "timeout"):
        metrics.refusals[reason] += 1
    metrics.turned_away = {"address": 4}
    metrics.usage, metrics.usage_left_out = (ScopeUsage("a1", "dram", 500, 9, 800, None),), 6
    metrics.counters["counted_total"] = 3
    metrics.gauges = {"whole": 12_345_678, "half": 0.5}
    family, label = "kvstrata_gate_time_to_first_token_seconds_bucket", 'tenant="a\\\\b\\"c\\n"'
    buckets = "\n".join(f'{family}{{{label},le="{bound}"}} {count}' for bound, count in BUCKETS.items())
    assert metrics.page().decode() == PAGE.replace("BUCKETS", buckets)


def test_tenants_beyond_the_bound_are_counted_together_and_those_without_a_name_apart() -> None:
    metrics = Metrics(max_tenants=2)
    for name in ("a", "b", "c", "d", "_none"):
        metrics.tenant(name).tokens(1, 0, 0)
    counted = series(metrics.page().decode())
    name = "kvstrata_gate_prompt_tokens_total"
    assert {key: value for key, value in counted.items() if key.startswith(name)} == {
        f'{name}{{tenant="{tenant}"}}': value for tenant, value in {"a": 1, "b": 1, "_other": 2, "_none": 1}.items()
    }
    assert metrics.tenant("c") is metrics.tenant("_other") is not metrics.tenant("a")


async def test_the_health_pages_say_what_they_are(world: World) -> None:
    async with world.started():
        unready, alive, page = [await world.get(path) for path in ("/readyz", "/livez", "/metrics")]
        other = await world.get("/healthz")
        posted = await world.ask(b"POST /livez HTTP/1.1\r\nHost: g\r\nContent-Length: 0\r\n\r\n", "health")
    assert (unready.status, unready.headers["content-type"]) == (503, "text/plain; charset=utf-8")
    assert unready.body.startswith(b"no policy: ")
    assert unready.body.endswith(b"\n")
    assert (alive.status, alive.body, alive.headers["content-type"]) == (200, b"ok\n", "text/plain")
    assert (page.status, page.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert (other.status, other.error["code"]) == (404, "not_found")
    assert (posted.status, posted.error["code"], posted.headers["allow"]) == (405, "method", "get, head")
    assert all(answer.headers["connection"] == "close" for answer in (unready, alive, page, other, posted))


@pytest.mark.parametrize("line", ["HEAD /livez HTTP/1.1", "GET /livez HTTP/1.0", "HEAD /livez HTTP/1.0"])
async def test_the_health_port_answers_the_probes_of_load_balancers(gate: World, line: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.gate.ports["health"])
    host = "Host: g\r\n" if line.endswith("1.1") else ""
    writer.write(f"{line}\r\n{host}\r\n".encode())
    head, _, body = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"Content-Length: 3" in head
    assert body == (b"" if line.startswith("HEAD") else b"ok\n")
    writer.close()


async def test_callers_are_not_served_over_http_1_0(gate: World) -> None:
    answer = await gate.ask(b"GET /v1/models HTTP/1.0\r\nHost: g\r\nAuthorization: Bearer x\r\n\r\n")
    assert answer.status == 505


async def test_a_ready_gate_says_ok_and_counts_what_it_holds(gate: World) -> None:
    answer = await gate.get("/readyz")
    assert (answer.status, answer.body) == (200, b"ok\n")
    keeping = await gate.connect()
    told = series((await gate.get("/metrics")).body.decode())
    wanted = {
        "bundle_revision": 1, "acked_revision": 1, "seen_revision": 1, "policy_fresh": 1, "cache_linked": 1,
        "engine_ready": 1, "connections": 1, "buffered_bytes": 0, "api_keys": 3, "api_keys_current": 1,
    }  # fmt: skip
    assert {name: told[f"kvstrata_gate_{name}"] for name in wanted} == wanted
    assert 0 <= told["kvstrata_gate_policy_age_seconds"] < 30
    assert told["kvstrata_gate_audit_dropped_total"] == 0
    keeping.close()
    await gate.adapter.stop()
    await until(lambda: b"kvstrata_gate_cache_linked 0" in gate.gate.metrics_page())
