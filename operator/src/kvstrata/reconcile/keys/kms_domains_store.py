"""Notes of which service wraps a domain's keys, in the operator's namespace; written before the first key."""

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

DATA_KEY = "domain.json"
COMPONENT = "kms-domain"


@dataclass(frozen=True, slots=True)
class KmsDomain:
    """A domain's id, namespace, the uid of its CacheDomain, and how to reach its service. `ending`: its keys are
    being ended, and no new ones are made."""

    domain: str
    namespace: str
    uid: str
    kms: KeyManagement
    authority: bytes = field(repr=False)
    ending: bool = False


@dataclass(frozen=True, slots=True)
class Noted:
    """Notes of all domains, and the names of unreadable Secrets."""

    kms_domains: tuple[KmsDomain, ...]
    unreadable: tuple[str, ...]


class KmsDomainStore:
    """Reads and writes notes. `namespace` is the operator's. Every call may raise CustodyError."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace
        self._noted: dict[str, KmsDomain] = {}

    async def has(self, kms_domain: KmsDomain) -> bool:
        """Whether this very note is stored. Raises CustodyError if the id is another's, or its keys are ending."""
        if self._noted.get(kms_domain.domain) == kms_domain:
            return True
        known = await self.of(kms_domain.domain)
        if known is None:
            return False
        if known.namespace != kms_domain.namespace:
            raise CustodyError("status.domainID of the CacheDomain is the id of another namespace's domain")
        if known.ending:
            raise CustodyError("status.domainID of the CacheDomain is the id of one whose keys are being ended")
        if known == kms_domain:
            self._noted[kms_domain.domain] = kms_domain
        return known == kms_domain

    async def note(self, kms_domain: KmsDomain) -> None:
        """Store a note; another namespace's note for the id is left alone."""
        if not await self.has(kms_domain):
            await self._write(kms_domain)
            self._noted[kms_domain.domain] = kms_domain

    async def begin_end(self, kms_domain: KmsDomain) -> None:
        """Record that the domain's keys are being ended, before they are listed."""
        self._noted.pop(kms_domain.domain, None)
        if not kms_domain.ending:
            await self._write(replace(kms_domain, ending=True))

    async def reopen(self, kms_domain: KmsDomain) -> None:
        await self._write(replace(kms_domain, ending=False), reopened=True)

    async def why_not(self, domain: str) -> str:
        """Return why no key of a domain may be drawn: its keys are ending, or it has no note. Empty if it may."""
        kms_domain = await self.of(domain)
        if kms_domain is None:
            self._noted.pop(domain, None)
            return (
                f"Secret {names.kms_domain(domain)} is missing, which says where the keys are: it is written anew first"
            )
        return "the CacheDomain is gone, and its keys are being ended" if kms_domain.ending else ""

    async def of(self, domain: str) -> KmsDomain | None:
        """Return a domain's note, None if there is none. Raises CustodyError for an unreadable one, too."""
        stored = await self._stored(domain)
        if stored is None:
            return None
        if (kms_domain := _decoded(stored)) is None:
            raise CustodyError(f"Secret {names.kms_domain(domain)} says nothing that this version can read")
        return kms_domain

    async def all(self) -> Noted:
        """Return all notes, and drop cached ones that are gone."""
        selector = ",".join(f"{name}={value}" for name, value in sorted(labels.of_custody(COMPONENT).items()))
        try:
            found = [(raw, _decoded(raw)) async for raw in self._kube.list(SECRET, self._namespace, selector)]
        except KubeError as error:
            raise CustodyError(f"what services have cannot be listed: {error.status} {error.reason}") from error
        kms_domains = tuple(kms_domain for _, kms_domain in found if kms_domain is not None)
        there = {kms_domain.domain: kms_domain for kms_domain in kms_domains}
        self._noted = {domain: known for domain, known in self._noted.items() if there.get(domain) == known}
        return Noted(
            kms_domains,
            tuple(str(raw["metadata"]["name"]) for raw, kms_domain in found if kms_domain is None),
        )

    async def remove(self, domain: str) -> None:
        stored = await self._stored(domain)
        if stored is not None:
            name = names.kms_domain(domain)
            try:
                await self._kube.delete(SECRET, self._namespace, name, stored["metadata"]["uid"])
            except KubeError as error:
                raise CustodyError(f"Secret {name} was not removed: {error.status} {error.reason}") from error
        self._noted.pop(domain, None)

    async def _write(self, kms_domain: KmsDomain, *, reopened: bool = False) -> None:
        name = names.kms_domain(kms_domain.domain)
        metadata: dict[str, Any] = {"name": name, "labels": labels.of_custody(COMPONENT)}
        body = {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.kind,
            "metadata": metadata,
            "type": "Opaque",
            "data": {DATA_KEY: base64.b64encode(_encoded(kms_domain)).decode()},
        }
        try:
            stored = await self._kube.get(SECRET, self._namespace, name)
            known = _decoded(stored) if stored is not None else None
            if known is not None and known.ending and not (kms_domain.ending or reopened):
                raise CustodyError(f"Secret {name} says by now that its keys are being ended")
            if stored is None:
                await self._kube.create(SECRET, self._namespace, body)
            else:
                metadata["resourceVersion"] = stored["metadata"]["resourceVersion"]
                await self._kube.replace(SECRET, self._namespace, body)
        except KubeError as error:
            raise CustodyError(f"Secret {name} was not written: {error.status} {error.reason}") from error

    async def _stored(self, domain: str) -> dict[str, Any] | None:
        name = names.kms_domain(domain)
        try:
            return await self._kube.get(SECRET, self._namespace, name)
        except KubeError as error:
            raise CustodyError(f"Secret {name} cannot be read: {error.status} {error.reason}") from error


def _encoded(kms_domain: KmsDomain) -> bytes:
    told = {
        "domain": kms_domain.domain,
        "namespace": kms_domain.namespace,
        "uid": kms_domain.uid,
        "kms": kms_domain.kms.model_dump(mode="json", by_alias=True, exclude_none=True),
        "authority": kms_domain.authority.decode("ascii"),
        "ending": kms_domain.ending,
    }
    return json.dumps(told, sort_keys=True).encode()


def _decoded(stored: dict[str, Any]) -> KmsDomain | None:
    try:
        raw = json.loads(base64.b64decode((stored.get("data") or {}).get(DATA_KEY, "")))
        kms = KeyManagement.model_validate(raw["kms"])
        authority = raw["authority"].encode("ascii")
        return KmsDomain(raw["domain"], raw["namespace"], raw["uid"], kms, authority, raw.get("ending") is True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError):
        return None
