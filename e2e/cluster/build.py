"""Build programs from the Go modules below ``go/``.

``kubernetes`` is the Kubernetes components, kubectl, helm, etcd and CoreDNS as one multi-call binary, because they
share most of their code: 156 MB and one link instead of nine. Its go.mod is that of Kubernetes with the staging
directories replaced by the published modules of the same release.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import digests
from e2e.cluster.locks import exclusive
from e2e.cluster.processes import output_of, run_logged
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.settings import COMPONENTS, HELM_VERSION, KUBERNETES_VERSION, Paths, inherited_environment

SOURCES = Path(__file__).parent / "go"
COMPILER_FLAGS = "all=-dwarf=false"
"""No debug information: the linker's -w would leave it out again. Programs built with and without it are the same."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program in Go.

    Attributes:
        name: of the binary, and of the folder of its sources.
        purpose: the line that a user sees while it is built.
        flags: the linker's.
        links: further names of the binary.
    """

    name: str
    purpose: str
    flags: str = "-s -w"
    links: tuple[str, ...] = ()


def linker_flags(kubernetes_version: str, helm_version: str) -> str:
    """Flags that strip the binary and stamp the versions that ``kubectl version`` and GET /version report."""
    major, minor, _ = kubernetes_version.split(".")
    stamps = {
        "gitVersion": f"v{kubernetes_version}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    flags = ["-s", "-w"]
    for package in ("k8s.io/client-go/pkg/version", "k8s.io/component-base/version"):
        for name, value in stamps.items():
            flags += ["-X", f"{package}.{name}={value}"]
    flags += ["-X", f"helm.sh/helm/v4/internal/version.version={helm_version}"]
    return " ".join(flags)


KUBERNETES = Program(
    "kubernetes",
    "build Kubernetes from source",
    linker_flags(KUBERNETES_VERSION, HELM_VERSION),
    COMPONENTS,
)
PAUSE = Program("pause", "build pause")
CRANE = Program("crane", "build crane, which pushes images")
CLUSTER_PROGRAMS = (KUBERNETES, PAUSE)
"""The programs of the local cluster."""


def build_binaries(paths: Paths, progress: Progress, programs: Sequence[Program] = CLUSTER_PROGRAMS) -> None:
    """Build programs into ``paths.bin``; a quick no-op for each whose sources, flags and Go toolchain are unchanged.

    Raises:
        ClusterError: Go is missing or the build failed.
    """
    go = shutil.which("go")
    if go is None:
        names = " and ".join(program.name for program in programs)
        raise ClusterError(
            f"Go is not installed, and {names} are built from source",
            advice="install Go 1.25 or newer (https://go.dev/dl/ or a package)",
        )
    version = output_of([go, "env", "GOVERSION"])
    for program in programs:
        with exclusive(paths, f"binary-{program.name}", progress):
            _build_changed(go, version, program, paths, progress)


def _build_changed(go: str, version: str, program: Program, paths: Paths, progress: Progress) -> None:
    name, source = f"binary-{program.name}", SOURCES / program.name
    digest = digests.digest_of({"go": version, "flags": program.flags}, [source])
    built = all((paths.bin / file).exists() for file in (program.name, *program.links))
    if built and digests.is_unchanged(paths, name, digest):
        return
    digests.forget(paths, name)
    paths.bin.mkdir(parents=True, exist_ok=True)
    with progress.step(program.purpose):
        _go_build(go, source, program.flags, paths.bin / program.name, paths.logs / f"go-{program.name}.log")
    for file in program.links:
        link = paths.bin / file
        link.unlink(missing_ok=True)
        link.symlink_to(program.name)
    digests.remember(paths, name, digest)


def _go_build(go: str, source: Path, flags: str, output: Path, log: Path) -> None:
    # Go keys its build cache on CGO_ENABLED, -gcflags and -trimpath: the same values everywhere keep rebuilds short.
    environment = inherited_environment() | {"CGO_ENABLED": "0"}
    partial = output.with_suffix(".partial")
    run_logged(
        [go, "build", "-trimpath", "-gcflags", COMPILER_FLAGS, "-ldflags", flags, "-o", partial, "."],
        log=log,
        what=f"building {output.name}",
        advice="check that Go's module proxy can be reached (`go env GOPROXY`) and that 3 GB of memory are free",
        cwd=source,
        env=environment,
    )
    # A running component keeps the file that it was started from.
    partial.replace(output)
