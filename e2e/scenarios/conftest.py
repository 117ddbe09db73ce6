"""The running product that the scenarios share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.settings import Paths
from e2e.product.api_reader import ApiReader
from e2e.product.chapters import Stage, open_stage
from e2e.product.direct import pods_run_here
from e2e.product.direct_stage import open_direct_stage
from e2e.product.kubectl import Kubectl


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give stories the time in which they give up by themselves: some wait for several rollouts of engines."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(2400))


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    """kubectl on the cluster in use; `make test` brings it up and installs the product."""
    found = Kubectl(reader=ApiReader(Paths().kubeconfig))
    if not found.kubeconfig.exists():
        pytest.fail("no cluster is up: `make demo` or `make test` brings one up with the product installed")
    return found


@pytest.fixture(scope="module")
def stage(kubectl: Kubectl) -> Iterator[Stage]:
    """Two replicas of the demo's model."""
    with open_stage(kubectl, print) as opened:
        yield opened


@pytest.fixture(scope="module")
def near(kubectl: Kubectl) -> Iterator[Stage]:
    """Two replicas of the model, reached without the API server."""
    if not pods_run_here():
        pytest.skip("the parts of another cluster than the local one cannot be killed and frozen from here")
    with open_direct_stage(kubectl, print) as stage:
        yield stage
