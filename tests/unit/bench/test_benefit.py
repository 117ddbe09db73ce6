"""What the benchmark of sharing's worth asks, expects and concludes; what needs engines is in the benchmark itself."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.benefit import break_even
from bench.benefit.arms import GROUP_TENANTS, SMOKE, WALL_JUDGED, Arm, Cell, Settings, cells
from bench.benefit.figures import JUDGED_REPEATS, evaluate, run_of
from bench.benefit.metrics import computed_tokens, difference, samples
from bench.benefit.optimum import BLOCK_TOKENS, allowed, least
from bench.benefit.plan import Slot, State, best, digest, next_slot, of_earlier_code, remaining, slots
from bench.benefit.table import table
from bench.benefit.text import text, words
from bench.benefit.workload import (
    COMMON,
    COMMON_TOKENS,
    Family,
    Kind,
    Phase,
    Request,
    Segment,
    deal,
    families,
    shares,
    workload,
)
from bench.result import QUIET_PERCENT, load_range
from bench.sharing.excerpt import TENTH

SETTINGS = Settings()


@pytest.fixture(scope="module")
def traced() -> list[Family]:
    with gzip.open(TENTH, "rt", encoding="utf-8") as lines:
        return families(json.loads(line) for line in lines)


def request(number: int, tenant: int, *segments: Segment) -> Request:
    return Request(number, Kind.CHAT, tenant, segments)


A, B, C = Segment("a", 64), Segment("b", 100), Segment("c", 100)


class TestWorkload:
    def test_the_same_seed_asks_the_same_for_any_number_of_tenants(self, traced: list[Family]) -> None:
        one, many = workload(SETTINGS, 1, traced, "s"), workload(SETTINGS, 64, traced, "s")
        for few, more in ((one.paced, many.paced), (one.saturating, many.saturating)):
            assert [(a.number, a.segments, a.after) for a in few] == [(a.number, a.segments, a.after) for a in more]
        assert workload(SETTINGS, 1, traced, "other").paced != one.paced

    def test_prompts_fit_the_engine_and_a_turn_is_asked_after_the_one_before_it(self, traced: list[Family]) -> None:
        asked = workload(SETTINGS, 16, traced, "s").all
        assert max(one.tokens for one in asked) + SETTINGS.output_tokens <= SETTINGS.max_tokens
        assert len({one.number for one in asked}) == len(asked)
        assert all(one.after < one.number for one in asked if one.after is not None)

    def test_all_kinds_are_asked_about_equally_and_each_continues_in_its_way(self, traced: list[Family]) -> None:
        asked = {one.number: one for one in workload(SETTINGS, 16, traced, "s").all}
        kinds = Counter(one.kind for one in asked.values())
        assert min(kinds[kind] for kind in (Kind.CHAT, Kind.AGENT, Kind.RAG)) >= SETTINGS.saturating_requests // 4
        for one in asked.values():
            assert (one.segments[0] == COMMON) == (one.kind in (Kind.CHAT, Kind.OPENING))
            if one.after is None:
                continue
            before = asked[one.after]
            if one.kind is Kind.CHAT:
                assert one.segments[:-1] == before.segments
            if one.kind is Kind.RAG:
                assert one.segments[0] == before.segments[0]
                assert one.segments[1:] != before.segments[1:]
                assert one.tenant // GROUP_TENANTS == before.tenant // GROUP_TENANTS
        agents = [one for one in asked.values() if one.kind is Kind.AGENT and one.after is not None]
        assert any(one.segments[:-1] != asked[one.after].segments for one in agents if one.after is not None)

    def test_every_tenant_has_a_conversation_before_any_has_two(self) -> None:
        dealt = list(islice(deal(16, Random(1)), 200))
        assert sorted(dealt[:16]) == list(range(16))
        assert Counter(dealt[16:]).most_common(1)[0][0] == max(range(16), key=shares(16).__getitem__)
        assert sum(shares(16)) == pytest.approx(1)

    def test_families_have_the_traces_lengths_at_an_eighth(self) -> None:
        rows = [{"hash_ids": [0, 5], "input_length": 1000}, {"hash_ids": [0, 6], "input_length": 600},
                {"hash_ids": [0, 5, 7], "input_length": 1500}, {"hash_ids": [0], "input_length": 8}]  # fmt: skip
        assert families(rows) == [(125, 188), (75,), (1,)]


class TestText:
    def test_a_prompt_has_a_word_for_each_token_and_equal_segments_have_equal_words(self, tmp_path: Path) -> None:
        vocabulary = {"Ġthe": 5, "Ġcache": 700, "Ġof": 9, "the": 3, "Ġrarely": 30_000, "Ġx1": 6}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        known = words(tmp_path / "tokenizer.json")
        assert known == [" cache", " the"]
        first, second = text([A, B], "s", known), text([A, C], "s", known)
        assert len(first.split()) == 164
        assert first.split()[:64] == second.split()[:64]
        assert first != second
        assert text([A, B], "t", known) != first


class TestOptimum:
    def test_a_scope_finds_whole_chunks_that_it_computed_itself(self) -> None:
        asked = [request(0, 0, A, B), request(1, 0, A, C), request(2, 1, A, B)]
        assert least(asked, Arm.NO_REUSE, 64).computed_tokens == 3 * 164
        assert least(asked, Arm.ISOLATED, 64).computed_tokens == 3 * 164 - 64
        assert least(asked, Arm.LMCACHE, 64).computed_tokens == 3 * 164 - 64 - 128
        assert least(asked, Arm.GROUP, 64).computed_tokens == 3 * 164 - 64 - 128

    def test_a_pool_is_computed_once_and_found_by_all(self) -> None:
        asked = [request(tenant, tenant, COMMON, A) for tenant in range(4)]
        assert least(asked, Arm.ISOLATED, 64).computed_tokens == 4 * (COMMON_TOKENS + 64)
        assert least(asked, Arm.POOL, 64).computed_tokens == COMMON_TOKENS + 4 * (40 + 64), (
            "the last 40 tokens of the prefix fill no chunk"
        )

    def test_of_a_prompt_that_is_there_as_a_whole_one_token_is_computed(self) -> None:
        assert least([request(0, 0, A), request(1, 0, A)], Arm.ISOLATED, 64).computed_tokens == 64 + 1

    def test_a_tenant_may_find_what_it_has_in_common_with_its_scope_and_no_more(self) -> None:
        own, foreign = request(0, 0, A, C), request(1, 5, A, B)
        asked = request(2, 0, A, B)
        assert allowed(asked, [own, foreign], Arm.ISOLATED, Arm.ISOLATED) == 64
        assert allowed(asked, [own, foreign], Arm.LMCACHE, Arm.LMCACHE) == 164 // BLOCK_TOKENS * BLOCK_TOKENS
        assert allowed(asked, [own, foreign], Arm.LMCACHE, Arm.ISOLATED) == 64
        assert allowed(asked, [], Arm.ISOLATED, Arm.ISOLATED) == 0
        assert allowed(request(3, 0, COMMON, A), [], Arm.POOL, Arm.POOL) == COMMON_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


CODE = "0123456789abcdef"


def record(slot: Slot, call: int = 1, others: float = 5.0, **more: Any) -> dict[str, Any]:
    return {"slot": slot.name, "code": CODE, "call": call, "took_s": 60.0, "others_percent": others, **more}


class TestPlan:
    def test_what_is_judged_comes_first_and_arms_are_in_another_order_each_time(self) -> None:
        planned = slots(SETTINGS)
        main = [slot for slot in planned if slot.cell in SETTINGS.main]
        judged_until = len(Arm) + 1 + (JUDGED_REPEATS - 1) * len(WALL_JUDGED)
        assert {slot.cell for slot in planned[: len(Arm) + 1]} == {None, *SETTINGS.main}
        assert {slot.cell.arm for slot in planned[len(Arm) + 1 : judged_until] if slot.cell} == set(WALL_JUDGED)
        assert max(slot.repeat for slot in planned[:judged_until]) == JUDGED_REPEATS - 1
        assert Counter(slot.repeat for slot in main) == dict.fromkeys(range(SETTINGS.repeats), len(Arm))
        orders = {tuple(slot.cell for slot in main if slot.repeat == number) for number in range(SETTINGS.repeats)}
        assert len(orders) > 1
        judged = [[number for number, cell in enumerate(order) if cell.arm in WALL_JUDGED] for order in orders]
        assert all(places == list(range(places[0], places[0] + len(WALL_JUDGED))) for places in judged)
        assert {slot.cell for slot in planned} == {None, *cells(SETTINGS)}
        assert len({slot.name for slot in planned}) == len(planned)

    def test_a_call_goes_on_where_the_last_one_ended(self, tmp_path: Path) -> None:
        state = State(SMOKE, tmp_path / "runs.jsonl")
        first, second = slots(SMOKE)[:2]
        assert state.next(SMOKE) == first
        state.add(first, {"others_percent": 1.0}, 60)
        again = State(SMOKE, tmp_path / "runs.jsonl")
        assert (again.call, again.next(SMOKE)) == (2, second)
        again.add(second, {"others_percent": 1.0}, 60)
        assert [one["slot"] for one in State(SMOKE, tmp_path / "runs.jsonl").records] == [first.name, second.name]
        assert len(remaining(SMOKE, again.records)) == len(slots(SMOKE)) - 2

    def test_runs_of_earlier_code_stand_until_they_are_measured_again_after_all_that_is_missing(
        self, tmp_path: Path
    ) -> None:
        planned = slots(SMOKE)
        earlier = [record(slot) for slot in planned[:-1]]
        (tmp_path / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in earlier))
        state = State(SMOKE, tmp_path / "runs.jsonl")
        assert state.next(SMOKE) == planned[-1]
        state.add(planned[-1], {"others_percent": 1.0}, 60)
        assert state.next(SMOKE) == planned[0]
        state.add(planned[0], {"others_percent": 1.0}, 60)
        assert state.next(SMOKE) == planned[1]
        assert len(of_earlier_code(state.records, state.code)) == len(planned) - 2
        assert len(State(SMOKE, tmp_path / "runs.jsonl").records) == len(planned)

    def test_only_runs_of_a_busy_machine_are_tried_again_at_another_time_and_not_for_ever(self) -> None:
        records = [record(slot) for slot in slots(SETTINGS)]
        assert next_slot(SETTINGS, records, 2, CODE) is None
        busy = Slot(Cell(Arm.ISOLATED, SETTINGS.pods, SETTINGS.tenants), 1)
        records = [one | {"others_percent": 90.0} if one["slot"] == busy.name else one for one in records]
        assert next_slot(SETTINGS, records, 1, CODE) is None
        assert next_slot(SETTINGS, records, 2, CODE) == busy
        records.append(record(busy, call=2, others=60.0))
        assert next_slot(SETTINGS, records, 3, CODE) == busy
        assert best(records)[busy.name]["others_percent"] == 60.0
        records.append(record(busy, call=3, others=70.0))
        assert next_slot(SETTINGS, records, 4, CODE) is None

    def test_other_settings_and_other_code_have_another_digest(self, tmp_path: Path) -> None:
        for name in ("bench/benefit", "e2e/engine", "sidecar/src", "operator/src/kvstrata/contract", "requirements"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "requirements/engine-cpu.txt").write_text("vllm")
        (tmp_path / "sidecar/src/guard.py").write_text("1")
        seen = {digest(SETTINGS, tmp_path), digest(SMOKE, tmp_path)}
        (tmp_path / "bench/benefit/picture.py").write_text("colours")
        assert digest(SETTINGS, tmp_path) in seen
        assert digest(replace(SETTINGS, call_minutes=5), tmp_path) in seen
        (tmp_path / "sidecar/src/guard.py").write_text("2")
        seen.add(digest(SETTINGS, tmp_path))
        assert len(seen) == 3


def played(drawn: Sequence[Request], cell: Cell, *, cached: int = 0, cpu_s: float = 1.0, busy: bool = False) -> Any:
    rows = [
        {"number": one.number, "sent_s": float(one.number), "first_s": 0.5, "whole_s": 0.6, "cached": cached,
         "first_cpu_s": cpu_s}
        for one in drawn
    ]  # fmt: skip
    phase = {"wall_s": 10.0, "cpu_s": {"engine": cpu_s * 10, "redis": 0.0}, "computed": 100}
    return record(
        Slot(cell, 0), others=90.0 if busy else 5.0, requests=rows, phases={Phase.PACED: phase, Phase.FULL: phase},
        redis={"in": 1 << 20, "out": 1 << 20, "used": 1 << 20, "keys": 1}, memory_bytes=0, load_average=1.0,
    )  # fmt: skip


class TestFigures:
    def test_a_token_that_no_request_of_the_scope_explains_is_a_foreign_hit(self, traced: list[Family]) -> None:
        cell, drawn = Cell(Arm.ISOLATED, 2, 16), workload(SETTINGS, 16, traced, "repeat-0")
        assert run_of(played(drawn.all, cell), drawn, cell, SETTINGS).foreign_tokens == 0
        found = run_of(played(drawn.all, cell, cached=64), drawn, cell, SETTINGS)
        # Each tenant's first request can find nothing of its own.
        assert found.foreign_tokens >= 64 * len(drawn.opening)
        open_to_all = run_of(played(drawn.all, cell, cached=64), drawn, Cell(Arm.LMCACHE, 2, 16), SETTINGS)
        assert open_to_all.foreign_tokens < found.foreign_tokens == open_to_all.shared_tokens

    @pytest.mark.parametrize("busy", [False, True])
    def test_few_repeats_and_elapsed_times_of_a_busy_machine_are_shown_and_not_judged(
        self, traced: list[Family], busy: bool
    ) -> None:
        records = []
        for repeat in range(SETTINGS.repeats):
            drawn = workload(SETTINGS, 16, traced, f"repeat-{repeat}").all
            for cell in SETTINGS.main:
                slower = 1.2 if cell.arm is Arm.ISOLATED else 1.0
                one = played(drawn, cell, cpu_s=slower, busy=busy and repeat >= JUDGED_REPEATS - 1)
                records.append(one | {"slot": Slot(cell, repeat).name})
        found = evaluate(SETTINGS, records, traced)
        assert found.figures["first_token_cpu_of_salted"].value == pytest.approx(1.2)
        assert found.figures["requests_per_cpu_of_salted"].value == pytest.approx(1 / 1.2)
        assert ("first_token_of_salted" in found.not_measured) == busy
        assert "first_token_cpu_of_salted" not in found.not_measured
        mixed = [one | {"code": "other"} if one["slot"].startswith("e/2/16/") else one for one in records[:]]
        mixed = [one | {"code": CODE} if one["slot"] == "e/2/16/0" else one for one in mixed]
        assert evaluate(SETTINGS, mixed, traced).not_measured["first_token_cpu_of_salted"].startswith("1 repeats")
        once = [one for one in records if one["slot"].endswith("/0")]
        assert "first_token_cpu_of_salted" in evaluate(SETTINGS, once, traced).not_measured
        assert set(load_range("benefit")) <= set(found.figures)
        assert (found.others_percent > QUIET_PERCENT) == busy
        assert table(found, "make bench").count("\n| e kvstrata | 2 | 16 |") == 3

    def test_computed_tokens_are_the_growth_of_the_engines_counter(self) -> None:
        name = "vllm:request_prefill_kv_computed_tokens"
        page = '# HELP x\n{0}_sum{{engine="0"}} {1}\n{0}_bucket{{le="1"}} 7\nother 5\n'
        before, after = (samples(page.format(name, value)) for value in ("10.0", "74.0"))
        assert computed_tokens(difference(before, after)) == 64


class TestBreakEven:
    TOKENS = (64, 128, 256)

    def test_restoring_pays_from_where_it_stays_faster(self) -> None:
        assert break_even.break_even_tokens((1, 2, 4), (2, 2.5, 3), self.TOKENS) == pytest.approx(128 + 128 / 3)
        assert break_even.break_even_tokens((3, 4, 8), (2, 2, 3), self.TOKENS) == 64
        assert break_even.break_even_tokens((3, 4, 8), (2, 2, 9), self.TOKENS) is None

    def test_above_the_break_even_bandwidth_restoring_is_faster(self) -> None:
        needed = break_even.break_even_bandwidth(1000, computing_s=2.0, fixed_s=0.5, token_bytes=3000)
        assert needed is not None
        assert 0.5 + 1000 * 3000 / needed == pytest.approx(2.0)
        assert break_even.break_even_bandwidth(1000, computing_s=0.4, fixed_s=0.5) is None

    def test_the_formula_gives_the_published_orders(self) -> None:
        found = [break_even.derived_bandwidth(one) / 1e9 for one in break_even.ACCELERATORS]
        assert [round(one, 1) for one in found] == [1.0, 3.2, 3.7, 7.3]

    def test_a_curve_has_the_medians_of_each_length(self) -> None:
        rows = [{"source": "redis", "tokens": n, "first_s": s, "first_cpu_s": s / 2}
                for n, s in ((128, 3.0), (64, 1.0), (64, 5.0), (64, 2.0))]  # fmt: skip
        (curve,) = break_even.curves(rows).values()
        assert curve == break_even.Curve((64, 128), (2.0, 3.0), (1.0, 1.5))
