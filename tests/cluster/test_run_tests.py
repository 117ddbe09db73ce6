"""`make test`: how tests are spread, what ends in time, and how what failed is judged after it was run again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path

import pytest

from e2e import run_tests
from e2e.cluster.settings import REPOSITORY
from e2e.rerun import EXCUSED_FOR, MOST_TESTS, RUNS, Excuse, Outcome, excuses, judge
from e2e.spread import APART, TOGETHER

TODAY = date(2026, 11, 26)
PASSED = Outcome(0, ())
FAILS = "def test_fails():\n    assert False\n"
WHO = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(4))
def test_who(number):
    with pathlib.Path(__file__).with_suffix(".workers").open("a") as told:
        told.write(f"{os.environ['PYTEST_XDIST_WORKER']} {os.getpriority(os.PRIO_PROCESS, 0)}\\n")
"""


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(run_tests, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run_tests, "SHORT_PATHS", tmp_path / "files")


def suite_of(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "suite"
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 60\nasyncio_default_fixture_loop_scope = function\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    return folder


def run(folder: Path, *arguments: str, only: str = "", timeout_s: float = 120) -> Outcome:
    path = folder / only
    return run_tests.run_tests("tests", "-c", str(folder / "pytest.ini"), *arguments, str(path), timeout_s=timeout_s)


def names(outcome: Outcome) -> list[str]:
    return [test.rsplit("::")[-1] for test in outcome.failed]


class TestSpreading:
    def test_a_worker_takes_whole_files_and_makes_way_for_stories(self, tmp_path: Path) -> None:
        folder = suite_of(tmp_path, a=WHO, b=WHO, c=FAILS)
        outcome = run(folder, *run_tests.spread(2))
        assert (outcome.code, names(outcome)) == (1, ["test_fails"])
        for name in "ab":
            told = (folder / f"test_{name}.workers").read_text().splitlines()
            assert len(told) == 4
            worker, niceness = {*told}.pop().split()
            assert {*told} == {f"{worker} {niceness}"}
            assert int(niceness) >= 10

    def test_a_test_that_takes_its_worker_down_is_named_and_the_rest_is_run(self, tmp_path: Path) -> None:
        ends = "import os\ndef test_ends():\n    os._exit(1)\ndef test_after():\n    pass\n" + FAILS
        outcome = run(suite_of(tmp_path, ends=ends), *run_tests.spread(2))
        assert (outcome.code, names(outcome)) == (1, ["test_ends", "test_fails"])

    def test_everything_that_is_to_stay_together_exists(self) -> None:
        for beginnings in TOGETHER:
            for beginning in beginnings:
                assert list(REPOSITORY.glob(f"{beginning}*")), beginning

    def test_long_files_that_share_nothing_are_run_by_all_workers(self, tmp_path: Path) -> None:
        here = suite_of(tmp_path)
        (here / APART).mkdir(parents=True)
        (here / APART / "test_who.py").write_text(WHO)
        command = (*run_tests.pytest(), "-q", *run_tests.spread(2), APART)
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        assert subprocess.run(command, cwd=here, env=environment, check=False).returncode == 0
        workers = (here / APART / "test_who.workers").read_text().splitlines()
        assert (len(workers), len({line.split()[0] for line in workers})) == (4, 2)

    def test_every_folder_with_tests_is_run_once(self) -> None:
        found = {path.relative_to(REPOSITORY).parts[1] for path in (REPOSITORY / "tests").rglob("test_*.py")}
        assert sorted(run_tests.folders()) == sorted(f"tests/{name}" for name in found)


class TestTimes:
    def test_a_test_that_hangs_is_named(self, tmp_path: Path) -> None:
        hangs = "import pytest, time\n@pytest.mark.timeout(0.2)\ndef test_hangs():\n    time.sleep(30)\n"
        assert names(run(suite_of(tmp_path, hangs=hangs))) == ["test_hangs"]

    def test_a_run_that_hangs_is_interrupted_and_cleans_up(self, tmp_path: Path) -> None:
        met = tmp_path / "met"
        hangs = (
            "import pathlib, pytest, time\n@pytest.fixture\ndef server():\n    yield\n"
            f"    pathlib.Path({str(met)!r}).touch()\ndef test_hangs(server):\n    time.sleep(120)\n"
        )
        assert run(suite_of(tmp_path, hangs=hangs), timeout_s=30).code == run_tests.NOT_IN_TIME
        assert met.exists()

    def test_a_preparation_that_fails_twice_is_named_and_ends_those_after_it(self, tmp_path: Path) -> None:
        met, tries = tmp_path / "met", tmp_path / "tries"
        fails = run_tests.Step("the first", ("sh", "-c", f"echo tried >> {tries}; echo why >&2; exit 3"), 60)
        follows = run_tests.Step("the second", ("touch", str(met)), 60)
        assert run_tests.prepare(fails, follows) == "FAILED: the first: exit 3\nwhy\nwhy\n"
        assert tries.read_text() == "tried\ntried\n"
        assert not met.exists()
        fails_once = run_tests.Step("the first", ("sh", "-c", f"test -e {met} || {{ touch {met}; exit 1; }}"), 60)
        assert run_tests.prepare(fails_once) == ""
        met.unlink()
        hangs = run_tests.Step("the first", ("sleep", "60"), 0.1)
        assert run_tests.prepare(hangs) == "FAILED: the first: not in time\n"
        assert run_tests.prepare(follows) == ""
        assert met.exists()


def answering(*outcomes: Outcome) -> tuple[Callable[[Sequence[str]], Outcome], list[list[str]]]:
    """Return what plays pytest, with these outcomes one after the other, and what it is asked to run."""
    left, asked = list(outcomes), list[list[str]]()

    def again(tests: Sequence[str]) -> Outcome:
        asked.append(list(tests))
        return left.pop(0)

    return again, asked


def never(tests: Sequence[str]) -> Outcome:
    raise AssertionError(f"{tests} are run")


class TestJudging:
    def test_a_run_that_passed_is_not_run_again(self) -> None:
        assert judge(PASSED, never, {}, TODAY) == ([], [])

    def test_a_test_that_passes_five_times_is_unsteady_and_fails_the_run(self) -> None:
        again, asked = answering(*[PASSED] * RUNS)
        failures, excused = judge(Outcome(1, ("a",)), again, {}, TODAY)
        assert asked == [["a"]] * RUNS == [["a"]] * 5
        assert (failures, excused) == (
            ["UNSTEADY: a: failed once, and passed 5 reruns under load; find the cause"],
            [],
        )

    def test_what_a_test_failed_with_at_first_is_quoted(self, tmp_path: Path) -> None:
        outcome = run(suite_of(tmp_path, fails="def test_fails():\n    assert False, 'the\\nwords'\n"))
        again, _ = answering(*[PASSED] * RUNS)
        (failure,), _ = judge(outcome, again, {}, TODAY)
        assert failure.endswith("find the cause (at first: AssertionError: the words assert False)")

    def test_a_test_that_fails_once_more_has_failed_and_the_others_go_on(self) -> None:
        again, asked = answering(PASSED, Outcome(1, ("a",)), PASSED, PASSED, PASSED)
        failures, _ = judge(Outcome(1, ("a", "b")), again, {}, TODAY)
        assert asked == [["a", "b"]] * 2 + [["b"]] * 3
        assert failures[0] == "FAILED: a: failed again in rerun 2 of 5"
        assert failures[1].startswith("UNSTEADY: b")

    def test_the_list_excuses_a_test_for_a_while(self) -> None:
        for since, excused in ((TODAY - EXCUSED_FOR, True), (TODAY - EXCUSED_FOR - timedelta(1), False)):
            again, _ = answering(*[PASSED] * RUNS)
            failures, allowed = judge(Outcome(1, ("a",)), again, {"a": Excuse("a race", since)}, TODAY)
            assert (len(failures), len(allowed)) == ((0, 1) if excused else (1, 0))

    def test_the_list_excuses_no_test_that_fails_again(self) -> None:
        again, _ = answering(Outcome(1, ("a",)), *[PASSED] * RUNS)
        failures, _ = judge(Outcome(1, ("a",)), again, {"a": Excuse("a race", TODAY)}, TODAY)
        assert failures == ["FAILED: a: failed again in rerun 1 of 5"]

    @pytest.mark.parametrize(
        "first",
        [Outcome(1, tuple(map(str, range(MOST_TESTS + 1)))), Outcome(1, ()), Outcome(2, ("a",)), Outcome(124, ("a",))],
    )
    def test_many_failures_and_other_endings_are_no_accident(self, first: Outcome) -> None:
        failures, excused = judge(first, never, {}, TODAY)
        assert failures == [f"FAILED: the tests: exit {first.code}, {len(first.failed)} failed"]
        assert excused == []

    @pytest.mark.parametrize("other", [Outcome(1, ()), Outcome(2, ("a",)), Outcome(4, ()), Outcome(124, ())])
    def test_a_second_run_that_does_not_get_to_its_end_is_a_failure(self, other: Outcome) -> None:
        again, _ = answering(other)
        assert judge(Outcome(1, ("a",)), again, {}, TODAY)[0] == [
            f"FAILED: a: in its rerun, pytest ended with {other.code}"
        ]

    def test_the_list_is_short_and_names_tests_that_exist(self) -> None:
        found = excuses()
        assert len(found) <= 5
        for test, excuse in found.items():
            path, _, name = test.partition("::")
            assert name.rpartition("::")[2].partition("[")[0] in (REPOSITORY / path).read_text(), test
            assert len(excuse.reason.split()) > 3

    def test_an_entry_of_the_list_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "unsteady.toml"
        path.write_text('["tests/a.py::test_b"]\nreason = "a race"\ndate = 2026-11-26\n')
        assert excuses(path) == {"tests/a.py::test_b": Excuse("a race", TODAY)}
        path.write_text('["tests/a.py::test_b"]\nreason = "a race"\n')
        with pytest.raises(KeyError):
            excuses(path)


def test_what_failed_fails_beside_load_again_and_the_load_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = suite_of(tmp_path, fails=FAILS, who=WHO)
    monkeypatch.setattr(run_tests, "WITHOUT_SERVERS", ("-c", str(folder / "pytest.ini"), str(folder / "test_who.py")))
    told = folder / "test_who.workers"
    with run_tests.busy():
        while not told.exists():
            pass
        assert names(run(folder, only="test_fails.py")) == ["test_fails"]
    size = told.stat().st_size
    assert size == told.stat().st_size


def test_every_run_begins_with_what_it_samples_and_a_soak_samples_nothing() -> None:
    told = "from tests.support.amounts import *; print(*sampled_lines(), examples(3), seeds(2), sep='\\n')"

    def run(**environment: str) -> list[str]:
        variables = {"PATH": os.environ["PATH"], **environment}
        found = subprocess.run([sys.executable, "-c", told], cwd=REPOSITORY, env=variables, capture_output=True)
        return found.stdout.decode().splitlines()

    *sampled, count, drawn = run()
    assert all(line.startswith("sampled: ") for line in sampled)
    assert (count, drawn) == ("3", "range(0, 2)")
    assert "sampled: pairs asked of LMCache: 10,000 of 100,000 (KVSTRATA_LMCACHE_PAIRS)" in sampled
    *soaked, count, drawn = run(KVSTRATA_SOAK="1", KVSTRATA_SEED="7")
    assert all(line.startswith("soak: ") for line in soaked)
    assert (count, drawn) == ("60", "range(7, 47)")
    assert "soak: generated objects of each kind: 2,000 of 2,000 (KVSTRATA_GENERATED_PER_KIND)" in soaked
    (row,) = (line for line in run(KVSTRATA_PAIRS="7") if "a tier" in line)
    assert row == "sampled: pairs asked of a tier: 7 of 100,000 (KVSTRATA_PAIRS)"
