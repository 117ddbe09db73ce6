"""First mistakes on a real node: each ends in a sentence with the cause, the place and the remedy.

One small model at a time, with one mistake, removed afterwards. `tests/apiserver/test_first_mistakes.py`,
`tests/api/test_wrong_manifests.py` and `tests/gate/test_serving.py` have those that need no node.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.product.chapters import MODEL
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import LIMIT_S, Kubectl, wait_until

pytestmark = pytest.mark.cluster

NAME = "mistaken"
ELSEWHERE = "first-mistakes"
_CALL = (
    "import socket,sys\n"
    "try: socket.create_connection((sys.argv[1], 443), 30).close(); print('connected')\n"
    "except TimeoutError: print('no answer')"
)


@pytest.fixture
def spec(kubectl: Kubectl) -> dict[str, Any]:
    """The spec of a model of one small replica without tiers, after the demo's."""
    made: dict[str, Any] = copy.deepcopy(kubectl.get("cachedmodel", MODEL, DEMO_NAMESPACE)["spec"])
    made["tiers"] = []
    for unwanted in ("probe", "reuse"):
        made.pop(unwanted, None)
    made["engine"] |= {"replicas": 1, "resources": {"requests": {"cpu": "20m", "memory": "128Mi"}}}
    made["cacheServer"] |= {"resources": {"requests": {"cpu": "20m", "memory": "128Mi"}}}
    return made


@pytest.fixture(autouse=True)
def removed(kubectl: Kubectl) -> Iterator[None]:
    """Remove the model of a test with its pods, and its tier."""
    yield
    for kind in ("cachedmodel", "cachetier"):
        kubectl.run("-n", DEMO_NAMESPACE, "delete", kind, NAME, "--ignore-not-found")
    kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", "-l", f"kvstrata.io/model={NAME}", "--grace-period=1")


@pytest.mark.claim("a wrong image is named with the remedy")
def test_a_wrong_image_is_named_with_the_remedy(kubectl: Kubectl, spec: dict[str, Any]) -> None:
    image = "localhost:1/no-such-engine:typo"
    spec["engine"] |= {"image": image, "podTemplate": {"imagePullPolicy": "IfNotPresent"}}
    message = _not_ready(kubectl, spec, "ImageNotPulled")
    assert f"the image {image} of container engine cannot be pulled: " in message
    assert "check its name and tag, whether nodes reach the registry, and imagePullSecrets" in message


def test_an_engine_flag_that_does_not_exist_is_quoted_from_the_engines_log(
    kubectl: Kubectl, spec: dict[str, Any]
) -> None:
    spec["engine"]["args"] = ["--no-such-flag"]
    message = _not_ready(kubectl, spec, "ContainerExits")
    assert "container engine ends again and again, with Error, exit code 2: " in message
    assert "unrecognized arguments: --no-such-flag; correct engine.args of its CachedModel" in message


def test_a_tier_larger_than_every_node_is_named_with_its_size(kubectl: Kubectl, spec: dict[str, Any]) -> None:
    kubectl.apply(_object("CacheTier", {"medium": "CPU", "capacityPerPod": "2Ti"}))
    spec["tiers"] = [{"name": NAME}]
    spec["cacheServer"].pop("resources")
    message = _not_ready(kubectl, spec, "Unschedulable")
    assert "Insufficient memory" in message
    assert re.search(
        rf"A pod asks for \w+ of memory, 2Ti of that for CacheTier {NAME}: lower its capacityPerPod", message
    )


def test_a_token_of_a_hub_whose_secret_does_not_exist_is_named(kubectl: Kubectl, spec: dict[str, Any]) -> None:
    token = {"name": "no-such-token", "key": "token"}
    spec["model"]["source"] = {"hub": {"repository": "example/model", "tokenSecretRef": token}}
    message = _not_ready(kubectl, spec, "SecretNotFound")
    assert "Secret no-such-token of its volume hub-token does not exist: create it, or correct its name" in message


def test_an_api_key_secret_that_does_not_exist_is_named(kubectl: Kubectl, spec: dict[str, Any]) -> None:
    spec["gate"]["authentication"]["apiKeys"]["secretRef"]["name"] = "no-such-keys"
    message = _not_ready(kubectl, spec, "PodsReportProblem")
    assert "the API-key Secret no-such-keys does not exist: `kubectl kvstrata keys add` makes it" in message


@pytest.fixture(scope="module")
def elsewhere(kubectl: Kubectl) -> Iterator[str]:
    """A namespace that no operator serves."""
    kubectl.run("create", "namespace", ELSEWHERE)
    yield ELSEWHERE
    kubectl.run("delete", "namespace", ELSEWHERE, "--wait=false")


@pytest.mark.claim("a namespace that is not served is named with the command that adds it")
def test_an_object_in_a_namespace_that_is_not_served_is_created_with_a_warning(
    kubectl: Kubectl, elsewhere: str
) -> None:
    tier = _object("CacheTier", {"medium": "CPU", "capacityPerPod": "1Gi"}, elsewhere)
    done = subprocess.run(
        ["kubectl", "apply", "-f", "-"],
        input=json.dumps(tier), env=kubectl.environment, capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert f"does not serve namespace {elsewhere}" in done.stderr
    assert re.search(r"helm upgrade \S+ .*watchNamespaces=\{.*" + elsewhere + r"\}", done.stderr), done.stderr


def test_a_caller_in_another_namespace_gets_no_answer_and_one_beside_the_model_does(
    kubectl: Kubectl, elsewhere: str
) -> None:
    answers = {where: _call(kubectl, where) for where in (DEMO_NAMESPACE, elsewhere)}
    assert answers == {DEMO_NAMESPACE: "connected", elsewhere: "no answer"}


def _not_ready(kubectl: Kubectl, spec: dict[str, Any], reason: str) -> str:
    """Apply the model and wait until it is not Ready for `reason`; return the condition's message."""
    kubectl.apply(_object("CachedModel", spec))

    def message() -> str:
        status = kubectl.get("cachedmodel", NAME, DEMO_NAMESPACE).get("status") or {}
        ready = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), {})
        return str(ready["message"]) if ready.get("reason") == reason else ""

    return str(wait_until(f"the model reports {reason}", message))


def _call(kubectl: Kubectl, namespace: str) -> str:
    """Let a pod of a namespace connect to the demo's model."""
    pods = kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/model={MODEL}")
    image = pods[0]["spec"]["initContainers"][0]["image"]
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", _CALL, f"kvs-{MODEL}.{DEMO_NAMESPACE}.svc"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    rest = {"restartPolicy": "Never", "automountServiceAccountToken": False, "securityContext": security}
    metadata = {"name": "asks", "namespace": namespace}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container], **rest}}
    )
    try:
        kubectl.run("-n", namespace, "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/asks", "--timeout=240s")
        return kubectl.run("-n", namespace, "logs", "asks").strip()
    finally:
        kubectl.run("-n", namespace, "delete", "pod", "asks", "--grace-period=1")


def _object(kind: str, spec: dict[str, Any], namespace: str = DEMO_NAMESPACE) -> dict[str, Any]:
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": NAME, "namespace": namespace},
        "spec": spec,
    }
