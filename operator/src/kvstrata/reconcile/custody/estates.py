"""Where the keys of domains are that services wrap: a Secret for each domain, in the operator's namespace.

It is written before the first key is made. From it and from the wrapped keys beside it a service can be told to delete
what it has of a domain of which nothing else is left.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from kvstrata.adapters.kube import Kube, KubeError
from kvstrata.adapters.resources import SECRET
from kvstrata.api.cachedomain import KeyManagement
from kvstrata.objects import labels, names

from . import CustodyError

DATA_KEY = "estate.json"
COMPONENT = "wrapped-keys-estate"


@dataclass(frozen=True, slots=True)
class Estate:
    """The domain with this id, its namespace, the uid of its CacheDomain, and the way to its service."""

    domain: str
    namespace: str
    uid: str
    kms: KeyManagement
    authority: bytes = field(repr=False)


class Estates:
    """Reads and writes them. `namespace` is the operator's. Every call may raise CustodyError."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace
        self._noted: dict[str, Estate] = {}

    async def note(self, estate: Estate) -> None:
        """Have it stored, unless it is. What is another namespace's stays that one's: it ends with its own domain."""
        if self._noted.get(estate.domain) == estate:
            return
        name = names.kms_estate(estate.domain)
        metadata: dict[str, Any] = {"name": name, "labels": labels.of_custody(COMPONENT)}
        body = {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.kind,
            "metadata": metadata,
            "type": "Opaque",
            "data": {DATA_KEY: base64.b64encode(_encoded(estate)).decode()},
        }
        try:
            stored = await self._kube.get(SECRET, self._namespace, name)
            if stored is None:
                await self._kube.create(SECRET, self._namespace, body)
            elif (known := _decoded(stored)) != estate:
                if known is not None and known.namespace != estate.namespace:
                    raise CustodyError("status.domainID of the CacheDomain is the id of another namespace's domain")
                metadata["resourceVersion"] = stored["metadata"]["resourceVersion"]
                await self._kube.replace(SECRET, self._namespace, body)
        except KubeError as error:
            raise CustodyError(f"Secret {name} was not written: {error.status} {error.reason}") from error
        self._noted[estate.domain] = estate

    async def of(self, domain: str) -> Estate | None:
        """Return that of a domain."""
        name = names.kms_estate(domain)
        try:
            stored = await self._kube.get(SECRET, self._namespace, name)
        except KubeError as error:
            raise CustodyError(f"Secret {name} cannot be read: {error.status} {error.reason}") from error
        return _decoded(stored) if stored is not None else None

    async def all(self) -> list[Estate]:
        """Return those of all domains that can be read."""
        selector = ",".join(f"{name}={value}" for name, value in sorted(labels.of_custody(COMPONENT).items()))
        try:
            found = [_decoded(raw) async for raw in self._kube.list(SECRET, self._namespace, selector)]
        except KubeError as error:
            raise CustodyError(f"what services have cannot be listed: {error.status} {error.reason}") from error
        return [estate for estate in found if estate is not None]

    async def remove(self, domain: str) -> None:
        """Remove that of a domain of which the service has nothing any more."""
        name = names.kms_estate(domain)
        try:
            stored = await self._kube.get(SECRET, self._namespace, name)
            if stored is not None:
                await self._kube.delete(SECRET, self._namespace, name, stored["metadata"]["uid"])
        except KubeError as error:
            raise CustodyError(f"Secret {name} was not removed: {error.status} {error.reason}") from error
        self._noted.pop(domain, None)


def _encoded(estate: Estate) -> bytes:
    told = {
        "domain": estate.domain,
        "namespace": estate.namespace,
        "uid": estate.uid,
        "kms": estate.kms.model_dump(mode="json", by_alias=True, exclude_none=True),
        "authority": estate.authority.decode("ascii"),
    }
    return json.dumps(told, sort_keys=True).encode()


def _decoded(stored: dict[str, Any]) -> Estate | None:
    try:
        raw = json.loads(base64.b64decode((stored.get("data") or {}).get(DATA_KEY, "")))
        kms = KeyManagement.model_validate(raw["kms"])
        return Estate(raw["domain"], raw["namespace"], raw["uid"], kms, raw["authority"].encode("ascii"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError):
        return None
