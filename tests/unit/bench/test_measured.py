"""A benchmark's result has the files that decide it, and is measured again once they have changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench.measured import FILES, due, measured, old_results
from bench.result import NOT_JUDGED, RANGES, Verdict
from e2e.cluster.settings import REPOSITORY


def test_every_benchmark_names_files_that_exist() -> None:
    assert sorted(FILES) == sorted(path.stem for path in RANGES.glob("*.json"))
    assert [path for paths in FILES.values() for path in paths if not (REPOSITORY / path).exists()] == []


def test_a_result_is_old_when_its_files_have_changed_or_are_unknown(tmp_path: Path) -> None:
    new = {"measured": measured("gate")}
    (tmp_path / "gate.json").write_text(json.dumps(new))
    (tmp_path / "render.json").write_text("{}")
    assert old_results(tmp_path) == {"render": list(FILES["render"])}
    new["measured"]["files"]["bench/gate"] = "0123"
    (tmp_path / "gate.json").write_text(json.dumps(new))
    assert old_results(tmp_path)["gate"] == ["bench/gate"]


def test_due_are_results_that_are_missing_old_or_not_ok(tmp_path: Path) -> None:
    for name, ok, left in (
        ("adapter", True, 0), ("benefit", True, 7), ("erase", NOT_JUDGED, 0), ("gate", False, 0), ("render", True, 0)
    ):  # fmt: skip
        document = {"ok": ok, "conditions": {"runs_left": left}, "measured": measured(name)}
        (tmp_path / f"{name}.json").write_text(json.dumps(document | ({"measured": {}} if name == "render" else {})))
    assert due(("adapter", "benefit", "erase", "gate", "render", "tier"), tmp_path) == {
        "benefit": "7 of its runs are left",
        "erase": "its result is not judged",
        "gate": "a figure is out of its range",
        "render": f"its result is older than {', '.join(FILES['render'])}",
        "tier": "it has no result",
    }


@pytest.mark.parametrize(("names", "run"), [((), ["erase", "tier"]), (("gate", "tier"), ["gate", "tier"])])
def test_without_names_the_due_benchmarks_are_run_and_named_ones_always(
    names: tuple[str, ...], run: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_now: list[str] = []

    def run_one(name: str) -> Verdict:
        measured_now.append(name)
        return True

    monkeypatch.setattr("sys.argv", ["bench", *names])
    monkeypatch.setattr(bench, "due", lambda _known: {"erase": "it has no result", "tier": "its result is not judged"})
    monkeypatch.setattr(bench, "_run", run_one)
    assert bench.main() == 0
    assert measured_now == run
    printed = capsys.readouterr().err
    assert ("gate: its result stands\n" in printed) is ("erase: it has no result\n" in printed) is (not names)
