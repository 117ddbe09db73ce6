"""`make test` and `make test-all`: how tests are spread, what ends in time, and what a run records."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e import processor_time, run_tests
from e2e.claims import DIVIDED
from e2e.cluster.settings import REPOSITORY
from e2e.defects import defects
from e2e.parts import PARTS, STORIES, Result, keep, last_results
from e2e.processor_time import BUDGET_S, Account
from e2e.spread import APART, TOGETHER

pytestmark = pytest.mark.claim("a run of the tests fails where a test failed, hung or was not run")

FAILS = "def test_fails():\n    assert False, 'the\\nmessage'\n"
NAMES_ITS_WORKER = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(4))
def test_worker(number):
    with pathlib.Path(__file__).with_suffix(".workers").open("a") as workers:
        workers.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run_tests, "SHORT_PATHS", tmp_path / "files")
    monkeypatch.setattr(run_tests, "pytest", lambda: (sys.executable, "-m", "pytest", "-q"))
    monkeypatch.setattr(processor_time, "RECORDS", tmp_path / "records")


def suite_of(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "suite"
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 60\nasyncio_default_fixture_loop_scope = function\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    return folder


def run(folder: Path, *arguments: str, timeout_s: float = 120) -> run_tests.Outcome:
    return run_tests.run_tests("tests", "-c", str(folder / "pytest.ini"), *arguments, str(folder), timeout_s=timeout_s)


def names(outcome: run_tests.Outcome) -> list[str]:
    return sorted(failure.split("::")[1].partition(":")[0] for failure in outcome.failures)


def test_a_worker_takes_whole_files_and_a_failure_is_a_sentence(tmp_path: Path) -> None:
    folder = suite_of(tmp_path, a=NAMES_ITS_WORKER, b=NAMES_ITS_WORKER, c=FAILS)
    outcome = run(folder, *run_tests.spread(2))
    assert outcome.passed == 8
    (failure,) = outcome.failures
    assert "::test_fails: " in failure
    assert failure.endswith("the message assert False")
    for name in "ab":
        workers = (folder / f"test_{name}.workers").read_text().splitlines()
        assert (len(workers), len({*workers})) == (4, 1)


def test_a_test_that_takes_its_worker_down_is_named_and_the_rest_is_run(tmp_path: Path) -> None:
    ends = "import os\ndef test_ends():\n    os._exit(1)\ndef test_after():\n    pass\n" + FAILS
    assert names(run(suite_of(tmp_path, ends=ends), *run_tests.spread(2))) == ["test_ends", "test_fails"]


def test_everything_that_is_to_stay_together_exists() -> None:
    for beginnings in TOGETHER:
        for beginning in beginnings:
            assert list(REPOSITORY.glob(f"{beginning}*")), beginning


def test_long_files_that_share_nothing_are_run_by_all_workers(tmp_path: Path) -> None:
    folder = suite_of(tmp_path) / APART
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text(NAMES_ITS_WORKER)
    command = (sys.executable, "-m", "pytest", "-q", *run_tests.spread(2), APART)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run(command, cwd=tmp_path / "suite", env=environment, check=False).returncode == 0
    workers = (folder / "test_a.workers").read_text().splitlines()
    assert (len(workers), len({*workers})) == (4, 2)


def test_every_folder_with_tests_is_run_once() -> None:
    found = {path.relative_to(REPOSITORY).parts[1] for path in (REPOSITORY / "tests").rglob("test_*.py")}
    assert sorted(run_tests.folders()) == sorted(f"tests/{name}" for name in found)


def test_every_test_is_in_one_part_of_all() -> None:
    paths = [path for part in PARTS for path in part.paths if not part.plants]
    stories = [path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / STORIES).glob("test_*.py")]
    assert sorted(paths) == sorted([*run_tests.folders(), *stories])
    planted = [path for part in PARTS for path in part.paths if part.plants]
    assert sorted(planted) == sorted(defect.name for defect in defects())
    assert all((REPOSITORY / folder).is_dir() for folder in DIVIDED)


def test_a_test_that_hangs_is_named(tmp_path: Path) -> None:
    hangs = "import pytest, time\n@pytest.mark.timeout(4)\ndef test_hangs():\n    time.sleep(60)\n"
    assert names(run(suite_of(tmp_path, hangs=hangs))) == ["test_hangs"]


def test_a_run_that_hangs_is_interrupted_and_cleans_up(tmp_path: Path) -> None:
    began, met = tmp_path / "began", tmp_path / "met"
    hangs = (
        "import pathlib, pytest, time\n@pytest.fixture\ndef server():\n    yield\n"
        f"    pathlib.Path({str(met)!r}).touch()\n"
        f"def test_hangs(server):\n    pathlib.Path({str(began)!r}).touch()\n    time.sleep(600)\n"
    )
    # A busy machine may not come to the test in five seconds.
    for timeout_s in (5, 30, 120):
        assert run(suite_of(tmp_path, hangs=hangs), "--timeout=600", timeout_s=timeout_s).failures
        if began.exists():
            break
    assert met.exists()


def test_a_run_without_tests_has_failed(tmp_path: Path) -> None:
    assert run(suite_of(tmp_path)).failures == ("FAILED: tests: pytest ended with 5",)


def test_a_preparation_that_fails_twice_is_named_and_ends_those_after_it(tmp_path: Path) -> None:
    met, tries = tmp_path / "met", tmp_path / "tries"
    fails = run_tests.Step("the first", ("sh", "-c", f"echo tried >> {tries}; echo why >&2; exit 3"), 60)
    follows = run_tests.Step("the second", ("touch", str(met)), 60)
    assert run_tests.prepare(fails, follows) == "FAILED: the first: exit 3\nwhy\nwhy\n"
    assert tries.read_text() == "tried\ntried\n"
    assert not met.exists()
    fails_once = run_tests.Step("the first", ("sh", "-c", f"test -e {met} || {{ touch {met}; exit 1; }}"), 60)
    assert run_tests.prepare(fails_once) == ""
    hangs = run_tests.Step("the first", ("sleep", "60"), 0.1)
    assert run_tests.prepare(hangs) == "FAILED: the first: not in time\n"


def test_processor_time_is_counted_by_file_with_that_of_children(tmp_path: Path) -> None:
    busy = "[sys.executable, '-c', 'import time\\nwhile time.process_time() < 0.5: pass']"
    burns = f"import subprocess, sys\ndef test_burns():\n    subprocess.run({busy})\n"
    assert not run(suite_of(tmp_path, burns=burns, a=NAMES_ITS_WORKER), *run_tests.spread(2)).failures
    records = processor_time.read(tmp_path / "records" / "tests")
    assert records["test_burns.py"] > 0.2
    assert records["test_a.py"] < records["test_burns.py"]


def test_a_run_fails_above_its_budget_at_the_speed_of_its_machine() -> None:
    used = {"tests/a/test_a.py": BUDGET_S / 2, "tests/b/test_b.py": BUDGET_S / 4}
    account = Account(used, cluster_s=BUDGET_S / 2, slowness=1.0)
    assert account.total_s == BUDGET_S * 1.25
    assert "their budget is 1400 s" in account.over_budget()[0]
    assert not Account(used, cluster_s=BUDGET_S / 2, slowness=1.3).over_budget()
    assert "tests/a 700" in next(account.lines())


def test_the_record_has_the_last_result_of_each_part(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert last_results(path) == {}
    results = {
        part.name: Result("0123", "2026-11-29", passed=7, failed=("FAILED: a",), minutes=1.5, processor_seconds=90)
        for part in PARTS[:2]
    }
    keep(results, path)
    assert last_results(path) == results


def test_every_run_begins_with_its_amounts() -> None:
    program = "from tests.support.amounts import *; print(*amount_lines(), examples(3), seeds(2, 1), sep='\\n')"

    def amounts(**environment: str) -> list[str]:
        variables = {"PATH": os.environ["PATH"], **environment}
        found = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=variables, capture_output=True)
        return found.stdout.decode().splitlines()

    *rows, count, drawn = amounts()
    assert "pairs asked of LMCache: 10,000 of 100,000 (KVSTRATA_LMCACHE_PAIRS)" in rows
    assert (count, drawn) == ("3", "range(0, 2)")
    *rows, count, drawn = amounts(KVSTRATA_SIZE="claims")
    assert "pairs asked of LMCache: 500 of 100,000 (KVSTRATA_LMCACHE_PAIRS)" in rows
    assert (count, drawn) == ("3", "range(0, 1)")
    *rows, count, drawn = amounts(KVSTRATA_SIZE="soak", KVSTRATA_SEED="7")
    assert "generated objects of each kind: 2,000 of 2,000 (KVSTRATA_GENERATED_PER_KIND)" in rows
    assert (count, drawn) == ("60", "range(7, 47)")
    assert "pairs asked of a tier: 7 of 100,000 (KVSTRATA_PAIRS)" in amounts(KVSTRATA_PAIRS="7")
