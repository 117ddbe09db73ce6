"""Lines of the gate's log."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvstrata_sidecar.gate import log


@pytest.mark.parametrize(("tell", "level"), [(log.info, "info"), (log.warning, "warning")])
def test_a_line_is_one_object_with_time_level_and_fields(
    tell: Any, level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0625)
    tell("späť", count=2, path=Path("/x"), none=None)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "späť" in told.err
    line = json.loads(told.err)
    assert line == {
        "time": "2023-11-14T22:13:20.062Z", "level": level, "component": "gate", "message": "späť", "count": 2,
        "path": "/x", "none": None,
    }  # fmt: skip
    assert list(line)[:4] == ["time", "level", "component", "message"]
