"""Each shell block of the documentation is run by a test, or says `not run here: REASON`."""

from __future__ import annotations

import re
from pathlib import Path

from e2e.command_blocks import REPOSITORY, all_blocks, blocks

PROOF = REPOSITORY / "docs/proof.md"


def test_each_block_is_run_by_a_test_or_says_why_not() -> None:
    found = all_blocks()
    assert len(found) > 60
    assert [
        f"{block.page}: {block.text.splitlines()[0]}"
        for block in found
        if not (block.is_marked or block.test or block.is_of_make_test)
    ] == []


def test_a_test_that_a_page_names_runs_the_blocks_of_that_page() -> None:
    named = {(block.page, block.test) for block in all_blocks() if block.test}
    assert named
    for page, test in named:
        assert page in (REPOSITORY / test).read_text(), f"{test} does not run {page}"


def test_the_number_of_blocks_that_are_not_run_is_in_the_proof() -> None:
    stated = re.search(r"(\d+) of (\d+) shell blocks", PROOF.read_text())
    assert stated is not None
    found = all_blocks()
    assert [int(number) for number in stated.groups()] == [sum(block.is_marked for block in found), len(found)]


def test_an_unmarked_command_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nkubectl get pods\n```\n<!-- not run here: no cluster -->\n```sh\nkubectl get pods\n```\n"
        '```sh\nmake test TESTS="tests/a\n  tests/b"\n.local/venv/bin/python -m pytest tests\n```\n'
        "<!-- run by e2e/scenarios/test_guides.py -->\n```sh\nkubectl get nodes\n```\n"
        "<!-- not run here: -->\n```sh\nls\n```\n"
    )
    found = [(block.is_marked, bool(block.test), block.is_of_make_test) for block in blocks(page)]
    assert found == [
        (False, False, False),
        (True, False, False),
        (False, False, True),
        (False, True, False),
        (False, False, False),
    ]
