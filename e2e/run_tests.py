"""`make test`: prepares the real parts, runs every test that this machine can run, and reruns failed ones.

With `--soak` (`make soak`) tests that need no cluster try all that they otherwise sample, from random seeds.

With KVSTRATA_NO_SKIPS=1 a skipped test is a failure, because a real part that was not tested is not proven, and
property tests draw the same examples each time.
"""

from __future__ import annotations

import json
import os
import resource
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
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO
from xml.etree import ElementTree

from e2e.cluster.cli import main as cluster
from e2e.cluster.disk import ALL_BYTES, warn_of_little_room
from e2e.cluster.progress import ClusterError, Progress, describe
from e2e.cluster.settings import REPOSITORY, Paths
from e2e.rerun import Outcome, excuses, judge

ENGINE_PYTHON = REPOSITORY / ".local" / "venv-engine" / "bin" / "python"
MEMORY = REPOSITORY / ".local" / "failed-tests"
RESULTS = REPOSITORY / ".local" / "log" / "tests"
"""Every test of the last runs with its time, and of those that failed the output."""

STORIES = "e2e/scenarios"
WORKERS = 4
"""Besides the stories. Most tests wait for servers, leases, timeouts and watches."""

NICENESS = 10
"""How far other tests make way for the stories, whose requests go through a whole cluster, as of nice(1)."""

FIRST = ("apiserver", "dataplane", "topology", "tiers", "files", "property")
"""Folders of `tests` that take long or wait much. The others fill the remaining time."""

SHORT_PATHS = Path(tempfile.gettempdir(), f"kv-{zlib.crc32(str(REPOSITORY).encode()) & 0xFFFF:04x}")
"""Where tests have their files: the path of a Unix socket has at most 107 bytes."""

WITHOUT_SERVERS = ("tests/unit", "tests/property")
NO_SKIPS = ("-p", "e2e.no_skips")
MESSAGE_CHARACTERS = 600
"""Length of a failed test's message in the last lines of a run."""

INTERRUPTED_WITHIN_S = 120
"""In this time tests stop the servers that they started."""

NOT_IN_TIME = 124


@dataclass(frozen=True, slots=True)
class Step:
    """A program that prepares something, and how long it may take."""

    name: str
    arguments: tuple[str, ...]
    timeout_s: float


def _python(name: str, *arguments: str, timeout_s: float = 1800) -> Step:
    return Step(name, (sys.executable, *arguments), timeout_s)


COMPILER = Step(
    "install a C compiler", ("apt-get", "install", "-y", "-qq", "--no-install-recommends", "gcc", "binutils"), 600
)
"""For the stand-ins for CUDA's libraries, which LMCache wants to load."""

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
    """Run everything, or only the tests that are named; returns the exit code."""
    if arguments == ["--soak"]:
        return soak()
    if arguments:
        return subprocess.run((*pytest(), *arguments), cwd=REPOSITORY, check=False).returncode
    progress = Progress()
    try:
        if warning := warn_of_little_room(Paths().local, ALL_BYTES):
            progress.report(warning)
    except ClusterError as error:
        print(describe(error), file=sys.stderr)
        return 1
    was_up = Paths().kubeconfig.exists()
    try:
        failures, excused = _prepare_and_test(progress)
    finally:
        if not was_up:
            cluster(["down"])
    for sentence in (*excused, *failures):
        print(sentence, file=sys.stderr)
    return 1 if failures else 0


def _prepare_and_test(progress: Progress) -> tuple[list[str], list[str]]:
    if shutil.which("gcc") is None and (failure := prepare(COMPILER)):
        return [failure], []
    with ThreadPoolExecutor() as pool:
        failures = [failure for failure in pool.map(lambda steps: prepare(*steps), (PROGRAMS, INSTALLERS)) if failure]
        if failures:
            return [*failures, "NOT RUN: all tests"], []
        with progress.step("all tests"):
            others = pool.submit(run_tests, "tests", *spread(WORKERS), *folders(), timeout_s=4200)
            if failure := prepare(*PRODUCT):
                failures += [failure, f"NOT RUN: {STORIES}"]
            stories = Outcome(0, ()) if failure else run_tests("stories", "-v", STORIES, timeout_s=4200)
            ended = {"tests": others.result(), "stories": stories}
    excused: list[str] = []
    for name, first in ended.items():
        found, allowed = judge(first, partial(_again_under_load, name), excuses(), datetime.now(UTC).date())
        failures += found
        excused += allowed
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    progress.report(f"processor time of all tests: {used.ru_utime + used.ru_stime:.0f} s")
    return failures, excused


def _again_under_load(name: str, tests: Sequence[str]) -> Outcome:
    with busy():
        return run_tests(name, *NO_SKIPS, *tests, timeout_s=1200)


def folders() -> list[str]:
    """Return the folders of `tests`, in the order in which they begin."""
    found = {path.name for path in (REPOSITORY / "tests").iterdir() if any(path.rglob("test_*.py"))}
    return [f"tests/{name}" for name in (*FIRST, *sorted(found - set(FIRST)))]


def soak() -> int:
    """Run everything that needs no cluster in full, from random seeds that are printed; returns the exit code."""
    os.environ["KVSTRATA_SOAK"] = "1"
    seed = os.environ.setdefault("KVSTRATA_SEED", str(time.time_ns() % 1_000_000))
    if failure := prepare(*PROGRAMS, *INSTALLERS):
        print(failure, file=sys.stderr)
        return 1
    drawn = (f"--hypothesis-seed={seed}", "--timeout=14400")
    ended = run_tests("tests", *spread(WORKERS), *drawn, *folders(), timeout_s=86_400)
    for test in ended.failed:
        print(
            f"FAILED: {test}: with KVSTRATA_SOAK=1 KVSTRATA_SEED={seed} and --hypothesis-seed={seed}", file=sys.stderr
        )
    return ended.code


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


def run_tests(name: str, *arguments: str, timeout_s: float) -> Outcome:
    """Run pytest on `tests` or `stories` to its end, and return its failures."""
    memory = MEMORY / name
    shutil.rmtree(memory, ignore_errors=True)
    engine = {"KVSTRATA_LMCACHE_PYTHON": str(ENGINE_PYTHON), "KVSTRATA_ENGINE_PYTHON": str(ENGINE_PYTHON)}
    nice = () if name == "stories" else ("nice", "-n", str(NICENESS))
    SHORT_PATHS.mkdir(exist_ok=True)
    noted = (f"-ocache_dir={memory}", f"--junitxml={RESULTS / f'{name}.xml'}", f"--basetemp={SHORT_PATHS / name}")
    code = run((*nice, *pytest(), *noted, *arguments), timeout_s, engine)
    found = memory / "v" / "cache" / "lastfailed"
    failed = tuple(sorted(json.loads(found.read_text()))) if found.exists() else ()
    return Outcome(code, failed, messages(RESULTS / f"{name}.xml", failed))


def messages(results: Path, tests: Sequence[str]) -> dict[str, str]:
    """Return the beginning of each of these tests' failure messages, as far as pytest's results have it."""
    if not results.exists():
        return {}
    found = dict[tuple[str, str], str]()
    for case in ElementTree.parse(results).iter("testcase"):  # noqa: S314 - written by pytest
        for end in (*case.iter("failure"), *case.iter("error")):
            message = " ".join(end.get("message", "").split())[:MESSAGE_CHARACTERS]
            found.setdefault((case.get("classname", ""), case.get("name", "")), message)
    by_test = dict[str, str]()
    for test in tests:
        path, *classes, name = test.split("::")
        key = (".".join((*Path(path).with_suffix("").parts, *classes)), name)
        if key in found:
            by_test[test] = found[key]
    return by_test


def pytest() -> tuple[str, ...]:
    """Return the command that runs pytest here, without the tests to run."""
    strict = (*NO_SKIPS, "-p", "e2e.same_examples") if os.environ.get("KVSTRATA_NO_SKIPS") else ()
    return (sys.executable, "-m", "pytest", *strict, "--durations=25")


def spread(workers: int) -> tuple[str, ...]:
    """Return the arguments that spread tests over workers, in the order of the paths."""
    return ("-p", "e2e.spread", "-n", str(workers), "--dist=loadscope", "--no-loadscope-reorder")


@contextmanager
def busy() -> Iterator[None]:
    """Keep the processors as busy as while all tests run, with tests that need no server."""
    command = (*pytest(), *spread(WORKERS), "-q", "-p", "no:cacheprovider", *WITHOUT_SERVERS)
    again = ("nice", "-n", str(NICENESS), "sh", "-c", 'while :; do "$@"; done', "sh", *command)
    with subprocess.Popen(again, cwd=REPOSITORY, stdout=subprocess.DEVNULL, start_new_session=True) as load:
        try:
            yield
        finally:
            os.killpg(load.pid, signal.SIGKILL)


def run(
    arguments: Sequence[str],
    timeout_s: float | None = None,
    environment: dict[str, str] | None = None,
    errors: MutableSequence[str] | None = None,
) -> int:
    """Run a program in the repository's root; returns its exit code, or NOT_IN_TIME after it was interrupted.

    The lines of its standard error are appended to `errors` besides.
    """
    began_s = time.monotonic()
    # Compiled once: hundreds of processes import the same modules.
    whole = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        arguments,
        cwd=REPOSITORY,
        env=whole | (environment or {}),
        stdin=subprocess.DEVNULL,
        stderr=None if errors is None else subprocess.PIPE,
        text=True,
        errors="replace",
    )
    reader = Thread(target=_read, args=(process.stderr, errors), daemon=True)
    reader.start()
    try:
        code = process.wait(timeout_s)
        # Processes that it left running may keep the pipe open.
        reader.join(1)
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
