"""Brings a cluster up and installs the product, before the demo and the scenario tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Thread

from e2e.cluster.cli import LOCAL, provider
from e2e.cluster.cli import main as cluster
from e2e.cluster.progress import Progress
from e2e.cluster.settings import REPOSITORY, Paths
from e2e.product.install import DEMO_NAMESPACE, IMAGES, SYSTEM_NAMESPACE, install
from e2e.product.kubectl import CommandError, Kubectl

WHERE_TO_LOOK = (
    f"for details: kubectl -n {SYSTEM_NAMESPACE} logs deploy/kvstrata; "
    f"kubectl -n {DEMO_NAMESPACE} get pods,cache-status"
)
FIRST_TIME = (
    "nothing is built yet: Kubernetes is compiled, and beside it images are built and loaded (the engine's has 2.5 GB);"
    " ten minutes on two cores"
)


def main(arguments: Sequence[str] = ()) -> int:
    """Do both, with the options of the cluster's `up`; returns the exit code, and prints problems on stderr."""
    progress = Progress()
    if not (Paths().bin / "kubernetes").exists():
        progress.report(FIRST_TIME)
    with _images_loaded_beside(progress) if provider(Paths(), arguments) == LOCAL else nullcontext() as images:
        if (code := cluster(["up", *arguments])) or (code := images.wait() if images else 0):
            return code
    try:
        install(Kubectl(), progress)
    except (AssertionError, CommandError) as error:
        print(f"the product did not become ready: {error}\n{WHERE_TO_LOOK}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _images_loaded_beside(progress: Progress) -> Iterator[subprocess.Popen[str]]:
    """Build and load the images in a process of its own, which ends with the body: downloads and archives leave room
    for the compiler. Images for another kind of cluster are built when it is up."""
    command = (sys.executable, "-m", "e2e.images", "load", *(image.name for image in IMAGES))
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        reader = Thread(target=_report_lines, args=(process.stderr, progress), daemon=True)
        reader.start()
        try:
            yield process
        finally:
            process.terminate()
            reader.join()


def _report_lines(stream: Iterable[str], progress: Progress) -> None:
    for line in stream:
        progress.report(line.rstrip())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
