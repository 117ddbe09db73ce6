"""One real apiserver for this folder, and operators as processes beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.control_plane import ControlPlane, free_port
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.server import Server

REPOSITORY = Path(__file__).resolve().parents[2]
OPERATOR_NAMESPACE = "kvstrata-system"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a real apiserver."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.apiserver)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """etcd and kube-apiserver with the CRDs installed; no controller of Kubernetes runs."""
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as plane:
        started = Server(plane.kubectl, plane.kubeconfig)
        started.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds"))
        started.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
        started.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        yield started


@pytest.fixture(scope="session")
def start_operator(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OperatorProcess]]:
    """Start operators; whatever still runs at the end is stopped."""
    started: list[OperatorProcess] = []
    logs = tmp_path_factory.mktemp("operators")

    def start(name: str) -> OperatorProcess:
        port = free_port()
        environment = {
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}/operator/src:{REPOSITORY}/sidecar/src",
            "KUBECONFIG": str(server.kubeconfig),
            "KVSTRATA_NAMESPACE": OPERATOR_NAMESPACE,
            "KVSTRATA_POD_NAME": name,
            "KVSTRATA_SIDECAR_IMAGE": "localhost/kvstrata-sidecar:test",
            "KVSTRATA_REDIS_IMAGE": "localhost/kvstrata-redis:test",
            "KVSTRATA_HTTP_PORT": str(port),
        }
        log = logs / f"{name}-{len(started)}.log"
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstrata.cli.operator"], env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT
        )
        started.append(OperatorProcess(process, port, log))
        return started[-1]

    start.started = started  # type: ignore[attr-defined]
    yield start
    for operator in started:
        operator.kill()


@pytest.fixture(scope="session")
def samples(server: Server) -> list[dict[str, Any]]:
    """The checked-in samples, applied."""
    folder = REPOSITORY / "manifests" / "samples"
    objects = [
        obj
        for path in sorted(folder.glob("[0-9]*.yaml"))
        for obj in yaml.safe_load_all(path.read_text())
        if obj
    ]
    for obj in objects:
        server.apply(obj)
    return objects


@pytest.fixture(scope="session")
def operator(
    samples: list[dict[str, Any]], start_operator: Callable[..., OperatorProcess], server: Server
) -> OperatorProcess:
    """The operator of most tests here, leading over the settled samples."""
    running = start_operator("operator-a")
    running.wait_until_leading()
    deadline = time.monotonic() + 40
    while server.condition("TenantCachePolicy", "speech", "Enforced")[0] != "Unknown":
        assert time.monotonic() < deadline, running.log_tail()
        time.sleep(0.2)
    return running
