"""Access control: callers without a key, pods beside the model, and the restricted Pod Security Standard."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest

from e2e.product.chapters import MODEL, Stage
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import CommandError, Kubectl, wait_until
from e2e.product.prompts import fresh_prompt
from e2e.product.shared_tier import SERVER

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.claim(
        "a caller without a key, a pod beside the model and a pod's token reach nothing that is not theirs"
    ),
]

STRANGER = "stranger"
_CONNECT = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"


@pytest.fixture(scope="module")
def stranger(kubectl: Kubectl) -> Iterator[str]:
    """A pod of the same namespace that belongs to no model."""
    image = kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/model={MODEL}")[0]["spec"]["initContainers"][0]["image"]
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"],
        "securityContext": security,
    }
    pod_security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": STRANGER, "namespace": DEMO_NAMESPACE},
            "spec": {
                "containers": [container],
                "securityContext": pod_security,
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": False,
            },
        }
    )
    kubectl.run("-n", DEMO_NAMESPACE, "wait", "--for=condition=Ready", f"pod/{STRANGER}", "--timeout=240s")
    yield STRANGER
    kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", STRANGER, "--wait=false")


def test_a_caller_without_a_key_or_with_a_wrong_one_is_refused(stage: Stage) -> None:
    body = json.dumps({"model": MODEL, "prompt": fresh_prompt(), "max_tokens": 1}).encode()
    for key in (None, "no-such-key"):
        answer = stage.first.post("/v1/completions", body, key)
        assert answer.status == 401
        assert answer.error


def test_a_pod_beside_the_model_reaches_its_callers_port_and_no_other(kubectl: Kubectl, stranger: str) -> None:
    address = kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/model={MODEL}")[0]["status"]["podIP"]
    wait_until("the callers' port is open", lambda: _reaches(kubectl, stranger, address, 8443))
    assert not _reaches(kubectl, stranger, address, 9443)
    assert not _reaches(kubectl, stranger, address, 5555)


def test_a_pod_beside_the_model_does_not_reach_its_redis(kubectl: Kubectl, stranger: str) -> None:
    address = kubectl.get("pod", SERVER, DEMO_NAMESPACE)["status"]["podIP"]
    assert not _reaches(kubectl, stranger, address, 6379)


def test_the_demo_runs_under_the_restricted_pod_security_standard(kubectl: Kubectl) -> None:
    labels = json.loads(kubectl.run("get", "namespace", DEMO_NAMESPACE, "-o", "json"))["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_a_pods_token_reads_its_own_bundle_and_nothing_else(kubectl: Kubectl) -> None:
    account = f"--as=system:serviceaccount:{DEMO_NAMESPACE}:kvs-{MODEL}"

    def may(*question: str) -> bool:
        try:
            return kubectl.run("-n", DEMO_NAMESPACE, "auth", "can-i", *question, account).strip() == "yes"
        except CommandError:
            return False

    assert may("get", f"secret/kvs-{MODEL}-bundle")
    assert not may("get", "secret/kvstrata-domain")
    assert not may("list", "secrets")
    assert not may("update", f"secret/kvs-{MODEL}-bundle")
    assert not may("get", "tenantcachepolicies")


def test_no_secret_is_in_arguments_environment_or_status(kubectl: Kubectl) -> None:
    values = {
        base64.b64decode(text)
        for name in ("kvstrata-domain", "kvs-shared-redis-auth")
        for key, text in kubectl.get("secret", name, DEMO_NAMESPACE)["data"].items()
        if key != "users.acl"
    }
    pods = json.dumps(kubectl.list("pod", DEMO_NAMESPACE))
    own = "cachedomains,cachetiers,cachedmodels,tenantcachepolicies,tenantgroups,cacheinvalidations"
    shown = pods + kubectl.run("-n", DEMO_NAMESPACE, "get", own, "-o", "json")
    logs = kubectl.run("-n", DEMO_NAMESPACE, "logs", "-l", f"kvstrata.io/model={MODEL}", "-c", "gate", "--tail=-1")
    operator = kubectl.run("-n", "kvstrata-system", "logs", "deploy/kvstrata", "--all-pods=true", "--tail=-1")
    for value in values:
        for text in (shown, logs, operator):
            assert value.decode("latin-1") not in text
            assert base64.b64encode(value).decode() not in text
            assert value.hex() not in text


def _reaches(kubectl: Kubectl, pod: str, address: str, port: int) -> bool:
    try:
        kubectl.exec(pod, DEMO_NAMESPACE, "main", "python3", "-S", "-c", _CONNECT, address, str(port))
    except CommandError:
        return False
    return True
