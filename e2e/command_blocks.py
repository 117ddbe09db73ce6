"""The shell blocks of the documentation, and whether a test runs each."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = (
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "charts").rglob("*.md")),
)
BLOCK = re.compile(r"(?:^ *<!-- (?P<mark>[^\n]*) -->\n)?^(?P<indent> *)```sh\n(?P<text>.*?)^ *```", re.M | re.S)
NOT_RUN = re.compile(r"not run here: .+")
RUN_BY = re.compile(r"run by (?P<test>\S+\.py)")
OF_MAKE_TEST = re.compile(
    r"(?:make (?:demo|test|check|unit|generate|format|help|down)\b|\.local/venv/bin/python -m pytest\b"
    r"|export (?:KUBECONFIG|PYTHONPATH)=|python3 -m e2e\.images (?:load|build)\b|python3 -m e2e\.cluster\b).*"
)
"""Commands that `make test` is made of, or that it runs itself."""

AS_TYPED = """
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
sleep() { command sleep $((3 * $1)); }
"""
"""Before a page's commands: their background processes end with them, and a machine may be slower than a reader."""

ENDED_WITHIN_S = 1800


@dataclass(frozen=True, slots=True)
class Block:
    """A shell block: its page, relative to the repository, its text, and the comment before it."""

    page: str
    text: str
    mark: str

    @property
    def is_marked(self) -> bool:
        """Whether the page states that no test runs it, and why."""
        return NOT_RUN.fullmatch(self.mark) is not None

    @property
    def test(self) -> str:
        """The test that the page names; empty if it names none."""
        found = RUN_BY.fullmatch(self.mark)
        return found["test"] if found else ""

    @property
    def is_of_make_test(self) -> bool:
        """Whether every command is one that `make test` is made of."""
        lines = re.sub(r"\\\n|(?<=[^\n\"])\n(?=[^\n\"]*\")", " ", self.text).splitlines()
        return all(OF_MAKE_TEST.fullmatch(line.strip()) for line in lines if line.strip())


def blocks(page: Path) -> list[Block]:
    """The shell blocks of one page, in their order."""
    name = page.relative_to(REPOSITORY).as_posix() if page.is_relative_to(REPOSITORY) else page.name
    return [
        Block(name, textwrap.dedent(found["text"]), found["mark"] or "") for found in BLOCK.finditer(page.read_text())
    ]


def all_blocks() -> list[Block]:
    """The shell blocks of the whole documentation."""
    return [block for page in PAGES for block in blocks(page)]


def run(script: str, folder: Path, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> str:
    """Run commands of a page in a folder, each to succeed; return their output. `prefix` is a command that runs them.

    Raises:
        AssertionError: a command failed; with the output.
    """
    done = subprocess.run(
        [*prefix, "bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ENDED_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
