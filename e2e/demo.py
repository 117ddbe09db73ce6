"""The demo: a cluster, the product, real requests, and the status of the cache in `kubectl get cache-status`."""

from __future__ import annotations

import inspect
import sys
import textwrap
import time

from e2e.bring_up import WHERE_TO_LOOK
from e2e.bring_up import main as bring_up
from e2e.product.chapters import CHAPTERS, open_stage
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import CommandError, Kubectl


def main() -> int:
    """Bring everything up and run the chapters; returns the exit code."""
    started = time.monotonic()
    if code := bring_up(sys.argv[1:]):
        return code
    kubectl = Kubectl()
    try:
        with open_stage(kubectl, _print_indented) as stage:
            for number, chapter in enumerate(CHAPTERS, start=1):
                title, _, explanation = str(inspect.getdoc(chapter)).partition("\n\n")
                print(f"\n{number}. {title}\n\n{textwrap.indent(explanation, '   ')}\n", flush=True)
                chapter(stage)
    except (AssertionError, CommandError) as error:
        print(f"\nthe demo failed: {error}\n{WHERE_TO_LOOK}", file=sys.stderr)
        return 1
    print(
        f"\nAll {len(CHAPTERS)} chapters passed after {time.monotonic() - started:.0f} s. To continue on this cluster:"
    )
    print(f"  export KUBECONFIG={kubectl.kubeconfig} PATH=$PWD/.local/bin:$PATH")
    print(f"  kubectl -n {DEMO_NAMESPACE} get cache-status")
    print("`make down` removes the cluster.")
    return 0


def _print_indented(text: str) -> None:
    print(textwrap.indent(text, "  "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
