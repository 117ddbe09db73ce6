"""The node: a private machine inside this one, made of namespaces, control groups and the Debian root file system.

It has its own mount, network, cgroup, UTS, IPC and PID namespaces and is joined to the outside by one veth pair.
Killing its process 1 ends every process of it, and with the last process go its mounts and its network. Visible outside
while it runs: the veth pair, two routes over it, and its control groups.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
from pathlib import Path

from e2e.cluster import rootfs
from e2e.cluster.build import PAUSE
from e2e.cluster.cgroups import NodeCgroups
from e2e.cluster.processes import children_of, kill_recorded, output_of, record_pid, recorded_pid, spawn, wait_until
from e2e.cluster.progress import ClusterError
from e2e.cluster.settings import REPOSITORY, Network, Paths

SHELL = Path(__file__).parent / "shell"
NODE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DISK_FOLDERS = ("containerd", "kubelet", "cni", "kube-proxy", "log")
KEPT_DISK_FOLDERS = ("containerd",)

JOIN_AND_RUN = 'while read -r group; do echo $$ > "$group/cgroup.procs"; done < "$0"; exec "$@"'
"""Shell that moves itself into the groups listed in file $0 and becomes the program $1."""


class Node:
    """The node's life: :meth:`start`, :meth:`command` to run programs in it, :meth:`destroy`."""

    def __init__(self, paths: Paths, network: Network) -> None:
        self._paths = paths
        self._network = network
        self.state = paths.node
        self._cgroups = NodeCgroups(self.state / "cgroups", network.node_name)
        self._unshare_pid_file = self.state / "unshare.pid"
        self._init_pid_file = self.state / "init.pid"

    def is_running(self) -> bool:
        """True while the node's process 1 runs."""
        return recorded_pid(self._init_pid_file) is not None

    def start(self) -> None:
        """Make the namespaces, the control groups and the network. The caller destroys the node when this raises.

        Raises:
            ClusterError: a step failed, or another network of this machine uses the cluster's addresses.
        """
        rootfs.require_root("starting the local node")
        self._refuse_taken_addresses()
        self.state.mkdir(parents=True, exist_ok=True)
        for folder in DISK_FOLDERS:
            (self._paths.node_disk / folder).mkdir(parents=True, exist_ok=True)
        self._cgroups.create()
        self._start_init()
        self._connect_network()

    def command(self) -> list[str]:
        """An argv prefix that runs a program inside the node, with a clean environment."""
        return [
            "sh", "-c", JOIN_AND_RUN, str(self._cgroups.record),
            "nsenter", "-t", str(self._init_pid()), "-m", "-n", "-C", "-u", "-i", "-p", "--",
            "/usr/bin/env", "-i", f"PATH={NODE_PATH}:{self._paths.bin}", "HOME=/root", "LANG=C.UTF-8",
        ]  # fmt: skip

    def network_command(self) -> list[str]:
        """An argv prefix that runs a program of this machine on the node's network."""
        return ["nsenter", "-t", str(self._init_pid()), "-n", "--"]

    def destroy(self) -> None:
        """End the node and remove every trace but the image store. Nothing happens when there is none."""
        if not self.state.is_dir():
            return
        if self._cgroups.record.exists():
            rootfs.require_root("stopping the local node")
        kill_recorded(self._init_pid_file)
        kill_recorded(self._unshare_pid_file)
        self._cgroups.destroy()
        self._remove_interface()
        for entry in self.state.iterdir():
            if entry != self._paths.node_disk:
                remove(entry)
        for folder in DISK_FOLDERS:
            if folder not in KEPT_DISK_FOLDERS:
                remove(self._paths.node_disk / folder)

    def _init_pid(self) -> int:
        pid = recorded_pid(self._init_pid_file)
        if pid is None:
            raise ClusterError("the local node is not running", advice="run `python3 -m e2e.cluster up`")
        return pid

    def _start_init(self) -> None:
        scratch = self.state / "mnt"
        scratch.mkdir(exist_ok=True)
        ready = self.state / "ready"
        ready.unlink(missing_ok=True)
        environment = {
            "PATH": NODE_PATH,
            "ROOTFS": str(self._paths.rootfs),
            "SCRATCH": str(scratch),
            "LOCAL": str(self._paths.local),
            "SOURCES": str(REPOSITORY / "e2e"),
            "DISK": str(self._paths.node_disk),
            "STATE": str(self.state),
            "NODE_NAME": self._network.node_name,
            "INIT": str(self._paths.bin / PAUSE.name),
            "CGROUP": self._cgroups.mount_description,
        }
        groups = self.state / "namespace-root"
        groups.write_text("".join(f"{folder}\n" for folder in self._cgroups.namespace_root()))
        log = self.state / "log" / "init.log"
        process = spawn(
            ["sh", "-c", JOIN_AND_RUN, groups, "unshare", "-m", "-n", "-C", "-u", "-i", "-p", "-f", "--kill-child",
             "sh", SHELL / "node_init.sh"],
            log=log, pid_file=self._unshare_pid_file, env=environment,
        )  # fmt: skip
        wait_until(lambda: ready.exists() or process.poll() is not None, timeout_s=10, interval_s=0.02)
        children = children_of(process.pid)
        if not ready.exists() or not children:
            raise ClusterError(
                "the node's namespaces could not be made",
                log=log,
                advice="the kernel needs overlayfs, cgroups and namespaces; inside a container that is not privileged, "
                "use `up --cluster kind` on the host instead",
            )
        record_pid(self._init_pid_file, children[0])
        self._cgroups.delegate()

    def _connect_network(self) -> None:
        network, interface = self._network, self._network.host_interface
        init = str(recorded_pid(self._init_pid_file))
        self._ip("link", "add", interface, "type", "veth", "peer", "name", "eth0", "netns", init)
        self._ip("addr", "add", f"{network.host_ip}/30", "dev", interface)
        self._ip("link", "set", interface, "up")
        inside = [*self.command(), "ip"]
        output_of([*inside, "addr", "add", f"{network.node_ip}/30", "dev", "eth0"])
        output_of([*inside, "link", "set", "eth0", "up"])
        output_of([*inside, "route", "add", "default", "via", network.host_ip])
        for cidr in (network.pod_cidr, network.service_cidr):
            self._ip("route", "add", cidr, "via", network.node_ip)

    def _refuse_taken_addresses(self) -> None:
        network = self._network
        wanted = [
            ipaddress.ip_network(network.pod_cidr),
            ipaddress.ip_network(network.service_cidr),
            ipaddress.ip_interface(f"{network.node_ip}/30").network,
        ]
        for route in json.loads(self._ip("-4", "-json", "route", "show") or "[]"):
            if route["dst"] == "default":
                continue
            taken = ipaddress.ip_network(route["dst"], strict=False)
            if any(taken.overlaps(one) for one in wanted):
                raise ClusterError(
                    f"this machine already has a route to {taken} by {route.get('dev')}, which the cluster would use",
                    advice="remove that network, or use `up --cluster kind`",
                )

    def _remove_interface(self) -> None:
        """Remove the host's end of the veth pair; it goes with the node's network, but a moment later."""
        if Path("/sys/class/net", self._network.host_interface).exists():
            try:
                self._ip("link", "del", self._network.host_interface)
            except ClusterError:
                if Path("/sys/class/net", self._network.host_interface).exists():
                    raise

    def _ip(self, *arguments: str) -> str:
        return output_of([*rootfs.host_command(self._paths.rootfs, "usr/bin/ip"), *arguments])


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it; nothing happens when it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
