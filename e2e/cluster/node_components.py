"""Programs inside the node: containerd, kubelet, kube-proxy, the network-policy enforcer and the add-ons."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.node import Node
from e2e.cluster.processes import output_of, recorded_pid, spawn, wait_until
from e2e.cluster.progress import ClusterError
from e2e.cluster.settings import PAUSE_IMAGE, REPOSITORY, Network, Paths

ADDONS = Path(__file__).parent / "addons"
READY_TIMEOUT_S = 90.0
ENFORCER_USER = "admin"

RECOVERED = "Start streaming server"
"""Containerd's last log line before kubelet may ask it."""

CONTAINERD_TEMPLATE = Path(__file__).parent / "containerd.toml"


class NodeComponents:
    """The node's services. They end with the node: nothing here stops them.

    Args:
        node: a running node.
        control_plane: the control plane that runs inside it.
    """

    def __init__(self, node: Node, control_plane: ControlPlane, paths: Paths, network: Network) -> None:
        self._node = node
        self._control_plane = control_plane
        self._paths = paths
        self._network = network
        self._etc = node.state / "etc"

    def start_containerd(self) -> None:
        """Start containerd and return when it answers."""
        (self._etc / "cni.d").mkdir(parents=True, exist_ok=True)
        (self._etc / "containerd.toml").write_text(
            CONTAINERD_TEMPLATE.read_text()
            .replace("@SANDBOX_IMAGE@", PAUSE_IMAGE)
            .replace("@CNI_CONFIGURATION@", str(self._etc / "cni.d"))
        )
        self._write_json("cni.d/10-pods.conflist", self._cni_configuration())
        process = self._spawn("containerd", ["containerd", "--config", str(self._etc / "containerd.toml")])
        version = [*self._node.command(), "ctr", "version"]

        def answers() -> bool:
            if process.poll() is not None:
                raise ClusterError("containerd died at its start", log=self._log("containerd"))
            return subprocess.run(version, capture_output=True, check=False).returncode == 0

        if not wait_until(answers, timeout_s=20, interval_s=0.1):
            raise ClusterError("containerd does not answer", log=self._log("containerd"))
        # It answers before it has recovered its former containers, and a kubelet that asks meanwhile ends.
        wait_until(lambda: RECOVERED in self._log("containerd").read_text(), timeout_s=60, interval_s=0.1)

    def start_kubernetes(self) -> None:
        """Start kubelet, kube-proxy and the network-policy enforcer."""
        pki, binaries = self._control_plane.pki, self._paths.bin
        (self._etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        self._write_json("kubelet.json", self._kubelet_configuration())
        self._write_json("kube-proxy.json", self._kube_proxy_configuration())
        self._spawn("kubelet", [
            str(binaries / "kubelet"), f"--config={self._etc / 'kubelet.json'}",
            f"--kubeconfig={pki.kubeconfig('kubelet')}", f"--hostname-override={self._network.node_name}",
            f"--node-ip={self._network.node_ip}", "--v=1",
        ])  # fmt: skip
        self._spawn("kube-proxy", [str(binaries / "kube-proxy"), f"--config={self._etc / 'kube-proxy.json'}", "--v=1"])
        self._spawn("netpol", [
            "env", f"PYTHONPATH={REPOSITORY}", "PYTHONDONTWRITEBYTECODE=1",
            "/usr/bin/python3", "-m", "e2e.cluster.netpol", str(pki.kubeconfig(ENFORCER_USER)),
        ])  # fmt: skip

    def apply_addons(self) -> None:
        """Apply the manifests of CoreDNS."""
        output_of([
            self._control_plane.kubectl, "--kubeconfig", self._control_plane.kubeconfig,
            "apply", "--server-side", "-f", ADDONS,
        ])  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until the node is Ready and CoreDNS serves.

        Raises:
            ClusterError: it took more than 90 s, or a component died; carries that component's log.
        """
        self._wait_for(self._node_is_ready, "the node is not Ready")
        self._wait_for(self._dns_serves, "CoreDNS does not serve")

    def _wait_for(self, condition: Callable[[], bool], failure: str) -> None:
        def holds() -> bool:
            self._check_alive()
            return condition()

        if not wait_until(holds, timeout_s=READY_TIMEOUT_S, interval_s=0.1):
            raise ClusterError(f"{failure} after {READY_TIMEOUT_S:.0f} s", log=self._log("kubelet"))

    def _node_is_ready(self) -> bool:
        try:
            node = self._control_plane.get(f"/api/v1/nodes/{self._network.node_name}")
        except OSError:
            return False
        return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))

    def _dns_serves(self) -> bool:
        try:
            deployment = self._control_plane.get("/apis/apps/v1/namespaces/kube-system/deployments/coredns")
        except OSError:
            return False
        return bool(deployment.get("status", {}).get("readyReplicas"))

    def _check_alive(self) -> None:
        for name in ("containerd", "kubelet", "kube-proxy", "netpol"):
            if recorded_pid(self._pid_file(name)) is None:
                raise ClusterError(f"{name} died", log=self._log(name))

    def _spawn(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return spawn([*self._node.command(), *command], log=self._log(name), pid_file=self._pid_file(name))

    def _pid_file(self, name: str) -> Path:
        return self._node.state / "pid" / name

    def _log(self, name: str) -> Path:
        return self._node.state / "log" / f"{name}.log"

    def _write_json(self, name: str, document: Any) -> None:
        (self._etc / name).write_text(json.dumps(document, indent=1) + "\n")

    def _cni_configuration(self) -> dict[str, Any]:
        # ptp and not bridge: every packet between pods is routed, so that one forward chain sees it (network policies).
        ranges = [[{"subnet": self._network.pod_cidr}]]
        return {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": False,
                    "mtu": 1500,
                    "ipam": {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]},
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }

    def _kubelet_configuration(self) -> dict[str, Any]:
        pki = self._control_plane.pki
        _, open_files_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "failSwapOn": False,
            # Where the open-files limit is below kubelet's default, kubelet would fail to raise it.
            "maxOpenFiles": min(1_000_000, open_files_limit if open_files_limit > 0 else sys.maxsize),
            "oomScoreAdj": 0,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDNS": [self._network.dns_ip],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self._etc / "resolv.conf"),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(pki.crt("ca"))},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki.crt("kubelet")),
            "tlsPrivateKeyFile": str(pki.key("kubelet")),
            "serializeImagePulls": False,
            # An image that was loaded stays usable after a pod pulled the same content under another name.
            "imagePullCredentialsVerificationPolicy": "NeverVerify",
            # There is no registry to pull an image again from: never collect images for space.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            # In bytes: a per cent of a developer's disk may be more than is left of it.
            "evictionHard": {
                "memory.available": "200Mi",
                "nodefs.available": "512Mi",
                "imagefs.available": "512Mi",
                "nodefs.inodesFree": "1%",
                "imagefs.inodesFree": "1%",
            },
            "syncFrequency": "10s",
            "fileCheckFrequency": "20s",
            "nodeStatusUpdateFrequency": "5s",
        }

    def _kube_proxy_configuration(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(self._control_plane.pki.kubeconfig("kube-proxy"))},
            "mode": "nftables",
            "clusterCIDR": self._network.pod_cidr,
            "hostnameOverride": self._network.node_name,
            # Zero leaves the machine's connection tracking as it is.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "oomScoreAdj": 0,
            "bindAddress": "0.0.0.0",
            "nftables": {"minSyncPeriod": "100ms"},
        }
