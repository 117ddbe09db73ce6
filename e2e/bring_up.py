"""Brings a cluster up and installs the product, before the demo and the scenario tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from e2e.cluster.cli import main as cluster
from e2e.cluster.progress import Progress
from e2e.product.install import DEMO_NAMESPACE, SYSTEM_NAMESPACE, install
from e2e.product.kubectl import CommandError, Kubectl

WHERE_TO_LOOK = (
    f"for details: kubectl -n {SYSTEM_NAMESPACE} logs deploy/kvstrata; "
    f"kubectl -n {DEMO_NAMESPACE} get pods,cache-status"
)


def main(arguments: Sequence[str] = ()) -> int:
    """Do both, with the options of the cluster's `up`; returns the exit code, and prints problems on stderr."""
    if code := cluster(["up", *arguments]):
        return code
    try:
        install(Kubectl(), Progress())
    except (AssertionError, CommandError) as error:
        print(f"the product did not become ready: {error}\n{WHERE_TO_LOOK}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
