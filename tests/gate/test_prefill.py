"""The cost of prefill and the prefill that hits avoided, from pages as vLLM 0.32 writes them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvstrata_sidecar.gate.prefill import EXTERNAL, LOCAL, PrefillCost

LABELS = 'engine="0",model_name="a \\"b\\" } 7"'


def page(
    requests: int, seconds: float, computed: int, *, hits: Mapping[str, int] | None = None, engine: str = LABELS
) -> bytes:
    """What an engine shows after so many requests; `hits` are prompt tokens that were not computed, by source."""
    hits = {LOCAL: 0, EXTERNAL: 0} | dict(hits or {})
    lines = [
        "# TYPE vllm:request_prefill_time_seconds histogram",
        f'vllm:request_prefill_time_seconds_bucket{{{engine},le="+Inf"}} {requests}.0',
        f"vllm:request_prefill_time_seconds_sum{{{engine}}} {seconds}",
        f"vllm:request_prefill_time_seconds_count{{{engine}}} {requests}.0",
        f"vllm:request_prefill_kv_computed_tokens_sum{{{engine}}} {computed}.0",
        f"vllm:request_prompt_tokens_sum{{{engine}}} {computed + sum(hits.values())}.0",
        f'vllm:prompt_tokens_by_source_total{{{engine},source="local_compute"}} {computed}.0',
        *(f'vllm:prompt_tokens_by_source_total{{{engine},source="{name}"}} {n}.0' for name, n in hits.items()),
        f"vllm:prefix_cache_hits_total{{{engine}}} 1e9",
    ]
    return "\n".join([*lines, ""]).encode()


def test_the_cost_of_a_token_is_known_by_the_length_of_prefills() -> None:
    cost = PrefillCost()
    assert cost.seconds_per_token(1000) is None
    cost.observe(page(0, 0.0, 0))
    cost.observe(page(2, 4.0, 2000))
    cost.observe(page(3, 20.0, 6000))
    assert cost.by_length() == pytest.approx({1024: 0.002, 4096: 0.004})
    assert cost.seconds_per_token(1024) == pytest.approx(0.002)
    assert cost.seconds_per_token(4000) == pytest.approx(0.004)


def test_an_unmeasured_length_has_the_smaller_cost_of_its_neighbours() -> None:
    cost = PrefillCost()
    cost.observe(page(0, 0.0, 0))
    cost.observe(page(1, 1.0, 100))  # mostly overhead
    cost.observe(page(2, 5.0, 2100))
    cost.observe(page(3, 45.0, 12100))
    assert cost.seconds_per_token(400) == pytest.approx(0.002)
    assert cost.seconds_per_token(5000) == pytest.approx(0.002)
    assert cost.seconds_per_token(1_000_000) == pytest.approx(0.004)


def test_a_rest_of_a_prompt_that_was_found_measures_no_cost() -> None:
    cost = PrefillCost()
    cost.observe(page(0, 0.0, 0))
    cost.observe(page(10, 0.3, 40, hits={EXTERNAL: 9960}))
    assert cost.by_length() == {}
    assert cost.avoided_s == {LOCAL: 0, EXTERNAL: 0}
    cost.observe(page(11, 2.3, 1040, hits={EXTERNAL: 9960}))
    assert cost.avoided_s == pytest.approx({LOCAL: 0, EXTERNAL: 9960 * 0.002})


def test_the_prefill_avoided_is_that_of_the_tokens_found_by_the_cost_of_whole_prompts() -> None:
    cost = PrefillCost()
    cost.observe(page(0, 0.0, 0))
    cost.observe(page(1, 2.0, 1000))
    cost.observe(page(3, 2.4, 1200, hits={EXTERNAL: 900, LOCAL: 900}))
    assert cost.avoided_s == pytest.approx({LOCAL: 1.8, EXTERNAL: 1.8})
    cost.observe(page(3, 2.4, 1200, hits={EXTERNAL: 900, LOCAL: 900}))
    assert cost.avoided_s == pytest.approx({LOCAL: 1.8, EXTERNAL: 1.8})


def test_newer_measurements_displace_older_ones() -> None:
    cost = PrefillCost()
    cost.observe(page(100, 1000.0, 100_000))
    cost.observe(page(200, 1100.0, 200_000))
    assert cost.seconds_per_token(1000) == pytest.approx(0.001, rel=0.01)


def test_a_gate_that_starts_beside_a_running_engine_knows_its_cost_and_counts_no_earlier_hit() -> None:
    cost = PrefillCost()
    cost.observe(page(4, 8.0, 4000, hits={EXTERNAL: 5000}))
    assert (cost.seconds_per_token(1000), cost.avoided_s[EXTERNAL]) == (pytest.approx(0.002), 0)
    cost.observe(page(5, 8.2, 4100, hits={EXTERNAL: 5900}))
    assert cost.avoided_s[EXTERNAL] == pytest.approx(1.8)


def test_an_engine_that_starts_again_goes_on_counting() -> None:
    cost = PrefillCost()
    cost.observe(page(4, 8.0, 4000, hits={EXTERNAL: 5000}))
    cost.observe(page(0, 0.0, 0))
    cost.observe(page(1, 0.2, 100, hits={EXTERNAL: 900}))
    assert cost.avoided_s[EXTERNAL] == pytest.approx(1.8)


def test_engines_of_one_process_are_added_and_a_foreign_page_is_ignored() -> None:
    cost = PrefillCost()
    cost.observe(b"# TYPE up gauge\nup 1\n")
    other = LABELS.replace('"0"', '"1"')
    cost.observe(page(0, 0.0, 0) + page(0, 0.0, 0, engine=other))
    cost.observe(page(1, 1.0, 1000) + page(1, 3.0, 1000, engine=other))
    assert cost.by_length() == pytest.approx({1024: 0.002})
