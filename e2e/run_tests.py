"""`make test`: prepares the real parts, then runs every test that this machine can run, and says what it could not.

With KVSTRATA_NO_SKIPS=1 a skipped test is a failure, because a real part that was not tested is not proven.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from e2e.cluster.cli import main as cluster
from e2e.cluster.progress import Progress
from e2e.cluster.settings import REPOSITORY, Paths
from e2e.product.install import install
from e2e.product.kubectl import CommandError, Kubectl

ENGINE_PYTHON = REPOSITORY / ".local" / "venv-engine" / "bin" / "python"
SERVERS_INSTALLER = REPOSITORY / "tests" / "tiers" / "install_servers.py"
LMCACHE_INSTALLER = REPOSITORY / "tests" / "dataplane" / "install_lmcache.py"


def prepare_control_plane(_: Progress) -> str | None:
    """Build the binaries of Kubernetes and the root file system with Redis."""
    return None if cluster(["build"]) == 0 else "the local cluster could not be built; its message is above"


def prepare_lmcache(_: Progress) -> str | None:
    """Install the real LMCache server, and the real engine for CPUs, into environments of their own."""
    if shutil.which("gcc") is None:
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "gcc", "binutils"], check=False)
    os.environ["KVSTRATA_LMCACHE_PYTHON"] = os.environ["KVSTRATA_ENGINE_PYTHON"] = str(ENGINE_PYTHON)
    done = subprocess.run([sys.executable, str(LMCACHE_INSTALLER), "--engine"], check=False)
    return None if done.returncode == 0 else "LMCache could not be installed; its message is above"


def prepare_servers(_: Progress) -> str | None:
    """Install the further servers that shared tiers are tested on."""
    done = subprocess.run([sys.executable, str(SERVERS_INSTALLER)], check=False)
    return None if done.returncode == 0 else "the servers could not be installed; the message is above"


def prepare_product(progress: Progress) -> str | None:
    """Bring the cluster up and install the product as the demo does."""
    if cluster(["up"]):
        return "the cluster did not come up; its message is above"
    try:
        install(Kubectl(), progress)
    except (AssertionError, CommandError) as error:
        return str(error)
    return None


STAGES: tuple[tuple[str, Callable[[Progress], str | None], Sequence[str]], ...] = (
    ("the control plane and Redis", prepare_control_plane, ()),
    ("shared tiers on Redis 8 and Valkey", prepare_servers, ()),
    ("LMCache", prepare_lmcache, ("tests",)),
    ("the cluster with the product", prepare_product, ("e2e/scenarios",)),
)


def main(arguments: Sequence[str]) -> int:
    """Run everything; returns the exit code."""
    progress = Progress()
    if arguments:
        return _pytest(arguments)
    was_up = Paths().kubeconfig.exists()
    failures: list[str] = []
    try:
        for what, prepare, tests in STAGES:
            problem = prepare(progress)
            if problem is not None:
                failures.append(f"NOT TESTED: {what}: {problem}")
            if tests and (problem is None or tests == ("tests",)) and _pytest(tests) != 0:
                failures.append(f"FAILED: {' '.join(tests)}")
    finally:
        if not was_up:
            cluster(["down"])
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _pytest(tests: Sequence[str]) -> int:
    started = time.monotonic()
    strict = ["-p", "e2e.no_skips"] if os.environ.get("KVSTRATA_NO_SKIPS") else []
    command = [sys.executable, "-m", "pytest", *strict, *tests]
    code = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
    print(f"{' '.join(tests)}: exit {code} after {time.monotonic() - started:.0f} s", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
