"""Data keys that a service wraps, from the CacheDomain's field to a receipt with the service's word: a real API server,
to which a real OpenBao turns to know the operator, operator and gate processes, the adapter, a Redis."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from kvstrata.contract.policy.data_key import KEYS_DIRECTORY
from tests.apiserver.test_erasures import OPERATOR_NAMESPACE, Place
from tests.apiserver.test_erasures import place as place
from tests.custody.bao_server import MOUNT, BaoServer
from tests.support.objects import NAMESPACE, invalidation, own
from tests.support.redis_binary import needs_redis

pytestmark = needs_redis

AUDIENCE = "kvstrata-kms"


@pytest.fixture
def bao(tmp_path: Path) -> Iterator[BaoServer]:
    directory = tmp_path / "bao"
    directory.mkdir()
    server = BaoServer(directory)
    yield server
    server.stop()


def at_hand(place: Place) -> str:
    """Whether the operator has every key."""
    conditions = place.get("cachedomains", "default").get("status", {}).get("conditions", ())
    return next((one["status"] for one in conditions if one["type"] == "KeysAtHand"), "")


def keys_in(place: Place, number: int) -> set[bytes]:
    """The keys in a pod's memory volume."""
    directory = place.pods[number].directory / "policy" / KEYS_DIRECTORY
    return {path.read_bytes() for path in directory.glob("*.*") if not path.name.startswith(".")}


def token(place: Place, account: str, *audiences: str) -> str:
    """A token of a service account in the operator's namespace."""
    path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/serviceaccounts/{account}/token"
    spec = {"audiences": list(audiences), "expirationSeconds": 3600}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    return str(place.request("POST", path, body, {})["status"]["token"])


def acquaint(place: Place, bao: BaoServer) -> None:
    """Have the service ask the API server who the operator is, and let the operator be what the guide says."""
    for account in ("kvstrata", "openbao"):
        metadata = {"name": account, "namespace": OPERATOR_NAMESPACE}
        place.server.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    reviewer: dict[str, Any] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "openbao-reviews-tokens"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "system:auth-delegator",
        },
        "subjects": [{"kind": "ServiceAccount", "name": "openbao", "namespace": OPERATOR_NAMESPACE}],
    }
    place.server.apply(reviewer)
    cluster = yaml.safe_load(place.operators.kubeconfig.read_text())["clusters"][0]["cluster"]
    host = urlsplit(cluster["server"])
    bao.admin("POST", "sys/auth/kubernetes", {"type": "kubernetes"})
    bao.admin(
        "POST",
        "auth/kubernetes/config",
        {
            "kubernetes_host": f"https://{host.hostname}:{host.port}",
            "kubernetes_ca_cert": base64.b64decode(cluster["certificate-authority-data"]).decode(),
            "token_reviewer_jwt": token(place, "openbao"),
            "disable_local_ca_jwt": True,
        },
    )
    bao.admin(
        "POST",
        "auth/kubernetes/role/kvstrata",
        {
            "bound_service_account_names": ["kvstrata"],
            "bound_service_account_namespaces": [OPERATOR_NAMESPACE],
            "audience": AUDIENCE,
            "token_policies": ["kvstrata"],
            "token_ttl": "1h",
        },
    )


def secrets(place: Place) -> list[str]:
    """Secrets in the operator's namespace."""
    listed = place.request("GET", f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets", None, {})
    return [item["metadata"]["name"] for item in listed["items"]]


def test_keys_are_unwrapped_for_the_next_operator_without_a_pod_s_help_and_end_by_the_service_s_word(
    place: Place, bao: BaoServer, tmp_path: Path
) -> None:
    acquaint(place, bao)
    (tmp_path / "kms-token").write_text(token(place, "kvstrata", AUDIENCE))
    kms = {"address": bao.address, "mount": MOUNT, "role": "kvstrata"}
    place.server.apply(own("CacheDomain", "default", {"keyCustody": "KMS", "kms": kms}))
    way = {
        "KVSTRATA_KMS_ADDRESSES": json.dumps([{"address": bao.address, "authority": bao.authority_pem.decode()}]),
        "KVSTRATA_KMS_TOKEN_FILE": str(tmp_path / "kms-token"),
    }
    first = place.operators.start("operator-a", **way)
    first.wait_until_leading()
    place.wait(
        "what pods need", lambda: place.has("secrets/kvs-tiny-gate-tls") and place.has("serviceaccounts/kvs-tiny")
    )
    domain = place.wait("the domain's id", lambda: place.get("cachedomains", "default")["status"].get("domainID"))
    place.pods[0].start(domain, place.redis.port, place.plain.port)
    place.wait("policies in force", lambda: place.enforced("acme") and place.enforced("globex"))
    place.wait("keys in the pod", lambda: len(keys_in(place, 0)) == 2)
    place.wait("the operator to have them all", lambda: at_hand(place) == "True")
    keys = keys_in(place, 0)
    leaving, staying = place.keyspace("acme"), place.keyspace("globex")
    place.pods[0].store(leaving, 1)
    place.pods[0].store(staying, 9)
    assert sum(place.copies(key) for key in keys) == 0

    first.kill()
    place.operators.start("operator-b", **way).wait_until_leading()
    place.wait("keys to be unwrapped", lambda: at_hand(place) == "True")
    place.pods[1].start(domain, place.redis.port, place.plain.port)
    place.wait("keys in the other pod", lambda: keys_in(place, 1) == keys)
    place.wait("blocks that the first pod stored", lambda: place.pods[1].finds(staying, 9) == [1])

    place.server.apply(invalidation("leave", scope={"tenant": "acme"}, mode="Eager"))
    place.wait("the end", lambda: place.status.get("phase") in ("Complete", "Failed"))
    assert place.status["phase"] == "Complete", place.tails()
    assert place.holds() >= {"KeysRevoked", "KeysDestroyed", "Erased", "Verified", "Complete"}, place.tails()
    (receipt,) = (data["receipt.json"] for name, data in place.config_maps().items() if "kvstrata-receipt-" in name)
    assert '"transit:' in receipt
    assert sum(place.copies(key) for key in keys) == 0

    assert any(domain in name for name in bao.key_names())
    place.server.kubectl("-n", NAMESPACE, "delete", "cachedomain", "default")
    place.wait("the service to have nothing of it", lambda: not any(domain in name for name in bao.key_names()))
    place.wait("the notes to go", lambda: not any(domain in name for name in secrets(place)))
