"""Figures in documents are those of the results, and a wrong citation names the page, the line and the fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.generate.__main__ import main
from tools.generate.figures import FigureError, build_pages, shown

RESULT = {
    "figures": {"took": {"value": 3.0841, "unit": "s"}},
    "baseline": {"peer_took": {"value": 20.0, "unit": "s"}},
    "ratio": 0.154,
    "conditions": {"other_load_percent": 17, "kernel": "6.18"},
}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "bench/results/tier.json").write_text(json.dumps(RESULT))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/other.md").write_text("<!-- run by a test -->\nNo figure.\n")
    return tmp_path / "docs/page.md"


def test_figures_baselines_conditions_and_the_ratio_are_written_into_their_places(page: Path) -> None:
    page.write_text(
        "It took <!-- tier.took -->9<!-- / --> s, not <!-- tier.peer_took --><!-- / -->.\n"
        "| <!-- tier.ratio -->x<!-- / --> |\nAt <!-- tier.other_load_percent -->17<!-- / --> %.\n"
    )
    assert build_pages(page.parents[1]) == {
        Path("docs/page.md"): "It took <!-- tier.took -->3.1<!-- / --> s, not <!-- tier.peer_took -->20<!-- / -->.\n"
        "| <!-- tier.ratio -->0.15<!-- / --> |\nAt <!-- tier.other_load_percent -->17<!-- / --> %.\n"
    }


def test_check_fails_while_a_page_has_another_number(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.write_text("It took <!-- tier.took -->9<!-- / --> s.\n")
    root = str(page.parents[1])
    assert main(["--check", "--root", root]) == 1
    assert "+It took <!-- tier.took -->3.1<!-- / --> s.\n" in capsys.readouterr().out
    assert main(["--root", root]) == main(["--check", "--root", root]) == 0


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("It took <!-- teir.took -->3<!-- / --> s", "there is no result bench/results/teir.json"),
        ("It took <!-- tier.toko -->3<!-- / --> s", "bench/results/tier.json has no number toko"),
        ("It runs on <!-- tier.kernel -->6.18<!-- / -->", "bench/results/tier.json has no number kernel"),
        ("It took <!-- tier.took -->3 s", "a figure is `<!-- RESULT.NAME -->NUMBER<!-- / -->` in one line"),
        ("It took <!-- tier took -->3<!-- / --> s", "a figure is `<!-- RESULT.NAME -->NUMBER<!-- / -->` in one line"),
        ("  <!-- tier.took -->3<!-- / --> s", "Markdown takes a line that begins with a comment as HTML"),
    ],
)
def test_a_wrong_citation_is_refused_with_its_place(
    line: str, fault: str, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write_text(f"# Page\n\n{line}\n")
    with pytest.raises(FigureError) as raised:
        build_pages(page.parents[1])
    assert str(raised.value) == f"docs/page.md:3: {fault}"
    assert main(["--check", "--root", str(page.parents[1])]) == 1
    assert capsys.readouterr().err == f"{raised.value}\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0558, "0.056"),
        (0.998, "1.0"),
        (3.0841, "3.1"),
        (9.97, "10"),
        (40.4551, "40"),
        (9164, "9,164"),
        (1234.5, "1,234"),
        (4, "4"),
        (0.0, "0"),
    ],
)
def test_a_number_has_two_digits_and_all_before_the_point(value: float, text: str) -> None:
    assert shown(value) == text
