"""What the tests of the API need of a real apiserver: write an object, or learn exactly why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kubernetes import config

from kvstrata.api import KINDS
from kvstrata.api.base import GROUP, VERSION

PLURALS = {kind.INFO.kind: kind.INFO.plural for kind in KINDS}
CORE_PATHS = {
    "Namespace": "/api/v1/namespaces",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments",
}
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason of a refusal: the field and the sentence, as the apiserver gives them."""

    field: str
    message: str


class RefusedError(Exception):
    """The apiserver refused an object."""

    def __init__(self, status: int, message: str, causes: tuple[Cause, ...]) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.causes = causes


class ApiServer:
    """Administrator's access to one control plane."""

    def __init__(self, kubeconfig: Path) -> None:
        self._client: Any = config.new_client_from_config(str(kubeconfig))

    def create(self, obj: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create an object, strictly: unknown fields are an error, as they are for kubectl."""
        return self._call("POST", _collection(obj), obj, {"dryRun": "All"} if dry_run else {})

    def merge_patch(self, obj: Mapping[str, Any], patch: Mapping[str, Any], subresource: str = "") -> dict[str, Any]:
        """Change fields of an object, or of a subresource (``/status``, ``/scale``)."""
        content = {"Content-Type": "application/merge-patch+json"}
        return self._call("PATCH", _path(obj) + subresource, patch, {}, content)

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """GET a path."""
        return self._call("GET", path, None, query)

    def get_object(self, obj: Mapping[str, Any], subresource: str = "") -> dict[str, Any]:
        """GET an object or a subresource of it."""
        return self.get(_path(obj) + subresource)

    def columns(self, plural: str, namespace: str) -> dict[str, dict[str, Any]]:
        """What `kubectl get -o wide` shows of a kind: cells by column, by object name."""
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{plural}"
        accept = {"Accept": "application/json;as=Table;g=meta.k8s.io;v=v1"}
        table = self._call("GET", path, None, {}, accept)
        headings = [column["name"] for column in table["columnDefinitions"]]
        rows = [dict(zip(headings, row["cells"], strict=True)) for row in table["rows"]]
        return {row["Name"]: row for row in rows}

    def delete(self, obj: Mapping[str, Any]) -> None:
        """Delete an object."""
        self.delete_path(_path(obj))

    def delete_path(self, path: str) -> None:
        """DELETE a path."""
        self._call("DELETE", path, None, {})

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        parameters = dict(query)
        if method in ("POST", "PATCH", "PUT"):
            parameters["fieldValidation"] = "Strict"
        response = self._client.call_api(
            method,
            f"{self._client.configuration.host}{path}?{urlencode(parameters)}",
            header_params={"Accept": "application/json", "Content-Type": "application/json", **(headers or {})},
            body=None if body is None else dict(body),
            _request_timeout=20,
        )
        data = response.read()
        if response.status >= 400:
            raise _refused(response.status, data)
        return dict(json.loads(data))


def _collection(obj: Mapping[str, Any]) -> str:
    kind, namespace = obj["kind"], obj["metadata"].get("namespace", "default")
    if kind == "CustomResourceDefinition":
        return CRD_PATH
    if kind in CORE_PATHS:
        return CORE_PATHS[kind].format(namespace=namespace)
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURALS[kind]}"


def _path(obj: Mapping[str, Any]) -> str:
    return f"{_collection(obj)}/{obj['metadata']['name']}"


def _refused(status: int, data: bytes) -> RefusedError:
    try:
        answer = json.loads(data)
    except ValueError:  # of a path that is not served
        return RefusedError(status, data.decode(errors="replace"), ())
    causes = (answer.get("details") or {}).get("causes") or ()
    found = tuple(Cause(cause.get("field", ""), cause.get("message", "")) for cause in causes)
    return RefusedError(status, answer.get("message", ""), found)
