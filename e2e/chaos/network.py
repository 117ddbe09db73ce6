"""A network of pods, each in a network namespace of its own, on one bridge; and the faults between them.

Everything is made in the network namespace of this process, which must be its own (`python -m e2e.chaos` sees to that):
it is gone, with all links, as soon as the last of these processes is, however they end.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from e2e.cluster.rootfs import host_command
from e2e.cluster.settings import Paths
from e2e.product.direct import network_of

BRIDGE = "pods"
SUBNET = ipaddress.ip_network("10.77.0.0/16")
UNUSED_ADDRESS = "02:00:00:00:00:de"
"""A hardware address that no pod has: frames to it are lost on the bridge silently, as in a partition."""

READY_S = 30.0


@dataclass(frozen=True)
class Sandbox:
    """The network of one pod, which lasts while its first process does, as in Kubernetes."""

    ip: str
    link: str
    holder: subprocess.Popen[bytes]

    def inside(self, command: Sequence[str]) -> list[str]:
        """An argv that runs a program in this network."""
        return ["nsenter", "-t", str(self.holder.pid), "-n", "--", *command]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that are made in the block are in this network."""
        with network_of(self.holder.pid):
            yield


class Network:
    """The bridge and its pods. The bridge's own address is the operator's and the clients'."""

    def __init__(self) -> None:
        self._ip = host_command(Paths().rootfs, "usr/bin/ip") if Paths().rootfs.is_dir() else ["ip"]
        self._addresses = itertools.islice(SUBNET.hosts(), 1, None)
        self._cuts: set[tuple[Sandbox | None, str]] = set()
        self._unplugged: set[Sandbox] = set()
        self._outside = os.readlink("/proc/self/ns/net")
        own = f"{next(SUBNET.hosts())}/{SUBNET.prefixlen}"
        self._batch("link set lo up", f"link add {BRIDGE} type bridge", f"addr add {own} dev {BRIDGE}")
        self._batch(f"link set {BRIDGE} up")

    def add(self) -> Sandbox:
        """Make the network of a new pod, with an address that no pod had before."""
        ip = str(next(self._addresses))
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        give_up_at_s = time.monotonic() + READY_S
        while os.readlink(f"/proc/{holder.pid}/ns/net") == self._outside:
            assert time.monotonic() < give_up_at_s, "no network namespace"
            time.sleep(0.001)
        sandbox = Sandbox(ip, f"pod{int(ipaddress.ip_address(ip)) - int(SUBNET.network_address)}", holder)
        self._batch(
            f"link add {sandbox.link} type veth peer name eth0 netns {holder.pid}",
            f"link set {sandbox.link} master {BRIDGE} up",
        )
        own = f"addr add {ip}/{SUBNET.prefixlen} dev eth0"
        self._batch(own, "link set eth0 up", "link set lo up", where=sandbox)
        return sandbox

    def remove(self, sandbox: Sandbox) -> None:
        """Remove a pod's network. Its programs must have ended."""
        self._cuts = {cut for cut in self._cuts if cut[0] is not sandbox}
        self._unplugged.discard(sandbox)
        sandbox.holder.kill()
        sandbox.holder.wait()

    def cut(self, source: Sandbox | None, target_ip: str) -> None:
        """Lose all that `source`, None for the operator and the clients, sends to an address from now on."""
        device = BRIDGE if source is None else "eth0"
        self._batch(f"neigh replace {target_ip} lladdr {UNUSED_ADDRESS} nud permanent dev {device}", where=source)
        self._cuts.add((source, target_ip))

    def unplug(self, sandbox: Sandbox) -> None:
        """Lose all that goes to a pod or comes from it."""
        self._batch(f"link set {sandbox.link} down")
        self._unplugged.add(sandbox)

    def heal(self) -> None:
        """Restore all connections."""
        for sandbox in self._unplugged:
            self._batch(f"link set {sandbox.link} up")
        for source, target_ip in self._cuts:
            self._batch(f"neigh del {target_ip} dev {BRIDGE if source is None else 'eth0'}", where=source)
        self._unplugged.clear()
        self._cuts.clear()

    def _batch(self, *lines: str, where: Sandbox | None = None) -> None:
        command = [*self._ip, "-batch", "-"]
        batch = "".join(f"{line}\n" for line in lines)
        run = subprocess.run(
            command if where is None else where.inside(command),
            input=batch,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, f"ip: {batch}{run.stderr}"
