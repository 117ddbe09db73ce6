"""Isolation is probed on pods that run: with an engine, its cache server and every tier of the demo's model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.product.chapters import MODEL
from e2e.product.install import DEMO_NAMESPACE, unsettled
from e2e.product.kubectl import Kubectl, wait_until

pytestmark = pytest.mark.cluster

SHOWN_WITHIN_S = 180.0
"""Each pod computes four short prompts, on a machine with other work."""


def test_every_pod_shows_in_every_tier_that_scopes_find_their_own_blocks_only(kubectl: Kubectl) -> None:
    wait_until("everything is at rest", lambda: not unsettled(kubectl), SHOWN_WITHIN_S)
    pods = kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/model={MODEL}")
    with probed(kubectl, {"mode": "Scheduled", "interval": "10s"}):
        shown = wait_until("isolation is shown", lambda: verified(kubectl, "IsolationShown"), SHOWN_WITHIN_S)
        print(shown["message"])
        assert shown["status"] == "True"
        probe = kubectl.get("cachedmodel", MODEL, DEMO_NAMESPACE)["status"]["probe"]
        assert probe["pods"] == len(pods)
        assert probe["lookups"] >= 2 * len(pods)
        assert probe["controls"] >= 2 * len(pods)
        for tier in ("cpu", "shared"):
            assert tier in shown["message"]


def verified(kubectl: Kubectl, reason: str) -> dict[str, Any] | None:
    """The condition IsolationVerified of the model once it has a reason."""
    found = _judged(kubectl)
    return found if found.get("reason") == reason else None


def _judged(kubectl: Kubectl) -> dict[str, Any]:
    return kubectl.condition("cachedmodel", MODEL, DEMO_NAMESPACE, "IsolationVerified")


@contextmanager
def probed(kubectl: Kubectl, probe: dict[str, str]) -> Iterator[None]:
    """Have the model probed while the block runs."""
    try:
        _patch(kubectl, probe)
        yield
    finally:
        _patch(kubectl, {"mode": "Never"})
        wait_until("it is probed no more", lambda: not _judged(kubectl), SHOWN_WITHIN_S)


def _patch(kubectl: Kubectl, probe: dict[str, str]) -> None:
    patch = json.dumps({"spec": {"probe": probe}})
    kubectl.run("-n", DEMO_NAMESPACE, "patch", "cachedmodel", MODEL, "--type", "merge", "-p", patch)
