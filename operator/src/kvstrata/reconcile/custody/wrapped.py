"""Wrapped data keys as they are stored: in sixteen Secrets of a domain, by epoch, through conditional writes.

A record says which service wrapped the key, under which of its keys; so a service that was set up anew, and knows none
of them, cannot pass for the one that deleted them. A revoked key's record stays, without the wrapped key, until the
service's own key is known to be gone: who dies in between finds what is left to do.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstrata.adapters.kube import Kube, KubeError
from kvstrata.adapters.resources import SECRET
from kvstrata.contract.keyspace import is_epoch
from kvstrata.objects import labels, names
from kvstrata.reconcile.secrets import decode

from . import CustodyError


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """One data key: wrapped by the key `key` at `place` (namespace and mount) in the service `service`.

    `wrapped` is empty once revoked.
    """

    service: str
    place: str
    key: str
    wrapped: str = field(default="", repr=False)
    revoked_at: str = ""

    def encode(self) -> bytes:
        """Return it as it is stored."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> WrappedKey | None:
        """Read what is stored; None for anything else."""
        try:
            raw = json.loads(data)
            record = cls(**raw)
        except (ValueError, TypeError, RecursionError):
            return None
        whole = all(isinstance(value, str) for value in asdict(record).values())
        return record if whole and record.service and record.place and record.key else None


Change = Callable[[Mapping[str, WrappedKey]], Mapping[str, WrappedKey | None]]
"""From what a Secret holds to what is to be different in it: a record to put there, None to remove one."""


class WrappedKeys:
    """The Secrets with one domain's wrapped keys. `owner` is the CacheDomain's owner reference."""

    def __init__(self, kube: Kube, namespace: str, owner: Mapping[str, Any]) -> None:
        self._kube, self._namespace, self._owner = kube, namespace, owner

    async def read(self, epochs: Iterable[str]) -> dict[str, WrappedKey]:
        """Return what is stored of these epochs. Raises CustodyError."""
        found: dict[str, WrappedKey] = {}
        for name, some in by_secret(epochs).items():
            stored = await self._stored(name)
            held = _records(name, stored)
            found |= {epoch: held[epoch] for epoch in some if epoch in held}
        return found

    async def all(self) -> dict[str, WrappedKey]:
        """Return everything that is stored. Raises CustodyError."""
        found: dict[str, WrappedKey] = {}
        for name in names.WRAPPED_KEYS_SECRETS:
            found |= _records(name, await self._stored(name))
        return found

    async def holding(self, epochs: Iterable[str]) -> tuple[str, ...]:
        """Return the Secrets that have anything of these epochs but the note of a revoked key. Raises CustodyError."""
        found = []
        for name, some in by_secret(epochs).items():
            values = decode(await self._stored(name) or {})
            read = [WrappedKey.decode(values[epoch]) for epoch in some if epoch in values]
            if any(record is None or record.wrapped for record in read):
                found.append(name)
        return tuple(found)

    async def change(self, name: str, change: Change) -> None:
        """Change one Secret in one write, if nobody else writes it meanwhile. Raises CustodyError if somebody does.

        What is in it that is no record is left alone.
        """
        stored = await self._stored(name)
        changes = change(_records(name, stored))
        if not changes:
            return
        values = decode(stored or {}) | {epoch: record.encode() for epoch, record in changes.items() if record}
        for epoch in (epoch for epoch, record in changes.items() if record is None):
            values.pop(epoch, None)
        metadata: dict[str, Any] = {
            "name": name,
            "labels": labels.of_domain("wrapped-keys"),
            "ownerReferences": [dict(self._owner)],
        }
        body = {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.kind,
            "metadata": metadata,
            "type": "Opaque",
            "data": {key: base64.b64encode(value).decode() for key, value in values.items()},
        }
        try:
            if stored is None:
                await self._kube.create(SECRET, self._namespace, body)
            else:
                metadata["resourceVersion"] = stored["metadata"]["resourceVersion"]
                await self._kube.replace(SECRET, self._namespace, body)
        except KubeError as error:
            raise CustodyError(f"Secret {name} was not written: {error.status} {error.reason}") from error

    async def _stored(self, name: str) -> Mapping[str, Any] | None:
        try:
            return await self._kube.get(SECRET, self._namespace, name)
        except KubeError as error:
            raise CustodyError(f"Secret {name} cannot be read: {error.status} {error.reason}") from error


def by_secret(epochs: Iterable[str]) -> dict[str, list[str]]:
    """Return epochs by the Secret that they belong into, in order."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for epoch in sorted(epochs):
        grouped[names.wrapped_keys_secret(epoch)].append(epoch)
    return dict(grouped)


def _records(name: str, stored: Mapping[str, Any] | None) -> dict[str, WrappedKey]:
    values = decode(stored or {})
    read = {epoch: WrappedKey.decode(value) for epoch, value in values.items() if is_epoch(epoch)}
    own = {epoch: record for epoch, record in read.items() if names.wrapped_keys_secret(epoch) == name}
    return {epoch: record for epoch, record in own.items() if record is not None}
