"""docs/proof.md: each row's tests exist, the commands that the row names run them, and it says what each shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from e2e.claims import shows_a_claim
from e2e.parts import PARTS, STORIES
from e2e.product.chapters import CHAPTERS
from e2e.run_tests import folders

REPOSITORY = Path(__file__).resolve().parents[3]
PROOF = REPOSITORY / "docs/proof.md"
README_BYTES = 8192
COMMANDS = (
    r"`make (?P<claims>test)`",
    r"`make test-all PART=(?P<part>\w+)`",
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
    ways = [match.groupdict() for match in matched if match]
    if any(way.get("claims") for way in ways) and not any(is_run(path) for path in row.tests):
        found.append("make test runs none of its tests")
    if len({"claims", "part"} & {way for one in ways for way, value in one.items() if value}) == 2:
        found += [] if re.search("[Ii]n all tests", row.claim) else ["it does not say what only `make test-all` shows"]
    tests = [path for path in row.tests if path.startswith(("tests/", STORIES))]
    return found + [f"none of its commands runs {path}" for path in tests if not any(runs(way, path) for way in ways)]


def runs(way: dict[str, str], path: str) -> bool:
    """Whether a command runs tests of this file or folder."""
    if way.get("part"):
        folders_of_part = next((part.paths for part in PARTS if part.name == way["part"]), ())
        return any(Path(path).is_relative_to(folder) for folder in folders_of_part)
    return is_run(path) if way.get("claims") else bool(way.get("chapter"))


def _bench_of(name: str) -> str:
    path = f"bench/ranges/{name}.json"
    return path if (REPOSITORY / path).exists() else ""


def is_run(path: str) -> bool:
    """Whether `make test` runs tests of this file or folder."""
    place = REPOSITORY / path
    files = [place] if place.suffix else sorted(place.rglob("test_*.py"))
    found = [file for file in files if file.name.startswith("test_") and file.exists() and shows_a_claim(file)]
    return bool(found) and any(Path(path).is_relative_to(folder) for folder in (*folders(), STORIES))


def test_every_row_is_run() -> None:
    found = rows(PROOF.read_text())
    assert len(found) > 50
    assert {row.claim[:60]: wrong for row in found if (wrong := problems(row))} == {}


def test_a_row_that_no_command_runs_is_noticed() -> None:
    page = (
        "| claim | shown by | run by |\n|---|---|---|\n"
        "| one | `tests/gone.py` | `make test` |\n"
        "| two | `e2e/product/chapters.py` | `make test` |\n"
        "| three | `tests/unit` | by hand |\n"
        "| four | `tests/unit` | `make demo`, chapter 99 |\n"
        "| five | `tests/apiserver/test_erasure_kills.py` | `make test` |\n"
        "| six | `tests/unit` `tests/tiers/test_erase.py` | `make test`; `make test-all PART=topology` |\n"
    )
    assert [problems(row) for row in rows(page)] == [
        [
            "tests/gone.py does not exist",
            "make test runs none of its tests",
            "none of its commands runs tests/gone.py",
        ],
        ["make test runs none of its tests"],
        ["by hand runs nothing", "none of its commands runs tests/unit"],
        ["there is no chapter 99"],
        [
            "make test runs none of its tests",
            "none of its commands runs tests/apiserver/test_erasure_kills.py",
        ],
        ["it does not say what only `make test-all` shows", "none of its commands runs tests/tiers/test_erase.py"],
    ]


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_bytes()) <= README_BYTES
