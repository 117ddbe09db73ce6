"""A real apiserver takes every golden object, and gives back all that was asked for, unchanged.

The second half is what lets the operator skip a write: were a single field stored in another form, it would write the
object on every pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config

from e2e.cluster.control_plane import ControlPlane
from tests.golden.objects.cases import CASES, render

pytestmark = pytest.mark.apiserver

PLURALS = {
    "Deployment": "deployments",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "StatefulSet": "statefulsets",
}


FOLDER = "node-folder"
"""The case with a volume that the restricted Pod Security Standard does not know."""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[client.ApiClient]:
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as plane:
        connection = config.new_client_from_config(str(plane.kubeconfig))
        for namespace, level in (("demo", "restricted"), ("prod", "restricted"), ("disks", "privileged")):
            labels = {"pod-security.kubernetes.io/enforce": level}
            _call(
                connection,
                "POST",
                "/api/v1/namespaces",
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}},
            )
        yield connection
        connection.close()


@pytest.mark.parametrize("case", CASES)
def test_the_apiserver_stores_what_was_rendered(api: client.ApiClient, case: str) -> None:
    for built in render(case):
        if built["kind"] not in PLURALS:
            continue
        live = _apply(api, built)
        assert not list(_differences(built, live)), f"{built['kind']} is stored in another form"
        again = _apply(api, built)
        assert again["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"], "applying again wrote"


@pytest.mark.parametrize("case", [case for case in CASES if case != FOLDER])
def test_the_restricted_standard_admits_the_pods(api: client.ApiClient, case: str) -> None:
    _create_pods(api, case, "demo")


def test_a_folder_of_the_node_needs_a_privileged_namespace(api: client.ApiClient) -> None:
    _create_pods(api, FOLDER, "disks")
    with pytest.raises(AssertionError, match=r"restricted volume types .*nvme-disks"):
        _create_pods(api, FOLDER, "demo")


def _create_pods(api: client.ApiClient, case: str, namespace: str) -> None:
    """Create the pods of a case in a namespace, as a trial. Raises AssertionError with the API server's words."""
    for built in render(case):
        if built["kind"] not in ("Deployment", "StatefulSet"):
            continue
        template = built["spec"]["template"]
        spec = {**template["spec"], "serviceAccountName": "default"}
        spec.pop("priorityClassName", None)
        spec.pop("runtimeClassName", None)
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        _call(api, "POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account, may_exist=True)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": "pod"}, "spec": spec}
        stored = _call(api, "POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
        assert stored["metadata"]["name"] == "pod"


def _apply(api: client.ApiClient, built: dict[str, Any]) -> dict[str, Any]:
    version, metadata = built["apiVersion"], built["metadata"]
    group = f"/apis/{version}" if "/" in version else f"/api/{version}"
    path = f"{group}/namespaces/{metadata['namespace']}/{PLURALS[built['kind']]}/{metadata['name']}"
    query = "?fieldManager=kvstrata-test&force=true&fieldValidation=Strict"
    return _call(api, "PATCH", path + query, built, content="application/apply-patch+yaml")


def _call(
    api: Any, method: str, path: str, body: Any, *, content: str = "application/json", may_exist: bool = False
) -> dict[str, Any]:
    response = api.call_api(
        method,
        f"{api.configuration.host}{path}",
        header_params={"Accept": "application/json", "Content-Type": content},
        body=body,
        _request_timeout=20,
    )
    answer: dict[str, Any] = json.loads(response.read())
    assert response.status < 300 or (may_exist and response.status == 409), answer.get("message")
    return answer


def _differences(wanted: Any, live: Any, path: str = "") -> Iterator[str]:
    """Name every place where `live` does not hold what is wanted; what it holds besides does not matter."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        for key, value in wanted.items():
            if key in live:
                yield from _differences(value, live[key], f"{path}.{key}")
            else:
                yield f"{path}.{key} is missing"
    elif isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        for index, (one, other) in enumerate(zip(wanted, live, strict=True)):
            yield from _differences(one, other, f"{path}[{index}]")
    elif wanted != live or type(wanted) is not type(live):
        yield f"{path}: wanted {wanted!r}, live {live!r}"
