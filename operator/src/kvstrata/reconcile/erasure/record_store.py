"""Where records of erasures are kept: a Secret each, in the operator's namespace.

There, because the namespace of what ordered it may be on its way out. A Secret, because a record names keyspaces and
epochs. It is written conditionally: of two operators that both think they lead, the second finds that it was
written, takes over what is there, and adds what it knows, which comes to the same in any order.
"""

from __future__ import annotations

import base64
import logging
import lzma
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.contract import ContractError
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.objects import labels
from kvstrata.reconcile.erasure.codec import decode, encode

PREFIX = "kvstrata-erasure-"
DATA_KEY = "record.json.xz"
COMPONENT = "erasure"
ATTEMPTS = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """A record, and the version of the Secret that holds it."""

    record: ErasureRecord
    uid: str
    resource_version: str


class Keep:
    """Reads and writes records. `namespace` is the operator's. Every call may raise KubeError."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace

    async def read(self, uid: str) -> Kept | None:
        """Return the record of an order; None if there is none. Raises ContractError for one that nobody can read."""
        stored = await self._kube.get(SECRET, self._namespace, name_of(uid))
        return _kept(stored) if stored is not None else None

    async def records(self, *, whole: bool = False) -> AsyncIterator[ErasureRecord]:
        """Yield every record that can be read.

        What nobody can read is left out, and logged: its invalidation says why it does not go on. Raises ContractError
        for it if the `whole` is wanted.
        """
        selector = ",".join(f"{name}={value}" for name, value in sorted(labels.of_receipts(COMPONENT).items()))
        async for stored in self._kube.list(SECRET, self._namespace, selector):
            try:
                yield _kept(stored).record
            except ContractError as error:
                if whole:
                    raise
                log.error("a record of an erasure cannot be read", extra={"error": str(error)})

    async def create(self, record: ErasureRecord) -> Kept:
        """Keep a new record, or return the one that another operator kept first."""
        uid = record.erasure.order.uid
        try:
            return _kept(await self._kube.create(SECRET, self._namespace, self._body(record)))
        except KubeError as error:
            if not error.is_conflict:
                raise
            found = await self.read(uid)
            if found is None:
                raise
            return found

    async def write(self, kept: Kept, record: ErasureRecord) -> Kept:
        """Keep more of what is known. Nothing that another operator has kept meanwhile is lost."""
        for _ in range(ATTEMPTS):
            if kept.record == record:
                return kept
            body = self._body(record)
            body["metadata"]["resourceVersion"] = kept.resource_version
            try:
                return _kept(await self._kube.replace(SECRET, self._namespace, body))
            except KubeError as error:
                if not error.is_conflict:
                    raise
                found = await self.read(record.erasure.order.uid)
                if found is None:
                    raise
                kept, record = found, both(found.record, record)
        raise KubeError(409, "Conflict", f"{name_of(record.erasure.order.uid)} is written by others all the time")

    async def remove(self, uid: str) -> None:
        """Remove the record of an erasure that is over."""
        stored = await self._kube.get(SECRET, self._namespace, name_of(uid))
        if stored is not None:
            await self._kube.delete(SECRET, self._namespace, name_of(uid), stored["metadata"]["uid"])

    def _body(self, record: ErasureRecord) -> dict[str, Any]:
        # The same bytes for the same record, so no time in it.
        data = _packed(encode(record))
        return {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.kind,
            "metadata": {
                "name": name_of(record.erasure.order.uid),
                "namespace": self._namespace,
                "labels": labels.of_receipts(COMPONENT),
            },
            "type": "Opaque",
            "data": {DATA_KEY: base64.b64encode(data).decode("ascii")},
        }


def name_of(uid: str) -> str:
    """Return the name of the Secret with an order's record."""
    return f"{PREFIX}{uid}"


def both(stored: ErasureRecord, own: ErasureRecord) -> ErasureRecord:
    """Return what two records of one order say together."""
    merged = stored.hearing(*own.erasure.facts.values())
    named = {**own.named, **stored.named}
    return replace(merged, named=named, named_tiers=tuple(sorted({*stored.named_tiers, *own.named_tiers})))


def _packed(data: bytes) -> bytes:
    """Return a record compressed. Digests, which are most of it, come again far apart: so far back it has to look."""
    sought = {"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": max(1 << 16, len(data))}
    return lzma.compress(data, filters=[sought])


def _kept(stored: dict[str, Any]) -> Kept:
    metadata = stored["metadata"]
    try:
        data = lzma.decompress(base64.b64decode((stored.get("data") or {}).get(DATA_KEY, "")))
    except (EOFError, ValueError, lzma.LZMAError) as error:
        raise ContractError(f"Secret {metadata['name']} holds no record of an erasure") from error
    return Kept(decode(data), metadata["uid"], metadata["resourceVersion"])
