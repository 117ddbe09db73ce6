"""Redis tiers that someone else runs: a wrong password has a name, and the right one heals without a restart."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until

pytestmark = pytest.mark.cluster

TIER = "elsewhere"
SECRET = "elsewhere-auth"
AUTHORITY = "elsewhere-ca"


@pytest.fixture
def external_tier(kubectl: Kubectl) -> Iterator[str]:
    """An external tier whose server is the demo's own, with a password that is wrong."""
    authority = kubectl.get("secret", "kvs-shared-redis-tls", DEMO_NAMESPACE)["data"]["ca.crt"]
    kubectl.apply(_secret(AUTHORITY, {"ca.crt": base64.b64decode(authority)}), _password(b"wrong"), _tier())
    yield TIER
    kubectl.run("-n", DEMO_NAMESPACE, "delete", "cachetier", TIER, "--ignore-not-found")
    kubectl.run("-n", DEMO_NAMESPACE, "delete", "secret", SECRET, AUTHORITY, "--ignore-not-found")


def test_a_wrong_password_is_named_and_the_right_one_heals(kubectl: Kubectl, external_tier: str) -> None:
    wait_until("the tier says WrongPassword", lambda: _reason(kubectl, external_tier) == "WrongPassword", 30)
    ready = kubectl.condition("cachetier", external_tier, DEMO_NAMESPACE, "Ready")
    assert ready["status"] == "False"
    assert "password" in ready["message"]
    assert "wrong" not in ready["message"].split()
    right = kubectl.get("secret", "kvs-shared-redis-auth", DEMO_NAMESPACE)["data"]["password"]
    kubectl.apply(_password(base64.b64decode(right)))
    wait_until("the tier is reachable", lambda: _reason(kubectl, external_tier) == "Reachable", 30)
    wait_until("the tier is ready", lambda: _ready(kubectl, external_tier), 10)


def test_a_tier_for_some_classifications_only_is_stalled_and_gets_no_server(kubectl: Kubectl) -> None:
    spec = {"medium": "Redis", "capacity": "10Mi", "redis": {"managed": {}}, "allowedClassifications": ["Public"]}
    kubectl.apply(_object("CacheTier", "sealed", spec))
    try:
        wait_until("the tier is stalled", lambda: _stalled(kubectl, "sealed") == "ClassificationNotReconciled", 30)
        names = [item["metadata"]["name"] for item in kubectl.list("statefulset", DEMO_NAMESPACE)]
        assert "kvs-sealed-redis" not in names
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "cachetier", "sealed")


def _tier() -> dict[str, Any]:
    external = {
        "endpoints": [f"kvs-shared-redis.{DEMO_NAMESPACE}.svc:6379"],
        "tls": {"caSecretRef": {"name": AUTHORITY, "key": "ca.crt"}},
        "authSecretRef": {"name": SECRET},
    }
    spec = {"medium": "Redis", "capacity": "10Mi", "encryption": "Disabled", "redis": {"external": external}}
    return _object("CacheTier", TIER, spec)


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": DEMO_NAMESPACE},
        "spec": spec,
    }


def _password(value: bytes) -> dict[str, Any]:
    return _secret(SECRET, {"password": value})


def _secret(name: str, values: dict[str, bytes]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": DEMO_NAMESPACE},
        "data": {key: base64.b64encode(value).decode() for key, value in values.items()},
    }


def _reason(kubectl: Kubectl, tier: str) -> str:
    return str(kubectl.condition("cachetier", tier, DEMO_NAMESPACE, "BackendReachable").get("reason", ""))


def _ready(kubectl: Kubectl, tier: str) -> bool:
    return bool(kubectl.condition("cachetier", tier, DEMO_NAMESPACE, "Ready").get("status") == "True")


def _stalled(kubectl: Kubectl, tier: str) -> str:
    found = kubectl.condition("cachetier", tier, DEMO_NAMESPACE, "Stalled")
    return str(found.get("reason", "")) if found.get("status") == "True" else ""
