"""What failed is run once more by itself: what fails again has failed, what passes is told as unsteady."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from e2e.lanes import Command, Failure
from e2e.second_run import AT_MOST, Suites

FAILS_ONCE = """
import pathlib
MET = pathlib.Path(__file__).with_name("met")

def test_passes_when_alone():
    met = MET.exists()
    MET.touch()
    assert met

def test_passes():
    with MET.with_name("runs").open("a") as runs:
        runs.write("x")
"""
FAILS_THEN_SKIPS = FAILS_ONCE.replace("assert met", "assert met; import pytest; pytest.skip('gone')")
FAILS = "def test_fails():\n    assert False\n"
MANY_FAIL = (
    f"import pytest\n\n@pytest.mark.parametrize('n', range({AT_MOST + 1}))\ndef test_fails(n):\n    assert False\n"
)


@pytest.fixture
def suites(tmp_path: Path) -> Suites:
    return Suites(tmp_path / "memory")


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "test_written.py"
    path.write_text(text)
    return str(path)


def run(command: Command) -> list[Failure]:
    arguments = (*command.arguments, "-p", "no:randomly", "-c", "/dev/null")
    code = subprocess.run(arguments, check=False, capture_output=True).returncode
    return [Failure(command, code)] if code else []


def never(command: Command) -> Sequence[Failure]:
    raise AssertionError(f"{command.name} is run")


def test_what_passes_by_itself_is_named_and_no_failure(suites: Suites, tmp_path: Path) -> None:
    failures = run(suites.suite("a suite", write(tmp_path, FAILS_ONCE)))
    assert [failure.code for failure in failures] == [1]
    failed, unsteady = suites.judge(failures, run)
    assert failed == []
    assert [name.rsplit("::")[-1] for name in unsteady] == ["test_passes_when_alone"]
    assert (tmp_path / "runs").read_text() == "x", "what passed is not run again"


def test_what_fails_again_has_failed(suites: Suites, tmp_path: Path) -> None:
    failed, unsteady = suites.judge(run(suites.suite("a suite", write(tmp_path, FAILS))), run)
    assert (failed, unsteady) == (["FAILED: a suite: exit 1"], [])


def test_what_is_skipped_then_has_not_passed(suites: Suites, tmp_path: Path) -> None:
    failed, unsteady = suites.judge(run(suites.suite("a suite", write(tmp_path, FAILS_THEN_SKIPS))), run)
    assert (failed, unsteady) == (["FAILED: a suite: exit 1"], [])


def test_many_failures_are_no_accident(suites: Suites, tmp_path: Path) -> None:
    failures = run(suites.suite("a suite", write(tmp_path, MANY_FAIL)))
    assert suites.judge(failures, never) == (["FAILED: a suite: exit 1"], [])


def test_a_suite_that_could_not_be_collected_or_was_killed_has_failed(suites: Suites, tmp_path: Path) -> None:
    failures = run(suites.suite("a suite", write(tmp_path, "import nothing_of_this_name\n")))
    assert suites.judge(failures, never)[0] == ["FAILED: a suite: exit 2"]
    run(suites.suite("a suite", write(tmp_path, FAILS)))
    killed = Failure(suites.suite("a suite"), -9)
    assert suites.judge([killed], never)[0] == ["FAILED: a suite: exit -9"]


def test_what_failed_in_a_run_before_is_not_taken_for_this_one(suites: Suites, tmp_path: Path) -> None:
    run(suites.suite("a suite", write(tmp_path, FAILS)))
    assert run(suites.suite("a suite", write(tmp_path, "def test_passes():\n    pass\n"))) == []
    assert suites.failed("a suite") == []
