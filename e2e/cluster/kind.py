"""Clusters that this package did not make itself: kind's (which needs Docker), and one that exists already.

Neither has been exercised on the machine that the project is developed on, which has no Docker daemon.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from e2e.cluster import digests
from e2e.cluster.images import read_identities
from e2e.cluster.pki import write_private
from e2e.cluster.processes import output_of, run_logged
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.settings import KIND_CLUSTER, Paths


class KindCluster:
    """A cluster by kind, called ``kvstrata``."""

    def __init__(self, paths: Paths, progress: Progress) -> None:
        self._paths = paths
        self._progress = progress

    def up(self) -> None:
        """Create the cluster, unless it is there, and write its kubeconfig."""
        for program in ("docker", "kind"):
            if shutil.which(program) is None:
                raise ClusterError(
                    f"{program} is not installed", advice="install it, or use `up --cluster local` on Linux as root"
                )
        if self.is_up():
            self._progress.report(f"the kind cluster {KIND_CLUSTER} is already up")
        else:
            with self._progress.step(f"create the kind cluster {KIND_CLUSTER}"):
                run_logged(
                    ["kind", "create", "cluster", "--name", KIND_CLUSTER, "--kubeconfig", self._paths.kubeconfig,
                     "--wait", "120s"],
                    log=self._paths.logs / "kind.log", what="kind create cluster",
                    advice="check that `docker info` works for this user",
                )  # fmt: skip
        write_private(self._paths.kubeconfig, output_of(["kind", "get", "kubeconfig", "--name", KIND_CLUSTER]))
        self._progress.report(f"ready: export KUBECONFIG={self._paths.kubeconfig}")

    def is_up(self) -> bool:
        """True when kind knows the cluster."""
        return KIND_CLUSTER in output_of(["kind", "get", "clusters"]).split()

    def down(self) -> None:
        """Delete the cluster, and the record of the images that were loaded into it."""
        with self._progress.step(f"delete the kind cluster {KIND_CLUSTER}"):
            log = self._paths.logs / "kind.log"
            run_logged(["kind", "delete", "cluster", "--name", KIND_CLUSTER], log=log, what="kind delete cluster")
        self._paths.kubeconfig.unlink(missing_ok=True)
        for record in self._paths.digests.glob("kind-image-*"):
            record.unlink()

    def load(self, archives: list[Path]) -> None:
        """Load docker-archives into the cluster's nodes; those whose content is there already are skipped."""
        for archive in archives:
            identities = read_identities(archive)
            name = "kind-image-" + digests.digest_of({"tags": sorted(identities)})[:16]
            digest = digests.digest_of(dict(identities))
            if digests.is_unchanged(self._paths, name, digest):
                self._progress.report(f"{', '.join(identities)}: already in the cluster")
                continue
            with self._progress.step(f"load {', '.join(identities)} into the kind cluster"):
                run_logged(
                    ["kind", "load", "image-archive", archive, "--name", KIND_CLUSTER],
                    log=self._paths.logs / "kind-load.log", what="kind load image-archive",
                )  # fmt: skip
            digests.remember(self._paths, name, digest)


class ExistingCluster:
    """The cluster of the user's current kubeconfig. It is neither created nor deleted here."""

    def __init__(self, paths: Paths, progress: Progress) -> None:
        self._paths = paths
        self._progress = progress

    def up(self) -> None:
        """Copy the current context's credentials, and check that the cluster answers."""
        kubectl = self._kubectl()
        # JSON, because the rest of the package reads kubeconfigs with the standard library.
        minified = output_of([kubectl, "config", "view", "--minify", "--flatten", "--output", "json"])
        context = json.loads(minified)["current-context"]
        with self._progress.step(f"reach the cluster of the context {context}"):
            output_of([kubectl, "get", "--raw", "/readyz", "--request-timeout", "20s"])
        write_private(self._paths.kubeconfig, minified)
        self._progress.report(f"ready: export KUBECONFIG={self._paths.kubeconfig}")

    def down(self) -> None:
        """Forget the credentials; the cluster itself is unchanged."""
        self._paths.kubeconfig.unlink(missing_ok=True)

    def load(self, archives: list[Path]) -> None:
        """Refuse: the way of images to an existing cluster is not known here."""
        names = ", ".join(str(archive) for archive in archives)
        raise ClusterError(
            f"cannot load {names} into an existing cluster",
            advice="push the images to a registry that the cluster pulls from, and name them in the chart's values",
        )

    def _kubectl(self) -> str:
        installed = shutil.which("kubectl") or str(self._paths.bin / "kubectl")
        if subprocess.run([installed, "config", "current-context"], capture_output=True, check=False).returncode != 0:
            advice = "set KUBECONFIG, or choose one by `kubectl config use-context`"
            raise ClusterError("there is no current kubectl context", advice=advice)
        return installed
