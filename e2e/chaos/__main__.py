"""`python -m e2e.chaos`: a random walk of faults on a managed cluster of real servers. Needs root.

The program starts itself again in namespaces of its own (network, mounts, processes), with which everything vanishes
that it made, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import subprocess
import sys

from e2e.chaos.faults import FAULTS
from e2e.chaos.pods import HOSTS
from e2e.chaos.walk import Failed, Walk
from e2e.cluster.settings import Paths
from tests.tiers.server_kinds import DEFAULT, KINDS

INSIDE = "--inside"
DIRECTORY = Paths().local / "chaos"
"""Where this program mounts memory over, for files that only it sees."""
NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def main(arguments: list[str]) -> int:
    """Run one walk; returns 1 if something was found that should not be."""
    if INSIDE not in arguments:
        program = (sys.executable, "-m", "e2e.chaos", INSIDE, *arguments)
        os.execvp("setpriv", ("setpriv", "--pdeathsig", "KILL", *NAMESPACES, *program))  # noqa: S606
    options = _parse(arguments)
    # Pods log errors of failing servers, which are intended here.
    logging.disable(logging.CRITICAL)
    kind = next(kind for kind in KINDS if kind.name == options.server)
    command = kind.binary()
    if command is None:
        print(f"no {kind.name}: `{kind.advice}` brings one", file=sys.stderr)
        return 2
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "chaos", str(DIRECTORY)], check=True)
    hosts = DIRECTORY / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    subprocess.run(["mount", "--bind", str(hosts), str(HOSTS)], check=True)
    print(f"seed {options.seed}, {options.steps} steps on {kind.name}", flush=True)
    walk = Walk(DIRECTORY, command, options.seed, tls=options.tls)
    try:
        asyncio.run(walk.run(options.steps, options.only))
    except Failed as failure:
        print(f"FAILED with seed {options.seed}: {failure}", flush=True)
        return 1
    print(f"passed: {walk.traffic.requests} requests, {walk.traffic.hits} hits, {walk.traffic.misses} misses")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.chaos", description=__doc__)
    steps = int(os.environ.get("KVSTRATA_CHAOS_STEPS", "7"))
    parser.add_argument("--steps", type=int, default=steps, help="how many times something happens")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--server", default=DEFAULT.name, choices=[kind.name for kind in KINDS])
    parser.add_argument("--tls", action="store_true", help="between all parties; the server must have it")
    parser.add_argument("--only", nargs="*", default=(), choices=sorted(FAULTS), help="nothing but these")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
