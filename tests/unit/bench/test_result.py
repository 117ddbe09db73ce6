"""What a benchmark's result says about its ranges, and when it says nothing."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from bench.__main__ import EXIT_CODES
from bench.result import (
    NOT_JUDGED,
    ON_A_QUIET_MACHINE,
    OTHER_LOAD,
    QUIET_PERCENT,
    RANGES,
    RATIO,
    Figure,
    Result,
    load_range,
    overall,
    percentile,
)

QUIET = {OTHER_LOAD: 0}
NAMES = sorted(path.stem for path in RANGES.glob("*.json"))


def judged(value: float, bounds: dict[str, Any], other_load_percent: float = 0, unit: str = "s") -> dict[str, Any]:
    result = Result(
        name="x",
        figures={"took": Figure(value, unit)},
        baseline={},
        ratio=1.0,
        reproduce="",
        conditions={OTHER_LOAD: other_load_percent},
    )
    return result.to_json({"took": bounds})


@pytest.mark.parametrize(("value", "ok"), [(0.9, False), (1.0, True), (2.0, True), (2.1, False)])
def test_a_figure_outside_of_its_range_fails_the_run(value: float, ok: bool) -> None:
    document = judged(value, {"min": 1.0, "max": 2.0}, other_load_percent=90)
    assert document["ok"] is ok
    assert document["out_of_range"] == ([] if ok else ["took"])


def test_elapsed_time_is_judged_on_a_quiet_machine() -> None:
    document = judged(3.0, {"max": 2.0, ON_A_QUIET_MACHINE: True}, other_load_percent=QUIET_PERCENT)
    assert not document["ok"]
    assert document["too_busy_to_judge"] == []


def test_elapsed_time_beyond_its_bound_on_a_busy_machine_is_not_judged() -> None:
    document = judged(3.0, {"max": 2.0, ON_A_QUIET_MACHINE: True}, other_load_percent=QUIET_PERCENT + 1)
    assert document["ok"] == document["figures"]["took"]["ok"] == NOT_JUDGED
    assert document["too_busy_to_judge"] == ["took"]
    assert document["out_of_range"] == []


def test_elapsed_time_within_its_bound_holds_on_a_busy_machine() -> None:
    document = judged(1.0, {"max": 2.0, ON_A_QUIET_MACHINE: True}, other_load_percent=QUIET_PERCENT + 1)
    assert document["ok"] is document["figures"]["took"]["ok"] is True


@pytest.mark.parametrize("value", [1.0, 3.0])
def test_a_ratio_of_elapsed_times_on_a_busy_machine_is_not_judged(value: float) -> None:
    document = judged(value, {"max": 2.0, ON_A_QUIET_MACHINE: True}, QUIET_PERCENT + 1, unit=RATIO)
    assert document["ok"] == NOT_JUDGED


def test_a_result_is_false_before_not_judged_before_true_each_with_its_exit_code() -> None:
    assert overall([]) is overall([True, True]) is True
    assert overall([True, NOT_JUDGED]) == NOT_JUDGED
    assert overall([True, NOT_JUDGED, False]) is False
    assert EXIT_CODES == {True: 0, False: 1, NOT_JUDGED: 3}


def test_a_range_of_a_figure_that_was_not_measured_is_an_error() -> None:
    result = Result(name="x", figures={}, baseline={}, ratio=1.0, reproduce="", conditions=QUIET)
    with pytest.raises(KeyError):
        result.to_json({"typo": {"max": 1}})


def test_a_result_needs_the_load_of_other_programs() -> None:
    with pytest.raises(KeyError, match=OTHER_LOAD):
        Result(name="x", figures={}, baseline={}, ratio=1.0, reproduce="", conditions={}).to_json({})


def test_a_figure_tells_its_baseline_its_ratio_and_its_range() -> None:
    result = Result("x", {"took": Figure(3.0, "s", baseline=2.0)}, {}, ratio=1.0, reproduce="", conditions=QUIET)
    told = result.to_json({"took": {"max": 2.5}})["figures"]["took"]
    assert told == {"value": 3.0, "unit": "s", "baseline": 2.0, "ratio": 1.5, "range": {"max": 2.5}, "ok": False}


def test_ranges_of_what_a_machine_cannot_measure_are_left_out_and_said_to_be() -> None:
    result = Result("x", {}, {}, 1.0, reproduce="", conditions=QUIET, not_measured={"pods_": "there is no cluster"})
    document = result.to_json({"pods_took": {"max": 1}})
    assert document["ok"]
    assert document["range"] == {}
    assert document["not_measured"] == {"pods_": "there is no cluster"}
    with pytest.raises(KeyError):
        result.to_json({"typo": {"max": 1}})


@pytest.mark.parametrize("name", NAMES)
def test_every_range_has_a_benchmark_of_its_name_and_known_bounds(name: str) -> None:
    module = importlib.import_module(f"bench.{name.replace('-', '_')}")
    assert inspect.iscoroutinefunction(module.measure)
    for figure, bounds in load_range(name).items():
        assert bounds.keys() <= {"min", "max", ON_A_QUIET_MACHINE}, figure
        assert bounds.keys() & {"min", "max"}, figure


def test_a_percentile_is_a_sample() -> None:
    samples = [float(number) for number in range(1, 201)]
    assert percentile(samples, 50) == 100
    assert percentile(samples, 99) == 198
    assert percentile([7.0], 99) == 7
