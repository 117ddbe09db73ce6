"""Build the Kubernetes components, kubectl, helm, etcd and CoreDNS from source as one multi-call binary.

One binary because the components share most of their code: 156 MB and one link instead of nine.
``go/kubernetes/go.mod`` is that of Kubernetes with its staging directories replaced by the published modules of the
same release.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from e2e.cluster import digests
from e2e.cluster.locks import exclusive
from e2e.cluster.processes import output_of, run_logged
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.settings import COMPONENTS, HELM_VERSION, KUBERNETES_VERSION, Paths, inherited_environment

SOURCES = Path(__file__).parent / "go"
MULTI_CALL_BINARY = "kubernetes"
PAUSE_BINARY = "pause"


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


def build_binaries(paths: Paths, progress: Progress) -> None:
    """Build everything into ``paths.bin``; a quick no-op while sources, versions and the Go toolchain are unchanged.

    Raises:
        ClusterError: Go is missing or the build failed.
    """
    go = shutil.which("go")
    if go is None:
        raise ClusterError(
            "Go is not installed, and the Kubernetes components are built from source",
            advice="install Go 1.25 or newer (https://go.dev/dl/ or a package), or use `up --cluster kind`",
        )
    with exclusive(paths, "binaries", progress):
        _build_changed(go, paths, progress)


def _build_changed(go: str, paths: Paths, progress: Progress) -> None:
    built = all((paths.bin / name).exists() for name in (MULTI_CALL_BINARY, PAUSE_BINARY, *COMPONENTS))
    flags = linker_flags(KUBERNETES_VERSION, HELM_VERSION)
    digest = digests.digest_of({"go": output_of([go, "env", "GOVERSION"]), "flags": flags}, [SOURCES])
    if built and digests.is_unchanged(paths, "binaries", digest):
        return
    digests.forget(paths, "binaries")
    paths.bin.mkdir(parents=True, exist_ok=True)
    with progress.step("build Kubernetes from source (minutes when Go's cache is cold, half a minute when warm)"):
        _go_build(go, SOURCES / "kubernetes", flags, paths.bin / MULTI_CALL_BINARY, paths.logs / "go-kubernetes.log")
    with progress.step("build pause"):
        _go_build(go, SOURCES / "pause", "-s -w", paths.bin / PAUSE_BINARY, paths.logs / "go-pause.log")
    for name in COMPONENTS:
        link = paths.bin / name
        link.unlink(missing_ok=True)
        link.symlink_to(MULTI_CALL_BINARY)
    digests.remember(paths, "binaries", digest)


def _go_build(go: str, source: Path, flags: str, output: Path, log: Path) -> None:
    # Go keys its build cache on CGO_ENABLED and -trimpath: the same values everywhere keep rebuilds short.
    environment = inherited_environment() | {"CGO_ENABLED": "0"}
    partial = output.with_suffix(".partial")
    run_logged(
        [go, "build", "-trimpath", "-ldflags", flags, "-o", partial, "."],
        log=log,
        what=f"building {output.name}",
        advice="check that Go's module proxy can be reached (`go env GOPROXY`) and that 3 GB of memory are free",
        cwd=source,
        env=environment,
    )
    # A running component keeps the file that it was started from.
    partial.replace(output)
