"""Redis tiers that someone else runs: a wrong password has a name, and the right one heals without a restart."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from tests.tiers.certificates import Authority

pytestmark = pytest.mark.cluster

TIER = "elsewhere"
HOST = f"{TIER}.{DEMO_NAMESPACE}.svc"
PORT = 6379
SECRET = "elsewhere-auth"
AUTHORITY = "elsewhere-ca"
SERVER_TLS = "elsewhere-tls"
RIGHT = b"let-me-in"
CAPACITY_BYTES = 16 << 20


@pytest.fixture
def external_tier(kubectl: Kubectl, tmp_path: Path) -> Iterator[str]:
    """An external tier on a server of its own, with a password that is wrong."""
    files = Authority(tmp_path).issue(HOST)
    pair = {"tls.crt": files.certificate.read_bytes(), "tls.key": files.key.read_bytes()}
    managed = kubectl.get("statefulset", "kvs-shared-redis-0", DEMO_NAMESPACE)["spec"]["template"]["spec"]
    try:
        kubectl.apply(_secret(SERVER_TLS, pair), _server(managed["containers"][0]), _service())
        kubectl.run("-n", DEMO_NAMESPACE, "wait", "--for=condition=Ready", f"pod/{TIER}", "--timeout=240s")
        kubectl.apply(_secret(AUTHORITY, {"ca.crt": files.ca.read_bytes()}), _password(b"wrong"), _tier())
        yield TIER
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "cachetier", TIER, "--ignore-not-found")
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod,service", TIER, "--ignore-not-found", "--now")
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "secret", SECRET, AUTHORITY, SERVER_TLS, "--ignore-not-found")


def test_a_wrong_password_is_named_and_the_right_one_heals(kubectl: Kubectl, external_tier: str) -> None:
    def refused() -> dict[str, Any] | None:
        """The condition Ready of a status that reports WrongPassword."""
        status = kubectl.get("cachetier", external_tier, DEMO_NAMESPACE).get("status") or {}
        conditions = {one["type"]: one for one in status.get("conditions") or ()}
        wrong = conditions.get("BackendReachable", {}).get("reason") == "WrongPassword"
        return conditions.get("Ready") if wrong else None

    ready = wait_until("the tier reports WrongPassword", refused)
    assert ready["status"] == "False"
    assert "password" in ready["message"]
    assert "wrong" not in ready["message"].split()
    kubectl.apply(_password(RIGHT))
    wait_until("the tier is reachable", lambda: _reason(kubectl, external_tier) == "Reachable")
    wait_until("the tier is ready", lambda: _ready(kubectl, external_tier))


def test_a_tier_that_names_the_operators_secret_is_refused_when_it_is_applied(kubectl: Kubectl) -> None:
    servers = {"managed": {"tls": {"mode": "Secret", "secretRef": {"name": "kvs-ca"}}}}
    refusal = kubectl.refused(_object("CacheTier", "sealed", {"medium": "Redis", "capacity": "16Mi", "redis": servers}))
    assert "spec.redis.managed.tls.secretRef.name" in refusal
    assert "belong to the operator: name another Secret" in refusal


def _tier() -> dict[str, Any]:
    external = {
        "endpoints": [f"{HOST}:{PORT}"],
        "tls": {"caSecretRef": {"name": AUTHORITY, "key": "ca.crt"}},
        "authSecretRef": {"name": SECRET},
    }
    spec = {
        "medium": "Redis",
        "capacity": str(CAPACITY_BYTES),
        "encryption": "Disabled",
        "redis": {"external": external},
    }
    return _object("CacheTier", TIER, spec)


def _server(managed: dict[str, Any]) -> dict[str, Any]:
    """A Redis that the operator knows nothing of, of the same image as the demo's."""
    arguments = ["--port", "0", "--tls-port", str(PORT), "--tls-auth-clients", "no", "--requirepass", RIGHT.decode()]
    arguments += ["--tls-cert-file", "/tls/tls.crt", "--tls-key-file", "/tls/tls.key", "--save", "", "--dir", "/tmp"]
    arguments += ["--tls-ca-cert-file", "/tls/tls.crt", "--maxmemory", str(CAPACITY_BYTES)]
    container = {
        "name": "redis",
        "image": managed["image"],
        "imagePullPolicy": managed["imagePullPolicy"],
        "command": ["redis-server"],
        "args": arguments,
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": managed["securityContext"],
        "volumeMounts": [{"name": "tls", "mountPath": "/tls", "readOnly": True}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": TIER, "namespace": DEMO_NAMESPACE, "labels": {"app": TIER}},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "fsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "tls", "secret": {"secretName": SERVER_TLS}}, {"name": "tmp", "emptyDir": {}}],
        },
    }


def _service() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": TIER, "namespace": DEMO_NAMESPACE},
        "spec": {"selector": {"app": TIER}, "ports": [{"port": PORT}]},
    }


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
