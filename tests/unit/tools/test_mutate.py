"""`make mutate`: which lines are changed, where a change is, and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutmut.configuration import reset_config

from tools import mutate
from tools.mutate import PARTS, REPOSITORY, Mutant, changed_lines, mutants_of, part_of

SOURCE = '''"""A module."""

LIMIT = 7


def first(a: int | None, b: int = 3) -> int:
    """Return something."""
    if a is None:
        raise ValueError("there is no a")
    return a + b


class Box:
    def full(self) -> bool:
        return (
            self.count
            >= LIMIT
        )

    async def fill(self, kind: str = "some") -> None:
        log.info("a line of the log", kind)
        self.kind = kind
'''


@pytest.fixture
def mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Mutant]:
    (tmp_path / "src").mkdir()
    (tmp_path / "setup.cfg").write_text(f"[mutmut]\nsource_paths = src\ndo_not_mutate_patterns = {mutate.LOG_LINES}\n")
    monkeypatch.chdir(tmp_path)
    reset_config()
    found = list(mutants_of("operator/src/kvstrata/plan/box.py", SOURCE))
    reset_config()
    return found


def test_a_change_is_named_by_the_line_where_it_begins(mutants: list[Mutant]) -> None:
    lines = SOURCE.splitlines()
    for one in mutants:
        assert one.change[0] == f"-{lines[one.line - 1]}"
        assert one.name.startswith(("kvstrata.plan.box.x_first__mutmut_", "kvstrata.plan.box.xǁBoxǁ"))
    changes = {one.change for one in mutants}
    assert ("-    if a is None:", "+    if a is not None:") in changes
    assert ("-    return a + b", "+    return a - b") in changes
    assert ("-            self.count", "-            >= LIMIT", "+            self.count > LIMIT") in changes
    assert ("-        self.kind = kind", "+        self.kind = None") in changes
    assert not any("LIMIT = " in text or "log.info" in text for one in mutants for text in one.change)


def test_text_for_people_is_left_out_and_other_text_is_not(mutants: list[Mutant]) -> None:
    left_out = {text for one in mutants if one.is_prose() for text in one.change if text[0] == "-"}
    assert left_out == {'-        raise ValueError("there is no a")'}
    assert any('"XXsomeXX"' in text for one in mutants if not one.is_prose() for text in one.change)


def test_changed_lines_are_the_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    told = (
        "+++ b/operator/src/kvstrata/a.py\n@@ -1,2 +3,2 @@\n-x\n+y\n@@ -9 +9 @@ def f():\n@@ -12,3 +11,0 @@\n"
        "+++ b/sidecar/src/kvstrata_sidecar/reserve.lua\n@@ -1 +1 @@\n+++ /dev/null\n@@ -1,5 +0,0 @@\n"
    )
    monkeypatch.setattr(mutate, "git", lambda *arguments: told)
    assert changed_lines("main") == {"operator/src/kvstrata/a.py": {3, 4, 9}}


@pytest.mark.parametrize("name", sorted(PARTS))
def test_a_part_has_modules_and_tests(name: str) -> None:
    folder, tests = PARTS[name]
    modules = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / folder).rglob("*.py")]
    assert any(part_of(path) == name for path in modules)
    assert all(list(REPOSITORY.glob(pattern)) for pattern in tests)


def test_every_product_module_but_those_at_the_top_has_a_part() -> None:
    for root in (mutate.OPERATOR, mutate.SIDECAR):
        modules = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / root).rglob("*.py")]
        assert [path for path in modules if part_of(path) is None and Path(path).parent != Path(root)] == []
