"""One real apiserver for this folder, and operators as processes beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.control_plane import ControlPlane
from tests.api.apiserver import ApiServer
from tests.apiserver.faulty import FaultyWorld
from tests.apiserver.operator_process import OperatorProcess, Operators
from tests.apiserver.server import Server
from tests.support.api_proxy import ApiProxy

REPOSITORY = Path(__file__).resolve().parents[2]
OPERATOR_NAMESPACE = "kvstrata-system"


def install_crds(server: Server) -> None:
    """Install the checked-in CRDs and wait until they are served."""
    server.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds"))
    server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a real apiserver."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.apiserver)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """etcd and kube-apiserver with the CRDs installed; no controller of Kubernetes runs."""
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as plane:
        started = Server(plane.kubectl, plane.kubeconfig)
        install_crds(started)
        started.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        yield started


@pytest.fixture(scope="package")
def operators(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operators]:
    """Starts operators; whatever still runs at the end is stopped."""
    started = Operators(server.kubeconfig, OPERATOR_NAMESPACE, REPOSITORY, tmp_path_factory.mktemp("operators"))
    yield started
    for running in started.running():
        running.kill()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyWorld]:
    """An apiserver of its own, whose operators see it through a proxy that misbehaves on demand."""
    folder = tmp_path_factory.mktemp("faulty")
    with ControlPlane(folder / "control-plane") as plane:
        install_crds(Server(plane.kubectl, plane.kubeconfig))
        certificate, key = plane.pki.crt("apiserver"), plane.pki.key("apiserver")
        with ApiProxy(plane.kubeconfig, folder, certificate, key) as proxy:
            started = Operators(plane.kubeconfig, OPERATOR_NAMESPACE, REPOSITORY, folder)
            api = ApiServer(plane.kubeconfig)
            world = FaultyWorld(api, proxy, started)
            world.populate()
            yield world
            for running in started.running():
                running.kill()
            api.close()


@pytest.fixture(scope="package")
def samples(server: Server) -> list[dict[str, Any]]:
    """The checked-in samples, applied."""
    folder = REPOSITORY / "manifests" / "samples"
    objects = [
        obj for path in sorted(folder.glob("[0-9]*.yaml")) for obj in yaml.safe_load_all(path.read_text()) if obj
    ]
    for obj in objects:
        server.apply(obj)
    return objects


@pytest.fixture(scope="package")
def operator(samples: list[dict[str, Any]], operators: Operators, server: Server) -> OperatorProcess:
    """The operator of most tests here, leading over the settled samples."""
    running = operators.start("operator-a")
    running.wait_until_leading()
    deadline = time.monotonic() + 90
    while server.condition("TenantCachePolicy", "speech", "Ready") != ("True", "NoLivePods"):
        assert time.monotonic() < deadline, running.log_tail()
        time.sleep(0.2)
    return running
