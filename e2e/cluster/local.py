"""The local cluster as a whole: build missing parts, start the node, stop it without a trace."""

from __future__ import annotations

import shutil
from pathlib import Path

from e2e.cluster.build import PAUSE, build_binaries
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.images import build_system_images, load_into_node
from e2e.cluster.node import Node
from e2e.cluster.node_components import NodeComponents
from e2e.cluster.pki import write_private
from e2e.cluster.progress import Progress
from e2e.cluster.rootfs import build_rootfs, require_root
from e2e.cluster.settings import Network, Paths

ETCD_DATA_IN_NODE = Path("/dev/shm/etcd")
"""On the node's own memory file system, so that the data ends with the node."""

BUILT = ("base", "bin", "buildah", "digests", "images", "log", "node", "rootfs", "unpacked")
"""Folders of ``.local`` that ``down --purge`` removes."""


class LocalCluster:
    """One node in private namespaces. See :mod:`e2e.cluster`."""

    def __init__(self, paths: Paths, progress: Progress, network: Network | None = None) -> None:
        self._paths = paths
        self._progress = progress
        self._network = network or Network()
        self._node = Node(paths, self._network)

    def build(self) -> None:
        """Build binaries, root file system and system images; quick when they are there."""
        build_binaries(self._paths, self._progress)
        build_rootfs(self._paths, self._progress)
        build_system_images(self._paths, self._progress)

    def prepare(self) -> None:
        """Build all that a start needs, unless the cluster is up."""
        if not self.is_up():
            require_root("starting the local cluster")
            self.build()

    def up(self) -> None:
        """Bring the cluster up, until the node is Ready and DNS serves. Remains of a broken start are removed first.

        Raises:
            ClusterError: a step failed. The node then stays for a look at its logs, until ``down`` or the next ``up``.
        """
        if self.is_up():
            self._progress.report(f"the local cluster is already up: export KUBECONFIG={self._paths.kubeconfig}")
            return
        self.prepare()
        self._node.destroy()
        with self._progress.step("start the node"):
            self._node.start()
        with self._progress.step("start the control plane"):
            control_plane = self._control_plane()
            control_plane.start()
        components = self._components(control_plane)
        with self._progress.step("start containerd"):
            components.start_containerd()
        load_into_node(self._node, self._paths, build_system_images(self._paths, self._progress), self._progress)
        with self._progress.step("start kubelet and kube-proxy, wait for the node and DNS"):
            components.start_kubernetes()
            components.apply_addons()
            components.wait_ready()
        write_private(self._paths.kubeconfig, control_plane.kubeconfig.read_text())
        self._marker.write_text("")
        self._progress.report(f"ready: export KUBECONFIG={self._paths.kubeconfig} PATH={self._paths.bin}:$PATH")

    def is_up(self) -> bool:
        """True when the last start went to its end and the node still runs."""
        return self._marker.exists() and self._node.is_running()

    def down(self) -> None:
        """Stop the cluster and remove every trace outside ``.local``; built things and loaded images stay."""
        with self._progress.step("stop the local cluster"):
            self._node.destroy()
            self._paths.kubeconfig.unlink(missing_ok=True)

    def purge(self) -> None:
        """Also remove everything that was built and loaded."""
        with self._progress.step("remove built programs and images"):
            for name in BUILT:
                shutil.rmtree(self._paths.local / name, ignore_errors=True)
                shutil.rmtree(self._paths.local / f"{name}.partial", ignore_errors=True)

    def load(self, archives: list[Path]) -> None:
        """Import docker-archives. If the cluster is not up, the node and its containerd run for as long as that takes.

        They need no Kubernetes, so that images are there before it is compiled.
        """
        if self.is_up():
            load_into_node(self._node, self._paths, archives, self._progress)
            return
        build_binaries(self._paths, self._progress, [PAUSE])
        build_rootfs(self._paths, self._progress)
        self._node.destroy()
        try:
            self._node.start()
            self._components(self._control_plane()).start_containerd()
            load_into_node(self._node, self._paths, archives, self._progress)
        finally:
            self._node.destroy()

    @property
    def _marker(self) -> Path:
        return self._paths.node / "up"

    def _components(self, control_plane: ControlPlane) -> NodeComponents:
        return NodeComponents(self._node, control_plane, self._paths, self._network)

    def _control_plane(self) -> ControlPlane:
        return ControlPlane(
            self._paths.node / "control-plane",
            controller_manager=True,
            scheduler=True,
            address=self._network.node_ip,
            port=self._network.api_port,
            node_name=self._network.node_name,
            command_prefix=self._node.command(),
            binaries=self._paths.bin,
            etcd_data=ETCD_DATA_IN_NODE,
            audit=True,
            paths=self._paths,
            network=self._network,
        )
