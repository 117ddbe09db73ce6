"""`make test`: prepares the real parts and shows each claim of docs/proof.md once. `make test-all`: runs every test.

A test that fails has failed: nothing is run again. The last lines have the processor time by folder, and the dearest
files; `make test` fails above its budget (`e2e/processor_time.py`). With KVSTRATA_NO_SKIPS=1 a skipped test is a
failure, because a real part that was not tested is not proven, and property tests draw the same examples each time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Iterator, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock, Thread
from typing import IO
from xml.etree import ElementTree

from e2e.cluster.cli import main as cluster
from e2e.cluster.disk import ALL_BYTES, warn_of_little_room
from e2e.cluster.progress import ClusterError, Progress, describe
from e2e.cluster.settings import REPOSITORY, Paths
from e2e.defects import defects, plant
from e2e.parts import PARTS, STORIES, Part, Result, keep, last_results, tree
from e2e.processor_time import Meter, cluster_seconds, counted_as

ENGINE_PYTHON = REPOSITORY / ".local" / "venv-engine" / "bin" / "python"
RESULTS = REPOSITORY / ".local" / "log" / "tests"
"""Every test of the last runs with its time, and of those that failed the output."""

WORKERS = 3
"""Besides the stories. Most tests wait for servers, leases, timeouts and watches."""

FIRST = ("apiserver", "dataplane", "tiers", "topology")
"""Folders of `tests` that take long or wait much. The others fill the remaining time."""

WITHOUT_SERVERS = ("tests/property", "tests/unit", "tests/adapter", "tests/golden")

SHORT_PATHS = Path(tempfile.gettempdir(), f"kv-{zlib.crc32(str(REPOSITORY).encode()) & 0xFFFF:04x}")
"""Where tests have their files: the path of a Unix socket has at most 107 bytes."""

ENDED_WITHIN_S = 4_200
"""A run that takes so long hangs: on two cores that others slow by half, `make test` takes half of it."""

SOAKED_WITHIN_S = 86_400
MESSAGE_CHARACTERS = 600
"""Length of a failed test's message in the last lines of a run."""

INTERRUPTED_WITHIN_S = 120
"""In this time tests stop the servers that they started."""

NOT_IN_TIME = 124
TESTS_FAILED = 1
"""pytest's exit code when it ran to its end and some tests failed."""


@dataclass(frozen=True, slots=True)
class Step:
    """A program that prepares something, and how long it may take."""

    name: str
    arguments: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of pytest ended: the number of passed tests, and a sentence for each failure."""

    passed: int
    failures: tuple[str, ...]


def _python(name: str, *arguments: str, timeout_s: float = 1800) -> Step:
    return Step(name, (sys.executable, *arguments), timeout_s)


COMPILER = Step(
    "install a C compiler", ("apt-get", "install", "-y", "-qq", "--no-install-recommends", "gcc", "binutils"), 600
)
"""For the stand-ins for CUDA's libraries, which LMCache wants to load."""

BROWSER = Step(
    "install a browser",
    ("sh", "-c", "apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium"),
    900,
)
"""For the page of `kubectl kvstrata report`. Debian keeps its newest version only, hence the update."""

DEBIAN_PROGRAMS = {"gcc": COMPILER, "chromium": BROWSER}

PROGRAMS = (
    _python("build the control plane and the node", "-m", "e2e.cluster", "build", timeout_s=2400),
    _python("build the images of servers", "-m", "e2e.images", "build", "redis", "redis-7", "valkey"),
)
"""Images that tests take servers out of. The other images are built while the first tests run."""
PRODUCT = (
    _python("build the images", "-m", "e2e.images", "build"),
    _python("bring the product up", "-m", "e2e.bring_up"),
)
INSTALLERS = (
    _python("install LMCache", "tests/dataplane/install_lmcache.py", "--engine"),
    _python("install Redis 8, Valkey and OpenBao", "tests/tiers/install_servers.py"),
)


def main(arguments: Sequence[str]) -> int:
    """Run the tests that the arguments select, which may be arguments of pytest; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m e2e.run_tests")
    parser.add_argument("--unit", action="store_true", help="the tests that need no server")
    parser.add_argument("--all", action="store_true", help="every test, in parts; results that are not old stand")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help="one part of all")
    options, rest = parser.parse_known_args(arguments)
    if rest:
        return subprocess.run((*pytest(), *arguments), cwd=REPOSITORY, check=False).returncode
    if options.unit:
        failures = show_claims(WITHOUT_SERVERS, stories=False)
    else:
        with _cluster_as_before():
            failures = _prepare_programs()
            if not failures and (options.all or options.part):
                failures = run_parts(options.part)
            elif not failures:
                failures = show_claims(folders(), stories=True)
    for sentence in failures:
        print(sentence, file=sys.stderr)
    return 1 if failures else 0


@contextmanager
def _cluster_as_before() -> Iterator[None]:
    """Stop the local cluster in the end, unless it was up before."""
    was_up = Paths().kubeconfig.exists()
    try:
        yield
    finally:
        if not was_up:
            cluster(["down"])


def _prepare_programs() -> list[str]:
    """Make all that tests need besides the local cluster; returns the failures."""
    try:
        if warning := warn_of_little_room(Paths().local, ALL_BYTES):
            print(warning, file=sys.stderr)
    except ClusterError as error:
        return [describe(error)]
    if failure := prepare(*(step for program, step in DEBIAN_PROGRAMS.items() if shutil.which(program) is None)):
        return [failure]
    with ThreadPoolExecutor() as pool:
        failures = [failure for failure in pool.map(lambda steps: prepare(*steps), (PROGRAMS, INSTALLERS)) if failure]
    return [*failures, "NOT RUN: all tests"] if failures else []


def show_claims(paths: Sequence[str], *, stories: bool) -> list[str]:
    """Run the tests of these paths that show claims, and the stories beside them; returns the failures."""
    os.environ["KVSTRATA_SIZE"] = "claims"
    began_s, meter = time.monotonic(), Meter("tests", *(["stories"] if stories else []))
    # The stories report their progress themselves.
    with ThreadPoolExecutor() as pool, nullcontext() if stories else Progress().step("tests"):
        others = pool.submit(run_tests, "tests", *spread(WORKERS), *paths)
        ended = []
        if stories and (failure := prepare(*PRODUCT)):
            ended.append(Outcome(0, (failure, f"NOT RUN: {STORIES}")))
        elif stories:
            meter.cluster_began_s = cluster_seconds()
            ended.append(run_tests("stories", "-v", STORIES))
        ended.append(others.result())
    failures = [failure for outcome in ended for failure in outcome.failures]
    account = meter.read()
    if stories:
        failures += account.over_budget()
    minutes = (time.monotonic() - began_s) / 60
    print(f"\n{sum(outcome.passed for outcome in ended):,} tests passed after {minutes:.1f} minutes")
    print("\n".join(account.lines()), flush=True)
    return failures


def run_parts(only: str | None = None) -> list[str]:
    """Run the parts with old results, or one part, and keep their results; returns the failures.

    Parts that need the local cluster are run one after the other, and the others beside them. A soak runs each part
    for hours, from a random seed that it prints, and its results are no record of the parts.
    """
    soak, drawn, timeout_s = os.environ.get("KVSTRATA_SIZE") == "soak", tuple[str, ...](), ENDED_WITHIN_S
    if soak:
        seed = os.environ.setdefault("KVSTRATA_SEED", str(time.time_ns() % 1_000_000))
        print(f"soak from KVSTRATA_SEED={seed}", flush=True)
        drawn, timeout_s = (f"--hypothesis-seed={seed}", "--timeout=14400"), SOAKED_WITHIN_S
    results, now, lock = {} if soak else last_results(), tree(), Lock()
    wanted = [part for part in PARTS if only in (None, part.name)]

    def is_due(part: Part) -> bool:
        last = results.get(part.name)
        return only is not None or last is None or last.tree != now or bool(last.failed)

    def run_one_after_the_other(parts: Sequence[Part]) -> None:
        for part in parts:
            with Progress().step(f"{part.name}: {part.purpose}"):
                result = _run_part(part, now, *drawn, timeout_s=timeout_s)
            with lock:
                results[part.name] = result
                if not soak:
                    keep(results)

    due = [part for part in wanted if is_due(part)]
    with ThreadPoolExecutor() as pool:
        kinds = ([part for part in due if part.is_story], [part for part in due if not part.is_story])
        list(pool.map(run_one_after_the_other, kinds))
    for part in PARTS:
        print(_described(part, results.get(part.name), now))
    return [f"FAILED: {part.name}: {failure}" for part in wanted for failure in results[part.name].failed]


def _run_part(part: Part, now: str, *options: str, timeout_s: float = ENDED_WITHIN_S) -> Result:
    began_s, meter = time.monotonic(), Meter("stories" if part.is_story else "tests")
    if part.is_story and (failure := prepare(*PRODUCT)):
        outcome = Outcome(0, (failure,))
    elif part.plants:
        outcome = _plant(part)
    elif part.is_story:
        outcome = run_tests("stories", "-v", *options, *part.paths, timeout_s=timeout_s)
    else:
        outcome = run_tests("tests", *spread(WORKERS), *options, *part.paths, timeout_s=timeout_s)
    account, minutes = meter.read(), (time.monotonic() - began_s) / 60
    print("\n".join(account.lines()), flush=True)
    today = datetime.now(UTC).date().isoformat()
    return Result(now, today, outcome.passed, outcome.failures, round(minutes, 1), round(account.total_s))


def _plant(part: Part) -> Outcome:
    planted = [defect for defect in defects() if defect.name in part.paths]
    try:
        missed = plant(planted)
    finally:
        # The cluster is left with the product as it is.
        failure = prepare(*PRODUCT) if part.is_story else ""
    return Outcome(len(planted) - len(missed), (*missed, *([failure] if failure else ())))


def _described(part: Part, last: Result | None, now: str) -> str:
    if last is None:
        return f"{part.name:<15} not run yet"
    ended = f"{len(last.failed)} failed, " if last.failed else ""
    age = "" if last.tree == now else ", of an earlier tree"
    return f"{part.name:<15} {ended}{last.passed:,} passed on {last.date} in {last.minutes:.0f} minutes{age}"


def folders() -> list[str]:
    """Return the folders of `tests`, in the order in which they begin."""
    found = {path.name for path in (REPOSITORY / "tests").iterdir() if any(path.rglob("test_*.py"))}
    return [f"tests/{name}" for name in (*FIRST, *sorted(found - set(FIRST)))]


def prepare(*steps: Step) -> str:
    """Take steps one after the other; returns the failed step with its last lines, or an empty string.

    Steps fetch files over a network, so one that fails is tried again.
    """
    for step in steps:
        last = deque[str](maxlen=20)
        code = run(step.arguments, step.timeout_s, errors=last)
        if code not in (0, NOT_IN_TIME):
            print(f"{step.name}: failed, trying again", file=sys.stderr)
            code = run(step.arguments, step.timeout_s, errors=last)
        if code:
            why = "not in time" if code == NOT_IN_TIME else f"exit {code}"
            return f"FAILED: {step.name}: {why}\n{''.join(last)}"
    return ""


def run_tests(name: str, *arguments: str, timeout_s: float = ENDED_WITHIN_S) -> Outcome:
    """Run pytest on `tests` or `stories` to its end. The output of `tests` goes to a file, but for its last line."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    results, log = RESULTS / f"{name}.xml", RESULTS / f"{name}.log"
    results.unlink(missing_ok=True)
    engine = {"KVSTRATA_LMCACHE_PYTHON": str(ENGINE_PYTHON), "KVSTRATA_ENGINE_PYTHON": str(ENGINE_PYTHON)}
    environment = engine | counted_as(name)
    SHORT_PATHS.mkdir(exist_ok=True)
    noted = (f"--junitxml={results}", f"--basetemp={SHORT_PATHS / name}", "-p", "e2e.processor_time")
    with log.open("w") if name == "tests" else nullcontext() as output:
        code = run((*pytest(), *noted, *arguments), timeout_s, environment, output=output)
    if name == "tests":
        print(f"{log.read_text().rstrip().rpartition(chr(10))[2]}\n(all of it: {log})", flush=True)
    passed, failed = read_results(results) if results.exists() else (0, ())
    if code != 0 and (code != TESTS_FAILED or not failed):
        failed = (*failed, f"FAILED: {name}: pytest ended with {code}")
    return Outcome(passed, failed)


def read_results(results: Path) -> tuple[int, tuple[str, ...]]:
    """Return how many tests passed by pytest's results, and a sentence for each that failed."""
    passed, failed = 0, list[str]()
    for case in ElementTree.parse(results).iter("testcase"):  # noqa: S314 - written by pytest
        ends = (*case.iter("failure"), *case.iter("error"))
        passed += not ends and case.find("skipped") is None
        if ends:
            message = " ".join(ends[0].get("message", "").split())[:MESSAGE_CHARACTERS]
            failed.append(f"FAILED: {case.get('classname')}::{case.get('name')}: {message}")
    return passed, tuple(failed)


def pytest() -> tuple[str, ...]:
    """Return the command that runs pytest here, without the tests to run."""
    strict = ("-p", "e2e.no_skips", "-p", "e2e.same_examples") if os.environ.get("KVSTRATA_NO_SKIPS") else ()
    return (sys.executable, "-m", "pytest", *strict, "--durations=25")


def spread(workers: int) -> tuple[str, ...]:
    """Return the arguments that spread tests over workers, in the order of the paths."""
    return ("-p", "e2e.spread", "-n", str(workers), "--dist=loadscope", "--no-loadscope-reorder")


def run(
    arguments: Sequence[str],
    timeout_s: float | None = None,
    environment: dict[str, str] | None = None,
    errors: MutableSequence[str] | None = None,
    output: IO[str] | None = None,
) -> int:
    """Run a program in the repository's root; returns its exit code, or NOT_IN_TIME after it was interrupted.

    The lines of its standard error are appended to `errors` besides. Its standard output goes to `output`, if given.
    """
    began_s = time.monotonic()
    # Compiled once: hundreds of processes import the same modules.
    whole = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        # A shell's background jobs ignore interrupts, and so do their children.
        ("env", "--default-signal=INT", *arguments),
        cwd=REPOSITORY,
        env=whole | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if errors is None else subprocess.PIPE,
        text=True,
        errors="replace",
    )
    reader = Thread(target=_read, args=(process.stderr, errors), daemon=True)
    reader.start()
    try:
        code = process.wait(timeout_s)
        # Processes that it left running may keep the pipe open.
        reader.join(5)
        return code
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(INTERRUPTED_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(f"not finished after {time.monotonic() - began_s:.0f} s, interrupted: {' '.join(arguments)}")
        return NOT_IN_TIME


def _read(stream: IO[str] | None, lines: MutableSequence[str]) -> None:
    for line in stream or ():
        print(line, end="", file=sys.stderr, flush=True)
        lines.append(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
