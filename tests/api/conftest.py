"""One real apiserver for all tests of this folder, with the checked-in CRDs installed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.control_plane import ControlPlane
from kvstrata.api.base import GROUP, VERSION
from tests.api.apiserver import ApiServer, RefusedError

REPOSITORY = Path(__file__).resolve().parents[2]
ESTABLISHED_WITHIN_S = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a real apiserver."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.apiserver)


@pytest.fixture(scope="package")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd and kube-apiserver, nothing else."""
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane


@pytest.fixture(scope="package")
def bare_api(control_plane: ControlPlane) -> Iterator[ApiServer]:
    """The apiserver, without a promise about CRDs."""
    server = ApiServer(control_plane.kubeconfig)
    yield server
    server.close()


@pytest.fixture(scope="package")
def installed_crds(bare_api: ApiServer) -> dict[str, dict[str, Any]]:
    """The checked-in CRDs by name, installed, served, and listed by discovery, which follows later."""
    crds = [yaml.safe_load(path.read_text()) for path in sorted((REPOSITORY / "crds").glob(f"{GROUP}_*.yaml"))]
    for crd in crds:
        bare_api.create(crd)
    deadline = time.monotonic() + ESTABLISHED_WITHIN_S
    for crd in crds:
        while not _served(bare_api, crd):
            assert time.monotonic() < deadline, f"{crd['metadata']['name']} is not served"
            time.sleep(0.05)
    kinds = {crd["spec"]["names"]["plural"] for crd in crds}
    while not kinds <= _discovered(bare_api):
        assert time.monotonic() < deadline, f"discovery does not tell of {kinds - _discovered(bare_api)}"
        time.sleep(0.05)
    return {crd["metadata"]["name"]: bare_api.get_object(crd) for crd in crds}


@pytest.fixture(scope="package")
def api(bare_api: ApiServer, installed_crds: dict[str, dict[str, Any]]) -> ApiServer:
    """The apiserver with all kinds served."""
    assert installed_crds
    return bare_api


def _served(server: ApiServer, crd: dict[str, Any]) -> bool:
    return _is_there(server, f"/namespaces/default/{crd['spec']['names']['plural']}") is not None


def _discovered(server: ApiServer) -> set[str]:
    return {resource["name"] for resource in (_is_there(server, "") or {}).get("resources", ())}


def _is_there(server: ApiServer, path: str) -> dict[str, Any] | None:
    """Return what the API server has at a path of the group; None while it serves nothing there yet."""
    try:
        return server.get(f"/apis/{GROUP}/{VERSION}{path}")
    except RefusedError as error:
        if error.status not in (404, 429, 503):
            raise
        return None
