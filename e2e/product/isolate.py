"""Pods that are cut off: from the API server, from the operator, or from the API server from their first moment on.

A pod's own network gets a table of nftables that drops the named packets, in both directions and on open connections,
so that its gate meets silence as behind a broken network, not an error. Needs root and the local cluster.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.cluster import rootfs
from e2e.cluster.node import Node
from e2e.cluster.settings import Network, Paths

from .direct import container_pid, network_of
from .kubectl import Kubectl

TABLE = "kvstrata_isolate"
CONTROL_PORT = 9443
NETWORK = Network()


@contextmanager
def cut_off_the_api_server(kubectl: Kubectl, namespace: str, pod: str) -> Iterator[None]:
    """Drop everything between a pod and the API server while the block runs; callers and the operator reach it."""
    server = NETWORK.kubernetes_service_ip
    with _in_the_pod(kubectl, namespace, pod, outgoing=f"ip daddr {server} drop", incoming=f"ip saddr {server} drop"):
        yield


@contextmanager
def cut_off_the_operator(kubectl: Kubectl, namespace: str, pod: str) -> Iterator[None]:
    """Drop everything at the port at which the operator asks a pod; the pod reads its policy as before."""
    with _in_the_pod(
        kubectl, namespace, pod,
        outgoing=f"tcp sport {CONTROL_PORT} drop", incoming=f"tcp dport {CONTROL_PORT} drop",
    ):  # fmt: skip
        yield


@contextmanager
def newcomers_cut_off_the_api_server(addresses: frozenset[str]) -> Iterator[None]:
    """Drop pods' packets to the API server while the block runs, except those of pods with these addresses."""
    known = ", ".join(sorted(addresses))
    servers = f"{NETWORK.kubernetes_service_ip}, {NETWORK.node_ip}"
    rule = (
        f"ip saddr {NETWORK.pod_cidr} ip saddr != {{ {known} }} ip daddr {{ {servers} }} tcp dport {{ 443, 6443 }} drop"
    )
    # Before addresses of services become those of servers.
    chain = f"chain sent {{ type filter hook prerouting priority -300; policy accept; {rule}; }}"
    command = [*Node(Paths(), NETWORK).command(), "nft"]
    _nft(command, f"table inet {TABLE} {{ {chain}; }}")
    try:
        yield
    finally:
        _nft(command, f"delete table inet {TABLE}")


@contextmanager
def _in_the_pod(kubectl: Kubectl, namespace: str, pod: str, *, outgoing: str, incoming: str) -> Iterator[None]:
    pid = container_pid(kubectl, namespace, pod, "gate")
    command = rootfs.host_command(Paths().rootfs, "usr/sbin/nft")
    chains = (
        f"chain sent {{ type filter hook output priority -300; policy accept; {outgoing}; }}",
        f"chain received {{ type filter hook input priority -300; policy accept; {incoming}; }}",
    )
    with network_of(pid):
        _nft(command, f"table inet {TABLE} {{ {'; '.join(chains)}; }}")
    try:
        yield
    finally:
        # A pod that has gone took its network with it.
        with contextlib.suppress(FileNotFoundError), network_of(pid):
            _nft(command, f"delete table inet {TABLE}")


def _nft(command: list[str], script: str) -> None:
    done = subprocess.run([*command, "-f", "-"], input=script, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"nft refused {script!r}: {done.stderr.strip()[:500]}")
