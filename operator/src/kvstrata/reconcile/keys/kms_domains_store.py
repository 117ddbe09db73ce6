"""Where the keys of domains are that services wrap: a Secret for each domain, in the operator's namespace.

It is written before the first key is made. From it and from the wrapped keys beside it a service can be told to delete
what it has of a domain of which nothing else is left.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from kvstrata.api.cachedomain import KeyManagement
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.objects import labels, names
from kvstrata.reconcile.keys import CustodyError

DATA_KEY = "estate.json"
COMPONENT = "wrapped-keys-estate"


@dataclass(frozen=True, slots=True)
class Estate:
    """The domain with this id, its namespace, the uid of its CacheDomain, and the way to its service.

    `ending` is whether its keys are being ended: from then on none is made.
    """

    domain: str
    namespace: str
    uid: str
    kms: KeyManagement
    authority: bytes = field(repr=False)
    ending: bool = False


@dataclass(frozen=True, slots=True)
class Noted:
    """What is noted of all domains, and the Secrets that nobody can read."""

    estates: tuple[Estate, ...]
    unreadable: tuple[str, ...]


class Estates:
    """Reads and writes them. `namespace` is the operator's. Every call may raise CustodyError."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace
        self._noted: dict[str, Estate] = {}

    async def has(self, estate: Estate) -> bool:
        """Return whether it is noted as it is. Raises CustodyError if its id is another's, or its keys are ending."""
        if self._noted.get(estate.domain) == estate:
            return True
        known = await self.of(estate.domain)
        if known is None:
            return False
        if known.namespace != estate.namespace:
            raise CustodyError("status.domainID of the CacheDomain is the id of another namespace's domain")
        if known.ending:
            raise CustodyError("status.domainID of the CacheDomain is the id of one whose keys are being ended")
        if known == estate:
            self._noted[estate.domain] = estate
        return known == estate

    async def note(self, estate: Estate) -> None:
        """Have it stored. What is another namespace's stays that one's: it ends with its own domain."""
        if not await self.has(estate):
            await self._write(estate)
            self._noted[estate.domain] = estate

    async def begin_end(self, estate: Estate) -> None:
        """Have it noted that its keys are being ended, before anybody looks which there are."""
        self._noted.pop(estate.domain, None)
        if not estate.ending:
            await self._write(replace(estate, ending=True))

    async def reopen(self, estate: Estate) -> None:
        """Have it noted that its keys are not being ended any more: its domain was restored."""
        await self._write(replace(estate, ending=False), reopened=True)

    async def why_not(self, domain: str) -> str:
        """Return why no key of a domain may be drawn, empty if it may: its keys end, or nothing is noted of it."""
        estate = await self.of(domain)
        if estate is None:
            self._noted.pop(domain, None)
            return (
                f"Secret {names.kms_estate(domain)} is missing, which says where the keys are: it is written anew first"
            )
        return "the CacheDomain is gone, and its keys are being ended" if estate.ending else ""

    async def of(self, domain: str) -> Estate | None:
        """Return that of a domain, None if nothing is noted of it. CustodyError, too, for what nobody can read."""
        stored = await self._stored(domain)
        if stored is None:
            return None
        if (estate := _decoded(stored)) is None:
            raise CustodyError(f"Secret {names.kms_estate(domain)} says nothing that this version can read")
        return estate

    async def all(self) -> Noted:
        """Return those of all domains. What was noted and is not any more is looked up when it is asked for again."""
        selector = ",".join(f"{name}={value}" for name, value in sorted(labels.of_custody(COMPONENT).items()))
        try:
            found = [(raw, _decoded(raw)) async for raw in self._kube.list(SECRET, self._namespace, selector)]
        except KubeError as error:
            raise CustodyError(f"what services have cannot be listed: {error.status} {error.reason}") from error
        estates = tuple(estate for _, estate in found if estate is not None)
        there = {estate.domain: estate for estate in estates}
        self._noted = {domain: known for domain, known in self._noted.items() if there.get(domain) == known}
        return Noted(
            estates,
            tuple(str(raw["metadata"]["name"]) for raw, estate in found if estate is None),
        )

    async def remove(self, domain: str) -> None:
        """Remove that of a domain of which the service has nothing any more."""
        stored = await self._stored(domain)
        if stored is not None:
            name = names.kms_estate(domain)
            try:
                await self._kube.delete(SECRET, self._namespace, name, stored["metadata"]["uid"])
            except KubeError as error:
                raise CustodyError(f"Secret {name} was not removed: {error.status} {error.reason}") from error
        self._noted.pop(domain, None)

    async def _write(self, estate: Estate, *, reopened: bool = False) -> None:
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
            known = _decoded(stored) if stored is not None else None
            if known is not None and known.ending and not (estate.ending or reopened):
                raise CustodyError(f"Secret {name} says by now that its keys are being ended")
            if stored is None:
                await self._kube.create(SECRET, self._namespace, body)
            else:
                metadata["resourceVersion"] = stored["metadata"]["resourceVersion"]
                await self._kube.replace(SECRET, self._namespace, body)
        except KubeError as error:
            raise CustodyError(f"Secret {name} was not written: {error.status} {error.reason}") from error

    async def _stored(self, domain: str) -> dict[str, Any] | None:
        name = names.kms_estate(domain)
        try:
            return await self._kube.get(SECRET, self._namespace, name)
        except KubeError as error:
            raise CustodyError(f"Secret {name} cannot be read: {error.status} {error.reason}") from error


def _encoded(estate: Estate) -> bytes:
    told = {
        "domain": estate.domain,
        "namespace": estate.namespace,
        "uid": estate.uid,
        "kms": estate.kms.model_dump(mode="json", by_alias=True, exclude_none=True),
        "authority": estate.authority.decode("ascii"),
        "ending": estate.ending,
    }
    return json.dumps(told, sort_keys=True).encode()


def _decoded(stored: dict[str, Any]) -> Estate | None:
    try:
        raw = json.loads(base64.b64decode((stored.get("data") or {}).get(DATA_KEY, "")))
        kms = KeyManagement.model_validate(raw["kms"])
        authority = raw["authority"].encode("ascii")
        return Estate(raw["domain"], raw["namespace"], raw["uid"], kms, authority, raw.get("ending") is True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError):
        return None
