"""Whatever the documentation tells to run is there: make's targets, tests, benchmarks, modules, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from e2e.product.chapters import CHAPTERS

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = (
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "charts").rglob("*.md")),
)
CODE = re.compile(r"^```.*?^```|`[^`]+`", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")
TESTS = re.compile(r"\bTESTS=(?:\"([^\"]*)\"|([^\s\"`]+))")
BENCHMARK = re.compile(r"\bBENCH=([\w-]+)")
MODULE = re.compile(r"-m ((?:e2e|bench)[\w.]*)")
PATH = re.compile(r"(?:tests|e2e|bench|docs|manifests|charts|crds|operator|sidecar|requirements)/[\w./-]*\w/?")
CHAPTER = re.compile(r"`make demo`, chapter (\d+)")


def code(page: Path) -> list[str]:
    """A page's blocks and spans of code."""
    return CODE.findall(page.read_text())


def wrong(page: Path) -> list[str]:
    """What a page names and the repository does not have."""
    told = code(page)
    makefile = (REPOSITORY / "Makefile").read_text()
    missing = []
    for one in told:
        missing += [f"make {name}" for name in TARGET.findall(one) if f"\n{name}:" not in makefile]
        tests = [path for pair in TESTS.findall(one) for path in "".join(pair).split() if not path.startswith("-")]
        missing += [path for path in tests if not (REPOSITORY / path.partition("::")[0]).exists()]
        missing += [name for name in BENCHMARK.findall(one) if not (REPOSITORY / f"bench/ranges/{name}.json").exists()]
        for module in MODULE.findall(one):
            place = REPOSITORY / module.replace(".", "/")
            if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists():
                missing.append(module)
        whole = PATH.fullmatch(one.strip("`"))
        if whole and not (REPOSITORY / whole[0]).exists():
            missing.append(whole[0])
    text = page.read_text()
    missing += [f"chapter {number}" for number in CHAPTER.findall(text) if not 0 < int(number) <= len(CHAPTERS)]
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_a_page_tells_to_run_is_there(page: Path) -> None:
    assert wrong(page) == []


def test_what_is_not_there_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '`make nothing`, `make test TESTS="tests/unit -s tests/gone.py"`, `make bench BENCH=none`,\n'
        "`python3 -m e2e.gone`, `tests/tiers/gone.py`, `make demo`, chapter 99\n"
        "```sh\nmake nowhere\n```\n"
    )
    files = ["tests/gone.py", "none", "e2e.gone", "tests/tiers/gone.py"]
    assert wrong(page) == ["make nothing", *files, "make nowhere", "chapter 99"]
