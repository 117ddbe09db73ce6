"""Ranges against the claims of docs/proof.md, and checked-in results against ranges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.measured import RESULTS
from bench.result import ON_A_QUIET_MACHINE, RANGES, RATIO, Figure, Result, load_range

ROOT = Path(__file__).parents[3]
PROOF, README = (ROOT / "docs/proof.md").read_text(), (ROOT / "README.md").read_text()
ONE_SECOND = "an edit is enforced, and an invalidation acknowledged, by all of them within a second (p99"
NOTHING_WRITTEN = "no write at rest, none after a restart"
DEAD_TIER = "a dead tier costs a lookup at most 2 ms"
SHARING = "store and compute at most 5 % more than the arithmetic optimum"
POOL_HIT = "a hit of a pool costs at most 1.1 times a private one"
PLAIN_FILES = "A full tier of files moves at least three quarters of the bytes per second that fio gets"
SMALL_ANSWERS = "small answers take at most 12 ms (p99) while a shard is added to 2 GiB of blocks"
ENVOY = "For chats of 8 and 200 kB the gate costs at most 0.8 times the CPU of Envoy"
FINGERPRINT = "An engine's fingerprint takes at most 5 s at its start, and reads at most 4 MB of a model of 140 GB"
OPENING = "first requests of 16 tenants with a common prompt take at most half of their time"

PROMISES: list[tuple[str, str, str, dict[str, float]]] = [
    (ONE_SECOND, "enforce", "edit_to_enforced_p99", {"max": 1}),
    (ONE_SECOND, "enforce", "invalidation_acknowledged_p99", {"max": 1}),
    (NOTHING_WRITTEN, "render", "writes_at_rest", {"max": 0}),
    (NOTHING_WRITTEN, "render", "restart_writes", {"max": 0}),
    ("at most 1.8 times the processor time of LMCache's own", "adapter", "plain_cpu_of_native", {"max": 1.8}),
    ("2.4 times with encryption", "adapter", "sealed_cpu_of_native", {"max": 2.4}),
    (DEAD_TIER, "adapter", "dead_tier_first_lookups_max", {"max": 2}),
    (DEAD_TIER, "adapter", "dead_tier_lookup_max", {"max": 2}),
    (SHARING, "sharing", "stored_of_best_max", {"max": 1.05}),
    (SHARING, "sharing", "prefill_of_best_max", {"max": 1.05}),
    (SHARING, "sharing", "memory_stored_of_best_max", {"max": 1.05}),
    (SHARING, "sharing", "memory_prefill_of_best_max", {"max": 1.05}),
    (POOL_HIT, "sharing", "redis_pool_hit_of_private", {"max": 1.1}),
    (POOL_HIT, "sharing", "redis_pool_hit_cpu_of_private", {"max": 1.1}),
    (POOL_HIT, "sharing", "memory_pool_hit_of_private", {"max": 1.1}),
    (POOL_HIT, "sharing", "memory_pool_hit_cpu_of_private", {"max": 1.1}),
    ("vLLM answers with the pool as without a cache", "sharing", "engine_outputs_equal", {"min": 100}),
    ("costs them at most 2 % of their hits under budgets", "neighbours", "neighbours_hits_lost", {"max": 2}),
    (PLAIN_FILES, "files", "plain_store_of_limit", {"min": 0.75}),
    (PLAIN_FILES, "files", "plain_load_of_limit", {"min": 0.75}),
    ("encrypted three fifths", "files", "sealed_store_of_limit", {"min": 0.6}),
    ("encrypted three fifths", "files", "sealed_load_of_limit", {"min": 0.6}),
    (ENVOY, "gate", "cpu_8kb_of_envoy", {"max": 0.8}),
    (ENVOY, "gate", "cpu_200kb_of_envoy", {"max": 0.8}),
    ("for 8 kB at most a fiftieth of LiteLLM's proxy", "gate", "litellm_8kb_of_cpu", {"min": 50}),
    (FINGERPRINT, "fingerprint", "engine_took", {"max": 5}),
    (FINGERPRINT, "fingerprint", "large_took", {"max": 5}),
    (FINGERPRINT, "fingerprint", "large_read", {"max": 4}),
    ("100 tiers are checked and Ready within 6 s", "tier", "external_first_apply_to_all_ready", {"max": 6}),
    ("Such a cluster is Ready within 6 s of its apply", "tier", "pods_apply_to_ready", {"max": 6}),
    ("at most 0.2 s when a primary's pod is deleted", "tier", "pods_deleted_writes_stopped", {"max": 0.2}),
    ("3 s when a primary is killed", "tier", "pods_killed_until_served", {"max": 3}),
    (SMALL_ANSWERS, "tier", "scaled_1mib_small_p99", {"max": 12}),
    (SMALL_ANSWERS, "tier", "scaled_valkey_16mib_small_p99", {"max": 12}),
    ("at most 1.05 times the processor time to the first token", "benefit", "first_token_cpu_of_salted", {"max": 1.05}),
    ("serves at least 0.95 times as many", "benefit", "requests_per_cpu_of_salted", {"min": 0.95}),
    (OPENING, "benefit", "pool_opening_cpu_of_isolated", {"max": 0.5}),
    ("all compute at most 1.05 times the optimum's tokens", "benefit", "pool_computed_of_best_max", {"max": 1.05}),
    ("No tenant is served a block of another", "benefit", "foreign_hits", {"max": 0}),
]
"""Words of a claim, the benchmark that shows them, its figure, and the figure's bounds."""


@pytest.mark.parametrize(("words", "benchmark", "figure", "bounds"), PROMISES)
def test_a_range_is_the_claim_of_the_proof(words: str, benchmark: str, figure: str, bounds: dict[str, float]) -> None:
    assert words in PROOF
    found = load_range(benchmark)[figure]
    assert {name: found[name] for name in ("min", "max") if name in found} == bounds


def test_every_benchmark_of_the_proof_has_a_claim_here() -> None:
    named = {path.stem for path in RANGES.glob("*.json") if f"make bench BENCH={path.stem}`" in PROOF}
    assert named
    assert named <= {benchmark for _, benchmark, _, _ in PROMISES}


ELAPSED_UNITS = ("s", "ms", "1/s", "GB/s", RATIO)
MAIN_RATIOS_OF_COUNTS = {("erase", "ratio"), ("neighbours", "ratio")}
"""Of processor times and of hits."""


def is_elapsed(benchmark: str, figure: str, unit: str) -> bool:
    """Whether a figure is an elapsed time, or computed from elapsed times: neither processor time nor counts."""
    counted = "cpu" in figure or "_of_best_" in figure or (benchmark, figure) in MAIN_RATIOS_OF_COUNTS
    return unit in ELAPSED_UNITS and not counted


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_no_elapsed_time_fails_on_a_busy_machine(path: Path) -> None:
    figures = json.loads(path.read_text())["figures"] | {"ratio": {"unit": RATIO}}
    limits = load_range(path.stem)
    elapsed = [name for name in limits if is_elapsed(path.stem, name, figures[name]["unit"])]
    assert [name for name in elapsed if not limits[name].get(ON_A_QUIET_MACHINE)] == []


def result_of(document: dict[str, Any]) -> Result:
    figures = {name: Figure(told["value"], told["unit"]) for name, told in document["figures"].items()}
    return Result(
        name=document["name"],
        figures=figures,
        baseline={},
        ratio=document["ratio"],
        reproduce="",
        conditions=document["conditions"],
        not_measured=document.get("not_measured", {}),
    )


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_checked_in_result_is_judged_by_todays_range(path: Path) -> None:
    document = json.loads(path.read_text())
    judged = result_of(document).to_json(load_range(path.stem))
    for field in ("ok", "range", "out_of_range", "too_busy_to_judge"):
        assert document[field] == judged[field], field
    assert judged["ok"] is not False
    for name, figure in judged["figures"].items():
        assert document["figures"][name].get("ok") == figure.get("ok"), name


ARMS_OF_README = {
    "no reuse": "no_reuse",
    "vLLM's prefix cache": "prefix_cache",
    "LMCache, a salt for each tenant": "salted",
    "kvstrata: isolated, budgets, encrypted": "isolated",
    "the same with a pool": "pool",
}


def test_readmes_table_of_the_benefit_is_of_the_result() -> None:
    document = json.loads((RESULTS / "benefit.json").read_text())
    found = {name: one["value"] for name, one in {**document["baseline"], **document["figures"]}.items()}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line[:1] == "|"]
    table = {cells[0]: cells[1:] for cells in rows if cells[0] in ARMS_OF_README}
    for title, arm in ARMS_OF_README.items():
        others = found[f"{arm}_of_other_tenants"]
        shown = "" if arm == "no_reuse" else f"{others:,} tokens" if others else "0"
        assert table[title] == [
            f"{found[f'{arm}_first_token_p50']:.1f} s",
            f"{found[f'{arm}_computed']:.0f} %",
            f"{found[f'{arm}_requests_per_cpu']:.2f}",
            shown,
        ]
