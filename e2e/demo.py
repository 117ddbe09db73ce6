"""The demo: a cluster, the product, real requests, and what `kubectl get cache-status` says about them."""

from __future__ import annotations

import sys
import time

from e2e.bring_up import WHERE_TO_LOOK
from e2e.bring_up import main as bring_up
from e2e.product.chapters import CHAPTERS, open_stage
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import CommandError, Kubectl


def main() -> int:
    """Bring everything up and tell the story; returns the exit code."""
    started = time.monotonic()
    if code := bring_up(sys.argv[1:]):
        return code
    kubectl = Kubectl()
    try:
        with open_stage(kubectl, lambda line: print(f"  {line}".replace("\n", "\n  "), flush=True)) as stage:
            for number, chapter in enumerate(CHAPTERS, start=1):
                print(f"\n{number}. {' '.join(str(chapter.__doc__).split())}", flush=True)
                chapter(stage)
    except (AssertionError, CommandError) as error:
        print(f"\nthe demo failed: {error}\n{WHERE_TO_LOOK}", file=sys.stderr)
        return 1
    print(f"\nAll of it held, after {time.monotonic() - started:.0f} s. To look around:")
    print(f"  export KUBECONFIG={kubectl.kubeconfig} PATH=$PWD/.local/bin:$PATH")
    print(f"  kubectl -n {DEMO_NAMESPACE} get cache-status")
    print("`make down` removes all of it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
