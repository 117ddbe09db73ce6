"""Notes of which service wraps a domain's keys, in the operator's namespace; written before the first key."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from kvstrata.api.cachedomain import KeyManagement
from kvstrata.clients.kube import Kube
from kvstrata.objects import names
from kvstrata.reconcile.keys import CustodyError, CustodySecrets

DATA_KEY = "domain.json"
COMPONENT = "kms-domain"


@dataclass(frozen=True, slots=True)
class KmsDomain:
    """A domain's id, namespace, the uid of its CacheDomain, and how to reach its service. `ending`: its keys are
    being ended, and no new ones are made. `version` is the note's resourceVersion, empty before it is stored."""

    domain: str
    namespace: str
    uid: str
    kms: KeyManagement
    authority: bytes = field(repr=False)
    ending: bool = False
    version: str = field(default="", compare=False)


_NOTE = TypeAdapter(KmsDomain)


class KmsDomainStore:
    """Reads and writes notes. `namespace` is the operator's. Every call may raise CustodyError."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._secrets = CustodySecrets(kube, namespace, COMPONENT)

    async def of(self, domain: str) -> KmsDomain | None:
        """Return a domain's note, None if there is none. Raises CustodyError for an unreadable one, too."""
        name = names.kms_domain(domain)
        if (stored := await self._secrets.read(name)) is None:
            return None
        if (known := _decoded(stored)) is None:
            raise CustodyError(f"Secret {name} has no content that this version can read")
        return known

    async def all(self) -> tuple[tuple[KmsDomain, ...], tuple[str, ...]]:
        """Return the notes of all domains, and the names of unreadable Secrets."""
        found = {raw["metadata"]["name"]: _decoded(raw) async for raw in self._secrets.list()}
        known = tuple(kms_domain for kms_domain in found.values() if kms_domain is not None)
        return known, tuple(name for name, kms_domain in found.items() if kms_domain is None)

    async def why_not(self, domain: str) -> str:
        """Return why no key of a domain may be drawn: its keys are ending, or it has no note. Empty if it may."""
        name, known = names.kms_domain(domain), await self.of(domain)
        if known is None:
            return f"Secret {name} is missing, which names the keys' service: it is written again first"
        return "the CacheDomain is gone, and its keys are being ended" if known.ending else ""

    async def write(self, kms_domain: KmsDomain) -> None:
        """Write a note, unless it was changed since its version."""
        data = _NOTE.dump_json(kms_domain, by_alias=True, exclude_none=True, exclude={"version"})
        await self._secrets.write(names.kms_domain(kms_domain.domain), {DATA_KEY: data}, kms_domain.version)

    async def remove(self, domain: str) -> None:
        if (stored := await self._secrets.read(names.kms_domain(domain))) is not None:
            await self._secrets.delete(stored)


def _decoded(stored: Mapping[str, Any]) -> KmsDomain | None:
    try:
        note = _NOTE.validate_json(base64.b64decode((stored.get("data") or {}).get(DATA_KEY, "")))
    except ValueError:
        return None
    return replace(note, version=stored["metadata"]["resourceVersion"])
