"""An operator that starts before its API server is there: it waits in its process, and can be told to end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.component import Component
from e2e.cluster.control_plane import ControlPlane
from tests.apiserver.conftest import OPERATOR_NAMESPACE, REPOSITORY, install_crds
from tests.apiserver.operator_process import OperatorProcess, Operators
from tests.apiserver.server import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this module's control plane lives."""
    return tmp_path_factory.mktemp("control-plane")


@pytest.fixture(scope="module")
def empty(folder: Path) -> Iterator[Server]:
    """An apiserver without our kinds."""
    with ControlPlane(folder) as plane:
        started = Server(plane.kubectl, plane.kubeconfig)
        started.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        yield started


@pytest.fixture
def starting(empty: Server, tmp_path: Path) -> Iterator[Operators]:
    """Starts operators; whatever still runs at the end is stopped."""
    started = Operators(empty.kubeconfig, OPERATOR_NAMESPACE, REPOSITORY, tmp_path)
    yield started
    for running in started.running():
        running.kill()


def test_an_operator_waits_for_its_kinds_and_then_leads(empty: Server, starting: Operators) -> None:
    operator = starting.start("early")
    _wait_for_log(operator, "tenantcachepolicies")
    assert not operator.leading
    install_crds(empty)
    operator.wait_until_leading()
    assert operator.stop() == 0


@pytest.mark.parametrize("fault", ["paused", "killed"])
def test_an_operator_outwaits_an_absent_api_server_in_its_process(
    empty: Server, starting: Operators, folder: Path, fault: str
) -> None:
    install_crds(empty)
    server = Component(folder, "kube-apiserver")
    with server.paused() if fault == "paused" else server.killed():
        operator = starting.start(f"early-{fault}")
        _wait_for_log(operator, "waiting for the API server")
        assert operator.process.poll() is None
        assert operator.answer("/livez")[0] == 200
    operator.wait_until_leading()
    assert operator.stop() == 0


def test_an_operator_that_waits_can_be_told_to_end(starting: Operators, folder: Path) -> None:
    with Component(folder, "kube-apiserver").paused():
        operator = starting.start("told")
        _wait_for_log(operator, "waiting for the API server")
        assert operator.stop() == 0


def _wait_for_log(operator: OperatorProcess, text: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in operator.log.read_text():
        assert operator.process.poll() is None, operator.log_tail()
        assert time.monotonic() < deadline, operator.log_tail()
        time.sleep(0.1)
