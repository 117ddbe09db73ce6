"""A gate's page of metrics is what Prometheus' own library for Python reads."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_sidecar.gate.metrics import Metrics
from tests.support.metrics_page import families, series

from .world import World


@settings(deadline=None)
@given(st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=5))
def test_a_tenant_of_any_name_is_on_the_page_with_what_was_counted(names: set[str]) -> None:
    metrics = Metrics(max_tenants=5)
    for number, name in enumerate(sorted(names)):
        metrics.tenant(name).tokens(number, 0, 0)
        metrics.tenant(name).first_token(0.3)
        metrics.tenant(name).answered("/v1/completions", 200)
    page = families(metrics.page().decode())
    told = {sample.labels["tenant"]: sample.value for sample in page["kvstrata_gate_prompt_tokens_total"].samples}
    assert told == {name: number for number, name in enumerate(sorted(names))}
    first = page["kvstrata_gate_time_to_first_token_seconds"].samples
    assert {sample.value for sample in first if sample.labels.get("le") in ("0.5", "+Inf")} <= {1.0}
    assert {sample.value for sample in first if sample.labels.get("le") == "0.25"} <= {0.0}


async def test_the_page_of_a_gate_that_serves_is_read(gate: World) -> None:
    assert series((await gate.get("/metrics")).body.decode())["kvstrata_gate_api_keys_current"] == 1
