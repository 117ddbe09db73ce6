"""Wrapped data keys as they are stored: in sixteen Secrets for each domain, by epoch, through conditional writes.

They are in the operator's namespace, so that they do not go with the domain: what the service has to delete is known
from them, whatever becomes of the namespace.

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


SHARDS = "0123456789abcdef"

Change = Callable[[Mapping[str, WrappedKey]], Mapping[str, WrappedKey | None]]
"""From what a Secret holds to what is to be different in it: a record to put there, None to remove one."""


class WrappedKeys:
    """The Secrets with the wrapped keys of the domain with this id, in the operator's `namespace`."""

    def __init__(self, kube: Kube, namespace: str, domain_id: str) -> None:
        self._kube, self._namespace, self._domain_id = kube, namespace, domain_id

    async def read(self, epochs: Iterable[str]) -> dict[str, WrappedKey]:
        """Return what is stored of these epochs. Raises CustodyError."""
        found: dict[str, WrappedKey] = {}
        for shard, some in by_shard(epochs).items():
            held = _records(shard, await self._stored(shard))
            found |= {epoch: held[epoch] for epoch in some if epoch in held}
        return found

    async def all(self) -> dict[str, WrappedKey]:
        """Return everything that is stored. Raises CustodyError."""
        found: dict[str, WrappedKey] = {}
        for shard in SHARDS:
            found |= _records(shard, await self._stored(shard))
        return found

    async def remove(self) -> tuple[str, ...]:
        """Remove the Secrets that are empty; return the others, of which nobody knows what is in them.

        Raises CustodyError.
        """
        kept = []
        for shard in SHARDS:
            if (stored := await self._stored(shard)) is None:
                continue
            name = stored["metadata"]["name"]
            if stored.get("data"):
                kept.append(name)
                continue
            try:
                await self._kube.delete(SECRET, self._namespace, name, stored["metadata"]["uid"])
            except KubeError as error:
                raise CustodyError(f"Secret {name} was not removed: {error.status} {error.reason}") from error
        return tuple(kept)

    async def change(self, shard: str, change: Change) -> None:
        """Change one Secret in one write, if nobody else writes it meanwhile. Raises CustodyError if somebody does.

        What is in it that is no record is left alone.
        """
        stored, name = await self._stored(shard), names.wrapped_keys_secret(self._domain_id, shard)
        changes = change(_records(shard, stored))
        if not changes:
            return
        values = decode(stored or {}) | {epoch: record.encode() for epoch, record in changes.items() if record}
        for epoch in (epoch for epoch, record in changes.items() if record is None):
            values.pop(epoch, None)
        metadata: dict[str, Any] = {"name": name, "labels": labels.of_custody("wrapped-keys")}
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

    async def _stored(self, shard: str) -> Mapping[str, Any] | None:
        name = names.wrapped_keys_secret(self._domain_id, shard)
        try:
            return await self._kube.get(SECRET, self._namespace, name)
        except KubeError as error:
            raise CustodyError(f"Secret {name} cannot be read: {error.status} {error.reason}") from error


def by_shard(epochs: Iterable[str]) -> dict[str, list[str]]:
    """Return epochs by the Secret that they belong into, which is named by their first digit, in order."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for epoch in sorted(epochs):
        grouped[epoch[:1]].append(epoch)
    return dict(grouped)


def _records(shard: str, stored: Mapping[str, Any] | None) -> dict[str, WrappedKey]:
    values = decode(stored or {})
    read = {epoch: WrappedKey.decode(value) for epoch, value in values.items() if is_epoch(epoch)}
    return {epoch: record for epoch, record in read.items() if record is not None and epoch.startswith(shard)}
