"""A benchmark's result has the files that decide it, and is listed once they have changed."""

from __future__ import annotations

import json
from pathlib import Path

from bench.measured import FILES, measured, old_results
from bench.result import RANGES
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
