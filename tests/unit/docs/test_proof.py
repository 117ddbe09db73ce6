"""docs/proof.md: each row's test exists and is run by `make test`, or the row names the command that runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from e2e.product.chapters import CHAPTERS
from e2e.run_tests import STORIES, folders

REPOSITORY = Path(__file__).resolve().parents[3]
PROOF = REPOSITORY / "docs/proof.md"
README_BYTES = 8192
COMMANDS = (
    r"`make test`",
    r"`make demo`, chapter (?P<chapter>\d+)",
    r"`(?:KVSTRATA_BENCH_WHOLE=1 )?make bench BENCH=(?P<bench>\w+)`(?: after `make demo`)?",
    r"`PYTHONPATH=operator/src:sidecar/src \.local/venv/bin/python -m (?P<module>e2e\.\w+)`",
)
"""The ways in which a row may be run."""


class Row(NamedTuple):
    claim: str
    tests: tuple[str, ...]
    commands: tuple[str, ...]


def rows(text: str) -> list[Row]:
    """The rows of the tables of claims."""
    claims = text.partition("\n## Never run")[0]
    cells = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", claims, re.MULTILINE)]
    return [
        Row(claim, tuple(re.findall(r"`([^`]+)`", shown)), tuple(run.split("; ")))
        for claim, shown, run in cells
        if claim != "claim"
    ]


def problems(row: Row) -> list[str]:
    """Name what a row promises and the repository does not have."""
    found = [f"{path} does not exist" for path in row.tests if not (REPOSITORY / path).exists()]
    if not row.tests:
        found.append("no test is named")
    matched = [next((m for way in COMMANDS if (m := re.fullmatch(way, one))), None) for one in row.commands]
    found += [f"{one} runs nothing" for one, match in zip(row.commands, matched, strict=True) if match is None]
    for named in (match.groupdict() for match in matched if match):
        if "chapter" in named and not 0 < int(named["chapter"]) <= len(CHAPTERS):
            found.append(f"there is no chapter {named['chapter']}")
        if "bench" in named and f"bench/ranges/{named['bench']}.json" not in (*row.tests, _bench_of(named["bench"])):
            found.append(f"there is no benchmark {named['bench']}")
    if "`make test`" in row.commands:
        found += [f"make test does not run {path}" for path in row.tests if not is_run(path)]
    return found


def _bench_of(name: str) -> str:
    path = f"bench/ranges/{name}.json"
    return path if (REPOSITORY / path).exists() else ""


def is_run(path: str) -> bool:
    """Whether `make test` runs this file or folder of tests."""
    place = REPOSITORY / path
    named = place.name.startswith("test_") if place.suffix else any(place.rglob("test_*.py"))
    return named and any(Path(path).is_relative_to(folder) for folder in (*folders(), STORIES))


def test_every_row_is_run() -> None:
    found = rows(PROOF.read_text())
    assert len(found) > 50
    assert {row.claim[:60]: wrong for row in found if (wrong := problems(row))} == {}


def test_a_row_that_no_command_runs_is_noticed() -> None:
    page = (
        "| claim | shown by | run by |\n|---|---|---|\n"
        "| one | `tests/gone.py` | `make test` |\n"
        "| two | `e2e/product/chapters.py` | `make test` |\n"
        "| three | `tests/tiers` | by hand |\n"
        "| four | `tests/tiers` | `make demo`, chapter 99 |\n"
    )
    assert [problems(row)[-1] for row in rows(page)] == [
        "make test does not run tests/gone.py",
        "make test does not run e2e/product/chapters.py",
        "by hand runs nothing",
        "there is no chapter 99",
    ]


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_bytes()) <= README_BYTES
