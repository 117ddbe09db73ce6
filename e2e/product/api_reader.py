"""Reads objects over kept connections: tests look several times a second, and kubectl would cost as much as they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kubernetes.client import ApiClient
from kubernetes.config import ConfigException, new_client_from_config
from urllib3.exceptions import HTTPError

from kvstrata.clients.resources import BY_KIND

TIMEOUT_S = 15.0
KINDS = {kind.lower(): resource for kind, resource in BY_KIND.items()}


class ApiReader:
    """A reader for one cluster, for any thread."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._client: ApiClient | None = None

    def read(self, kind: str, namespace: str, name: str = "", selector: str = "") -> tuple[int, dict[str, Any]]:
        """Return the HTTP status, and an object or, without `name`, a list, in the form of kubectl. The status is 0 for
        a kind that is unknown here, and without an answer."""
        resource = KINDS.get(kind.lower())
        if resource is None:
            return 0, {}
        query = f"?{urlencode({'labelSelector': selector})}" if selector else ""
        path = resource.path(namespace, name) if name else resource.path(namespace)
        try:
            status, data = self._ask(path + query)
        except (OSError, HTTPError, ConfigException):
            return 0, {}
        if status != 200:
            return status, {}
        found = json.loads(data)
        for item in [found] if name else found.get("items", ()):
            item.update({"apiVersion": resource.api_version, "kind": resource.kind})
            item.get("metadata", {}).pop("managedFields", None)
        return status, found

    def _ask(self, path: str) -> tuple[int, bytes]:
        if self._client is None:
            self._client = new_client_from_config(str(self._kubeconfig))
            self._client.configuration.proxy = None
        token = self._client.configuration.get_api_key_with_prefix("authorization")
        headers = {"Accept": "application/json", **({"Authorization": token} if token else {})}
        url = f"{self._client.configuration.host}{path}"
        answer = self._client.call_api("GET", url, headers, _request_timeout=TIMEOUT_S)
        return answer.status, answer.read()
