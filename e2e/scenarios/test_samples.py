"""Samples that the demo does not apply: each is ready as it is, beside the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.product.install import DEMO_NAMESPACE, SAMPLES
from e2e.product.kubectl import Kubectl
from kvstrata.api.base import GROUP

pytestmark = pytest.mark.cluster

EXTRA = sorted((SAMPLES / "extra").glob("*.yaml"))
READY_WITHIN_S = 600


@pytest.mark.parametrize("path", EXTRA, ids=lambda path: path.stem)
def test_a_sample_is_ready_as_it_is(kubectl: Kubectl, path: Path) -> None:
    created = kubectl.run("create", "-f", str(path), "-o", "name").split()
    try:
        own = [name for name in created if f".{GROUP}/" in name]
        assert own
        for name in own:
            kubectl.run(
                "-n", DEMO_NAMESPACE, "wait", name, "--for=condition=Ready", f"--timeout={READY_WITHIN_S}s",
                timeout_s=2 * READY_WITHIN_S,
            )  # fmt: skip
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", *created, "--ignore-not-found")
