"""The troubleshooting guide names no error code that the gate does not have."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "operations" / "troubleshooting.md"
GATE = ROOT / "sidecar" / "src" / "kvstrata_sidecar" / "gate"
ROW = re.compile(r"^\| [0-9, ]{3,} (`[^|]+`) \|", re.MULTILINE)


def test_every_error_code_of_the_guide_is_one_that_the_gate_gives() -> None:
    rows: list[str] = ROW.findall(GUIDE.read_text())
    named = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    gate = "\n".join(path.read_text() for path in sorted(GATE.rglob("*.py")))
    assert "invalid_api_key" in named
    assert {code for code in named if f'"{code}"' not in gate} == set()
