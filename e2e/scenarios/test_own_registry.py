"""README's lines for a cluster of one's own: push images to a registry, install from it, and use them.

The registry serves on the node, because containerd speaks plain HTTP with `localhost`. The release is a second one
beside the demo's, in namespaces of its own.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.build import CRANE, build_binaries
from e2e.cluster.images import CONTAINERD_NAMESPACE
from e2e.cluster.node import Node
from e2e.cluster.processes import output_of
from e2e.cluster.progress import Progress
from e2e.cluster.settings import Network, Paths
from e2e.command_blocks import REPOSITORY, blocks, run
from e2e.images.catalogue import select
from e2e.images.registry import EXAMPLE
from e2e.product.direct import pods_run_here
from e2e.product.kubectl import Kubectl, wait_until

pytestmark = pytest.mark.cluster

PAGES = ("README.md", "docs/operations/install.md")
"""The first has the lines that run; blocks of the others repeat some of them."""
HERE = Path(__file__).resolve().relative_to(REPOSITORY).as_posix()
RELEASE = "own"
OPERATOR = "own-registry-system"
SERVED = "own-registry"
TIER = "shared"
REPLACED = {
    "--install kvstrata charts": f"--install {RELEASE} charts",
    "-n kvstrata-system ": f"-n {OPERATOR} ",
    "watchNamespaces={demo}": f"watchNamespaces={{{SERVED}}},replicas=1",
}
"""Of README's lines, besides the registry."""
PUSHED = re.compile(r"^pushed (\S+/kvstrata-(\w+)@sha256:\w+)$", re.M)


@pytest.fixture
def node() -> Node:
    """The node of the local cluster."""
    if not pods_run_here():
        pytest.skip("a registry can be started on the local cluster's node only")
    return Node(Paths(), Network())


@pytest.fixture
def registry(node: Node, tmp_path: Path) -> Iterator[str]:
    """An empty registry on the node's network; yields the beginning of its images' names."""
    build_binaries(Paths(), Progress(), [CRANE])
    log, port = tmp_path / "log", ""
    serve = ["registry", "serve", "--address", "127.0.0.1:0", "--disk", str(tmp_path)]
    with log.open("w") as output:
        server = subprocess.Popen([*node.network_command(), str(Paths().bin / CRANE.name), *serve], stderr=output)
    try:
        port = wait_until("the registry serves", lambda: _port(log.read_text()), every_s=0.05)
        yield f"localhost:{port}/team"
    finally:
        server.kill()
        server.wait()
        _forget_images(node, f"localhost:{port}/")


@pytest.fixture
def release(kubectl: Kubectl) -> Iterator[None]:
    """Make the namespace to serve; afterwards remove it, the release and the operator's namespace."""
    with ExitStack() as afterwards:
        afterwards.callback(kubectl.run, "delete", "namespace", OPERATOR, "--ignore-not-found")
        afterwards.callback(kubectl.helm, "uninstall", RELEASE, "-n", OPERATOR, "--ignore-not-found")
        afterwards.callback(kubectl.run, "delete", "namespace", SERVED, "--ignore-not-found")
        kubectl.run("create", "namespace", SERVED)
        yield


@pytest.mark.usefixtures("release")
def test_readme_lines_push_images_and_install_from_the_registry(kubectl: Kubectl, node: Node, registry: str) -> None:
    push, *install = _lines(registry)
    pushed = {
        name: image
        for image, name in PUSHED.findall(run(push, REPOSITORY, kubectl.environment, node.network_command()))
    }
    assert sorted(pushed) == ["operator", "redis", "sidecar"]
    for line in install:
        run(line, REPOSITORY, kubectl.environment)
    small = {"shards": 1, "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}}}
    kubectl.apply(
        _object("CacheDomain", "default", {"staleAfter": "1m"}),
        _object("CacheTier", TIER, {"medium": "Redis", "capacity": "16Mi", "redis": {"managed": small}}),
    )
    (sidecar,) = select(["sidecar"])
    program = ("--restart=Never", "--command", "--", "python", "-c", "import kvstrata_sidecar.gate.main")
    kubectl.run("-n", SERVED, "run", "sidecar", f"--image={sidecar.name_in(registry)}", *program)

    operator = f"deployment/{RELEASE}-kvstrata"
    kubectl.run("-n", OPERATOR, "wait", "--for=condition=Available", operator, "--timeout=240s")
    kubectl.run("-n", SERVED, "wait", "--for=condition=Ready", f"cachetier/{TIER}", "--timeout=240s")
    kubectl.run("-n", SERVED, "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/sidecar", "--timeout=240s")
    assert _images(kubectl, OPERATOR, f"app.kubernetes.io/instance={RELEASE}") == {pushed["operator"]}
    assert _images(kubectl, SERVED, f"kvstrata.io/tier={TIER}") == {pushed["redis"]}
    assert _images(kubectl, SERVED, "run=sidecar") == {pushed["sidecar"]}


def _lines(registry: str) -> list[str]:
    """README's lines with the registry, and with names that are not the demo's."""
    (block,), *excerpts = ([one.text for one in blocks(REPOSITORY / page) if one.test == HERE] for page in PAGES)
    assert all(text in block for texts in excerpts for text in texts)
    for old, new in {EXAMPLE: registry, **REPLACED}.items():
        assert old in block, f"{PAGES[0]} has no {old!r}"
        block = block.replace(old, new)
    return block.splitlines()


def _images(kubectl: Kubectl, namespace: str, selector: str) -> set[str]:
    """The images, with their digests, that pods' containers run or ran."""
    pods = kubectl.list("pod", namespace, selector)
    return {container["imageID"] for pod in pods for container in pod["status"]["containerStatuses"]}


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": SERVED}
    return {"apiVersion": "kvstrata.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def _port(log: str) -> str:
    found = re.search(r"serving on port (\d+)\n", log)
    return found[1] if found else ""


def _forget_images(node: Node, beginning: str) -> None:
    """Remove images of a registry that is gone from the node."""
    images = [*node.command(), "ctr", "--namespace", CONTAINERD_NAMESPACE, "images"]
    if pulled := [name for name in output_of([*images, "ls", "-q"]).splitlines() if name.startswith(beginning)]:
        output_of([*images, "rm", *pulled])
