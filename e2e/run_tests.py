"""`make test`: prepares the real parts, then runs every test that this machine can run, and says what it could not.

With KVSTRATA_NO_SKIPS=1 a skipped test is a failure, because a real part that was not tested is not proven, and
property tests draw the same examples each time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from e2e.cluster.cli import main as cluster
from e2e.cluster.progress import Progress
from e2e.cluster.settings import REPOSITORY, Paths
from e2e.lanes import Command, Lanes
from e2e.product.install import install
from e2e.product.kubectl import CommandError, Kubectl

ENGINE_PYTHON = REPOSITORY / ".local" / "venv-engine" / "bin" / "python"
SERVERS_INSTALLER = REPOSITORY / "tests" / "tiers" / "install_servers.py"
LMCACHE_INSTALLER = REPOSITORY / "tests" / "dataplane" / "install_lmcache.py"
LOGS = REPOSITORY / ".local" / "log" / "tests"
STORIES = "e2e/scenarios"
INSTALL_COMPILER = ("apt-get", "install", "-y", "-qq", "--no-install-recommends", "gcc", "binutils")
"""For the stand-ins for CUDA's libraries, which LMCache wants to load."""

LANES: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...] = (
    (("real cache servers and engines", ("tests/dataplane",)),),
    (
        ("the operator's faults", ("tests/apiserver/test_faulty_api.py", "tests/apiserver/test_faulty_lease.py")),
        ("histories and files", ("tests/property", "tests/files")),
        ("managed clusters", ("tests/topology",)),
    ),
    (("the operator", ("tests/apiserver",)),),
)
"""Tests that wait for servers, leases, timeouts and watches rather than compute, by name and paths: those of one lane
one after the other, beside all other lanes and whatever needs no cluster."""


def main(arguments: Sequence[str]) -> int:
    """Run everything, or only the tests that are named; returns the exit code."""
    progress = Progress()
    if arguments:
        return subprocess.run(_pytest(*arguments), cwd=REPOSITORY, check=False).returncode
    was_up = Paths().kubeconfig.exists()
    failures: list[str] = []
    try:
        side_by_side = Lanes(LOGS, progress)
        if shutil.which("gcc") is None:
            failures += side_by_side.run([[Command("install a C compiler", INSTALL_COMPILER)]])
        failures += side_by_side.run(preparations())
        failures += side_by_side.run(lanes())
        problem = bring_up_product(progress)
        failures += [f"NOT TESTED: {STORIES}: {problem}"] if problem else _stories()
    finally:
        if not was_up:
            cluster(["down"])
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def preparations() -> list[list[Command]]:
    """What tests need: one compiles, the other downloads."""
    return [
        [Command("build the control plane, the node and Redis", (sys.executable, "-m", "e2e.cluster", "build"))],
        [
            Command("install LMCache", (sys.executable, str(LMCACHE_INSTALLER), "--engine")),
            Command("install Redis 8, Valkey and OpenBao", (sys.executable, str(SERVERS_INSTALLER))),
        ],
    ]


def lanes() -> list[list[Command]]:
    """What needs no cluster: the tests that wait, and beside them all other tests, and the images."""
    with_lmcache = os.environ | {
        "KVSTRATA_LMCACHE_PYTHON": str(ENGINE_PYTHON),
        "KVSTRATA_ENGINE_PYTHON": str(ENGINE_PYTHON),
    }
    taken: list[str] = []
    waiting: list[list[Command]] = []
    for lane in LANES:
        waiting.append([])
        for name, paths in lane:
            waiting[-1].append(Command(f"tests of {name}", _pytest(*paths, *_ignoring(taken)), with_lmcache))
            taken += paths
    waiting[-1].append(Command("build the images", (sys.executable, "-m", "e2e.images", "build")))
    return [[Command("all other tests", _pytest("tests", *_ignoring(taken)), with_lmcache)], *waiting]


def bring_up_product(progress: Progress) -> str | None:
    """Bring the cluster up and install the product as the demo does; returns what is wrong, or None."""
    if cluster(["up"]):
        return "the cluster did not come up; its message is above"
    try:
        install(Kubectl(), progress)
    except (AssertionError, CommandError) as error:
        return str(error)
    return None


def _stories() -> list[str]:
    started_s = time.monotonic()
    code = subprocess.run(_pytest(STORIES), cwd=REPOSITORY, check=False).returncode
    print(f"{STORIES}: exit {code} after {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    return [f"FAILED: {STORIES}: exit {code}"] if code else []


def _pytest(*arguments: str) -> tuple[str, ...]:
    strict = ("-p", "e2e.no_skips", "-p", "e2e.same_examples") if os.environ.get("KVSTRATA_NO_SKIPS") else ()
    return (sys.executable, "-m", "pytest", *strict, "--durations=15", *arguments)


def _ignoring(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"--ignore={path}" for path in paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
