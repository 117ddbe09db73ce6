"""Planted defects: each row of docs/proof.md has a patch of the product that must turn a test of the row red.

A patch lies beside the test, in a folder `defects`; the lines before its diff name the claim and the test. Each is
applied to a copy of the work tree, where its test is run; for a story the product of that copy is installed first. A
test that no defect turns red proves nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from e2e.claims import shows_a_claim
from e2e.cluster.settings import REPOSITORY
from e2e.parts import STORIES
from e2e.processor_time import counted_as

FOLDERS = ("tests/*/defects", f"{STORIES}/defects/*")
COPIES = Path(os.environ.get("KVSTRATA_DEFECTS", REPOSITORY / ".local" / "defects"))
"""Where copies of the work tree are made; `.local` is the work tree's in each."""

AT_ONCE = 2
WITHIN_S = 900
TEST_FAILED = 1
"""pytest's exit code when it ran to its end and a test failed."""

DOWN = (sys.executable, "-m", "e2e.cluster", "down")
BRING_UP = (sys.executable, "-m", "e2e.bring_up")

HEADER = re.compile(r"claim: (?P<claim>.+)\ntest: (?P<test>\S+)\n")


@dataclass(frozen=True, slots=True)
class Defect:
    """A patch of the product, and the test that it must turn red.

    Attributes:
        claim: how the row of docs/proof.md begins.
        test: a file, class or function, as pytest names it.
    """

    patch: Path
    claim: str
    test: str

    @property
    def name(self) -> str:
        """The patch's path in the repository."""
        return self.patch.relative_to(REPOSITORY).as_posix()

    @property
    def is_of_a_story(self) -> bool:
        """Whether its test needs the product on the local cluster."""
        return self.test.startswith(STORIES)


def defects() -> list[Defect]:
    """Return all that lie in the repository, in the order of their files."""
    return [parse(path) for folder in FOLDERS for path in sorted(REPOSITORY.glob(f"{folder}/*.patch"))]


def parse(patch: Path) -> Defect:
    """Read the lines before a patch's diff.

    Raises:
        ValueError: they do not name a claim and a test.
    """
    found = HEADER.match(patch.read_text())
    if found is None:
        raise ValueError(f"{patch} does not begin with the lines `claim: ...` and `test: ...`")
    return Defect(patch, found["claim"], found["test"])


def plant(chosen: Sequence[Defect]) -> list[str]:
    """Plant each defect and run its test, and print the table; returns those that were not found.

    Tests are run two at a time, and stories one after the other; the cluster keeps the product of the last one.
    """
    missed = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tests = [defect for defect in chosen if not defect.is_of_a_story]
        stories = [defect for defect in chosen if defect.is_of_a_story]
        for defect, why in chain(zip(tests, pool.map(show, tests), strict=True), ((one, show(one)) for one in stories)):
            print(
                f"{'MISSED' if why else 'found '} {defect.name}: {defect.test}{f': {why}' if why else ''}", flush=True
            )
            missed += [f"MISSED: {defect.name}: {why}"] if why else []
    return missed


def show(defect: Defect) -> str:
    """Plant a defect and run its test; returns why the test did not notice it, or an empty string."""
    copy = COPIES / defect.name.replace("/", "-").removesuffix(".patch")
    try:
        return _show(defect, copy)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _show(defect: Defect, copy: Path) -> str:
    copy_tree(copy)
    apply = ("git", "apply", "--whitespace=nowarn", str(defect.patch))
    applied = subprocess.run(apply, cwd=copy, capture_output=True, text=True, check=False)
    if applied.returncode:
        return f"the patch does not apply: {applied.stderr.strip()}"
    engine = str(REPOSITORY / ".local" / "venv-engine" / "bin" / "python")
    divided = defect.is_of_a_story or not shows_a_claim(REPOSITORY / defect.test.partition("::")[0])
    environment = os.environ | counted_as("stories" if defect.is_of_a_story else "tests")
    environment |= {
        "KVSTRATA_SIZE": "all" if divided else "claims",
        "KVSTRATA_LMCACHE_PYTHON": engine,
        "KVSTRATA_ENGINE_PYTHON": engine,
    }
    log = copy.with_suffix(".log")
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "e2e.processor_time")
    with log.open("w") as output:

        def run(*command: str) -> int:
            return subprocess.run(
                command, cwd=copy, env=environment, stdout=output, stderr=output, timeout=WITHIN_S, check=False
            ).returncode

        try:
            if defect.is_of_a_story and run(*BRING_UP) and (run(*DOWN) or run(*BRING_UP)):
                return f"the product with it is not ready: see {log}"
            code = run(sys.executable, "-m", "pytest", *options, defect.test)
        except subprocess.TimeoutExpired:
            return "the test did not end"
    if code == TEST_FAILED:
        return ""
    return "the test passes with it" if code == 0 else f"pytest ended with {code}: see {log}"


def copy_tree(copy: Path) -> None:
    """Copy the work tree as it is, without ignored files."""
    shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        source, target = REPOSITORY / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    (copy / ".local").symlink_to(REPOSITORY / ".local")
    # `git apply` leaves out paths that the repository around it ignores, so the copy is one of its own.
    subprocess.run(("git", "init", "-q"), cwd=copy, check=True)
    # Some tests take an earlier version out of the history.
    objects = subprocess.run(
        ("git", "rev-parse", "--git-path", "objects"), cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.strip()
    (copy / ".git/objects/info/alternates").write_text(f"{(REPOSITORY / objects).resolve()}\n")


def main(words: list[str]) -> int:
    """Plant the defects whose file's name or test has one of these words, or all; returns the exit code."""
    return (
        1 if plant([one for one in defects() if any(word in f"{one.name} {one.test}" for word in words or [""])]) else 0
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
