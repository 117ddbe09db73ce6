"""Notes of who may hold keys, where they are kept: a Secret for each namespace, in the operator's own.

There, because nobody else may write there: what a receipt says of a key's end depends on them. They are written
conditionally: by the leader, by an operator that ends, and by one that was started anew and tells of its former self.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.model.keyholders import HoldersNote
from kvstrata.model.keys import LetGo, Release
from kvstrata.objects import labels

from . import CustodyError

PREFIX = "kvstrata-keyholders-"
DATA_KEY = "holders.json"
COMPONENT = "key-holders"


@dataclass(frozen=True, slots=True)
class StoredNote:
    """A note, None if it cannot be read, and the uid and version of the Secret that holds it."""

    namespace: str
    note: HoldersNote | None
    uid: str
    resource_version: str


class HolderNotes:
    """Reads and writes notes. `namespace` is the operator's. Every call may raise CustodyError."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace

    async def read(self, namespace: str) -> StoredNote | None:
        """Return the note about a namespace; None if there is none."""
        try:
            stored = await self._kube.get(SECRET, self._namespace, name_of(namespace))
        except KubeError as error:
            raise _failed(namespace, "read", error) from error
        return _stored(stored) if stored is not None else None

    async def listed(self) -> AsyncIterator[StoredNote]:
        """Yield the notes about all namespaces."""
        selector = ",".join(f"{name}={value}" for name, value in sorted(labels.of_receipts(COMPONENT).items()))
        try:
            async for raw in self._kube.list(SECRET, self._namespace, selector):
                yield _stored(raw)
        except KubeError as error:
            raise CustodyError(f"notes of keys' holders cannot be listed: {error.status} {error.reason}") from error

    async def write(self, namespace: str, note: HoldersNote, before: StoredNote | None) -> StoredNote:
        """Write a note, if nobody wrote it since `before`."""
        metadata: dict[str, Any] = {
            "name": name_of(namespace),
            "namespace": self._namespace,
            "labels": labels.of_receipts(COMPONENT),
        }
        body = {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.kind,
            "metadata": metadata,
            "type": "Opaque",
            "data": {DATA_KEY: base64.b64encode(_encoded(note)).decode()},
        }
        try:
            if before is None:
                return _stored(await self._kube.create(SECRET, self._namespace, body))
            metadata["resourceVersion"] = before.resource_version
            return _stored(await self._kube.replace(SECRET, self._namespace, body))
        except KubeError as error:
            raise _failed(namespace, "written", error) from error

    async def remove(self, stored: StoredNote) -> None:
        """Remove a note about a namespace in which nobody has keys any more."""
        try:
            await self._kube.delete(SECRET, self._namespace, name_of(stored.namespace), stored.uid)
        except KubeError as error:
            raise _failed(stored.namespace, "removed", error) from error


def name_of(namespace: str) -> str:
    """Return the name of the Secret with the note about a namespace."""
    return f"{PREFIX}{namespace}"


def _encoded(note: HoldersNote) -> bytes:
    told = {
        "term": note.term,
        "operators": {
            name: None if one is None else {"how": str(one.how), "at": one.at} for name, one in note.operators.items()
        },
        "pods": sorted(note.pods),
        "unaccounted": dict(note.unaccounted),
    }
    return json.dumps(told, sort_keys=True, separators=(",", ":")).encode()


def _stored(raw: Mapping[str, Any]) -> StoredNote:
    metadata = raw["metadata"]
    value = (raw.get("data") or {}).get(DATA_KEY, "")
    namespace = str(metadata["name"]).removeprefix(PREFIX)
    return StoredNote(namespace, _decoded(value), metadata["uid"], metadata["resourceVersion"])


def _decoded(value: str) -> HoldersNote | None:
    try:
        raw = json.loads(base64.b64decode(value))
        operators = {
            str(name): None if one is None else Release(str(name), LetGo(one["how"]), str(one["at"]))
            for name, one in raw["operators"].items()
        }
        unaccounted = {str(one): str(who) for one, who in raw["unaccounted"].items()}
        return HoldersNote(int(raw["term"]), operators, frozenset(map(str, raw["pods"])), unaccounted)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _failed(namespace: str, what: str, error: KubeError) -> CustodyError:
    return CustodyError(
        f"the note of who holds keys of namespace {namespace} was not {what}: {error.status} {error.reason}"
    )
