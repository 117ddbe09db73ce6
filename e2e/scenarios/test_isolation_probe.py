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

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.claim("in every tier and in the engine, scopes find their own blocks only"),
]


def test_every_pod_shows_in_every_tier_that_scopes_find_their_own_blocks_only(kubectl: Kubectl) -> None:
    wait_until("everything is at rest", lambda: not unsettled(kubectl))
    pods = kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/model={MODEL}")
    with probed(kubectl, {"mode": "Scheduled", "interval": "10s"}):
        wait_until("isolation is shown", lambda: verified(kubectl, "IsolationShown"))
        # Pods keep their last result, so the first may be one of an earlier time.
        earlier = _results(kubectl)["time"]
        wait_until("a pod is probed again", lambda: _results(kubectl).get("time", earlier) != earlier)
        wait_until("every pod is", lambda: _results(kubectl).get("pods") == len(pods))
        shown, probe = wait_until("it is shown again", lambda: verified(kubectl, "IsolationShown")), _results(kubectl)
        print(shown["message"])
        assert shown["status"] == "True"
        assert probe["pods"] == len(pods)
        assert probe["lookups"] >= 2 * len(pods)
        assert probe["controls"] >= 2 * len(pods)
        for tier in ("Engine", "cpu", "shared"):
            assert tier in shown["message"]


def _results(kubectl: Kubectl) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.get("cachedmodel", MODEL, DEMO_NAMESPACE)["status"].get("probe") or {}
    return found


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
        wait_until("it is probed no more", lambda: not _judged(kubectl))


def _patch(kubectl: Kubectl, probe: dict[str, str]) -> None:
    patch = json.dumps({"spec": {"probe": probe}})
    kubectl.run("-n", DEMO_NAMESPACE, "patch", "cachedmodel", MODEL, "--type", "merge", "-p", patch)
