"""The commands of ``python3 -m e2e.cluster``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from e2e.cluster import locks
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.disk import CLUSTER_BYTES, warn_of_little_room
from e2e.cluster.image_build import Build, build_image
from e2e.cluster.kind import ExistingCluster, KindCluster
from e2e.cluster.local import LocalCluster
from e2e.cluster.locks import exclusive
from e2e.cluster.pki import write_private
from e2e.cluster.progress import ClusterError, Progress, describe
from e2e.cluster.settings import Paths

IGNORE_EVERYTHING = "# Built and running state: nothing of it belongs in the repository.\n*\n"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


LOCAL = "local"


def provider(paths: Paths, arguments: Sequence[str] = ()) -> str:
    """Return the kind of cluster that the arguments of `up` choose, else that of the one in use, else the local one."""
    if "--cluster" in arguments:
        return arguments[arguments.index("--cluster") + 1]
    try:
        return paths.provider.read_text().strip()
    except OSError:
        return LOCAL


class Cluster(Protocol):
    """Operations of every kind of cluster."""

    def up(self) -> None:
        """Bring it up, or report that it is up."""

    def down(self) -> None:
        """Stop it."""

    def load(self, archives: list[Path]) -> None:
        """Load docker-archives into it."""


class Commands:
    """One method per verb; each takes the parsed arguments."""

    def __init__(self, paths: Paths, progress: Progress) -> None:
        self._paths = paths
        self._progress = progress

    def up(self, arguments: argparse.Namespace) -> None:
        """Bring a cluster up."""
        wanted = arguments.cluster or self._provider()
        if self._paths.kubeconfig.exists() and wanted != self._provider():
            raise ClusterError(f"a cluster of the kind {self._provider()} is in use", advice="run `down` first")
        if wanted == LOCAL and (warning := warn_of_little_room(self._paths.local, CLUSTER_BYTES)):
            self._progress.report(warning)
        self._paths.provider.write_text(wanted)
        cluster = self._cluster(wanted)
        if isinstance(cluster, LocalCluster):
            cluster.prepare()  # without the lock, so that images can be loaded meanwhile
        with exclusive(self._paths, locks.CLUSTER, self._progress):
            cluster.up()

    def down(self, arguments: argparse.Namespace) -> None:
        """Stop the cluster."""
        cluster = self._cluster(self._provider())
        cluster.down()
        if arguments.purge and isinstance(cluster, LocalCluster):
            cluster.purge()
        self._paths.provider.unlink(missing_ok=True)

    def build(self, _: argparse.Namespace) -> None:
        """Build the programs and images of the local cluster."""
        LocalCluster(self._paths, self._progress).build()

    def load(self, arguments: argparse.Namespace) -> None:
        """Load images."""
        self._cluster(self._provider()).load(arguments.archives)

    def image_build(self, arguments: argparse.Namespace) -> None:
        """Build an image."""
        use_docker = self._provider() == "kind" if arguments.builder == "auto" else arguments.builder == "docker"
        build = Build(
            context=arguments.context,
            dockerfile=arguments.file or arguments.context / "Dockerfile",
            tag=arguments.tag,
            arguments=dict(arguments.build_arg),
            output=arguments.out.absolute(),
        )
        build_image(build, self._paths, self._progress, use_docker=use_docker)

    def control_plane_start(self, arguments: argparse.Namespace) -> None:
        """Start a control plane without a node."""
        plane = ControlPlane(
            self._paths.control_plane, controller_manager=arguments.full, scheduler=arguments.full, paths=self._paths
        )
        with self._progress.step("start the control plane"):
            plane.start()
        write_private(self._paths.control_plane / "kubeconfig", plane.kubeconfig.read_text())
        self._progress.report(f"ready: export KUBECONFIG={self._paths.control_plane / 'kubeconfig'}")

    def control_plane_stop(self, _: argparse.Namespace) -> None:
        """Stop it."""
        ControlPlane(self._paths.control_plane, paths=self._paths).stop()
        (self._paths.control_plane / "kubeconfig").unlink(missing_ok=True)

    def _provider(self) -> str:
        return provider(self._paths)

    def _cluster(self, provider: str) -> Cluster:
        kinds: dict[str, type[LocalCluster] | type[KindCluster] | type[ExistingCluster]] = {
            LOCAL: LocalCluster,
            "kind": KindCluster,
            "existing": ExistingCluster,
        }
        return kinds[provider](self._paths, self._progress)


def parser(commands: Commands) -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python3 -m e2e.cluster", description="A local Kubernetes cluster for tests.")
    verbs = top.add_subparsers(required=True, metavar="VERB")

    up = verbs.add_parser("up", help="bring the cluster up; a no-op when it is up")
    up.add_argument("--cluster", choices=(LOCAL, "kind", "existing"), help="default: the one in use, else local")
    up.set_defaults(run=commands.up, lock=None)

    down = verbs.add_parser("down", help="stop the cluster and leave nothing behind")
    down.add_argument("--purge", action="store_true", help="also remove binaries, root file system and images")
    down.set_defaults(run=commands.down, lock=locks.CLUSTER)

    build = verbs.add_parser("build", help="build binaries and the root file system, start nothing")
    build.set_defaults(run=commands.build, lock=None)

    load = verbs.add_parser("load", help="load docker-archives into the cluster")
    load.add_argument("archives", nargs="+", type=Path, metavar="IMAGE.tar")
    load.set_defaults(run=commands.load, lock=locks.CLUSTER)

    image = verbs.add_parser("image", help="work with images").add_subparsers(required=True, metavar="VERB")
    image_build = image.add_parser("build", help="build a Dockerfile; a no-op while its inputs are unchanged")
    image_build.add_argument("--context", type=Path, required=True, metavar="DIR")
    image_build.add_argument("--file", type=Path, metavar="DOCKERFILE", help="default: Dockerfile of the context")
    image_build.add_argument("--tag", required=True, metavar="NAME:TAG")
    image_build.add_argument("--build-arg", type=_key_value, action="append", default=[], metavar="NAME=VALUE")
    image_build.add_argument("--out", type=Path, required=True, metavar="FILE.tar")
    image_build.add_argument("--builder", choices=("auto", "buildah", "docker"), default="auto")
    image_build.set_defaults(run=commands.image_build, lock=None)

    plane = verbs.add_parser("control-plane", help="etcd and apiserver alone, as any user")
    plane_verbs = plane.add_subparsers(required=True, metavar="VERB")
    start = plane_verbs.add_parser("start", help="start it on a free port")
    start.add_argument("--full", action="store_true", help="with the controller manager and the scheduler")
    start.set_defaults(run=commands.control_plane_start, lock=locks.CONTROL_PLANE)
    stop = plane_verbs.add_parser("stop", help="stop it")
    stop.set_defaults(run=commands.control_plane_stop, lock=locks.CONTROL_PLANE)
    return top


def main(argv: Sequence[str]) -> int:
    """Run one command; the process' exit code."""
    paths, progress = Paths(), Progress()
    arguments = parser(Commands(paths, progress)).parse_args(argv)
    try:
        paths.local.mkdir(parents=True, exist_ok=True)
        (paths.local / ".gitignore").write_text(IGNORE_EVERYTHING)
        if arguments.lock is None:
            arguments.run(arguments)
        else:
            with exclusive(paths, arguments.lock, progress):
                arguments.run(arguments)
    except ClusterError as error:
        print(describe(error), file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; `down` or the next `up` cleans up", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _key_value(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
