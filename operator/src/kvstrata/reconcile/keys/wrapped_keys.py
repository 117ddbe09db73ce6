"""Storage of wrapped data keys: sixteen Secrets for each domain, by epoch, written conditionally.

They are in the operator's namespace, so that they outlive the domain's namespace and still tell what the service must
delete.

A record names the service and its wrapping key, so a service that was set up anew cannot pass for the one that deleted
it. A revoked key's record stays, without the wrapped key, until the service's key is known to be gone.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.contract.policy.keyspace import is_epoch
from kvstrata.objects import labels, names
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.secrets import decode


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """One data key, wrapped by `key` at `place` (namespace and mount) of `service`; `wrapped` is empty once revoked."""

    service: str
    place: str
    key: str
    wrapped: str = field(default="", repr=False)
    revoked_at: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> WrappedKey | None:
        """None for anything but a stored record."""
        try:
            raw = json.loads(data)
            record = cls(**raw)
        except (ValueError, TypeError, RecursionError):
            return None
        whole = all(isinstance(value, str) for value in asdict(record).values())
        return record if whole and record.service and record.place and record.key else None


SHARDS = "0123456789abcdef"
COMPONENT = "wrapped-keys"

Change = Callable[[Mapping[str, WrappedKey]], Mapping[str, WrappedKey | None]]
"""Maps a Secret's records to changes: a new record, or None to remove one."""


@dataclass(frozen=True, slots=True)
class Held:
    """Records by epoch, and other entries with the names of their Secrets."""

    records: Mapping[str, WrappedKey]
    unreadable: Mapping[str, str]


class WrappedKeys:
    """The Secrets with the wrapped keys of the domain with this id, in the operator's `namespace`."""

    def __init__(self, kube: Kube, namespace: str, domain_id: str) -> None:
        self._kube, self._namespace, self._domain_id = kube, namespace, domain_id

    async def read(self, epochs: Iterable[str]) -> dict[str, WrappedKey]:
        """Return the records of these epochs. Raises CustodyError."""
        wanted = frozenset(epochs)
        held = (await self.held(by_shard(wanted))).records
        return {epoch: record for epoch, record in held.items() if epoch in wanted}

    async def held(self, shards: Iterable[str] = SHARDS) -> Held:
        records, unreadable = dict[str, WrappedKey](), dict[str, str]()
        for shard in shards:
            stored = await self._stored(shard)
            there = _records(shard, stored)
            records |= there
            others = ((stored or {}).get("data") or {}).keys() - there.keys()
            unreadable |= dict.fromkeys(others, self.name_of(shard))
        return Held(records, unreadable)

    def name_of(self, epoch: str) -> str:
        return names.wrapped_keys_secret(self._domain_id, epoch[:1])

    async def remove(self) -> tuple[str, ...]:
        """Remove empty Secrets; return the names of the others, whose content is unreadable. Raises CustodyError."""
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
        """Change one Secret in one conditional write, keeping unreadable entries. Raises CustodyError, also on a
        conflict."""
        stored, name = await self._stored(shard), self.name_of(shard)
        changes = change(_records(shard, stored))
        if not changes:
            return
        values = decode(stored or {}) | {epoch: record.encode() for epoch, record in changes.items() if record}
        for epoch in (epoch for epoch, record in changes.items() if record is None):
            values.pop(epoch, None)
        metadata: dict[str, Any] = {"name": name, "labels": labels.of_custody(COMPONENT)}
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
        name = self.name_of(shard)
        try:
            return await self._kube.get(SECRET, self._namespace, name)
        except KubeError as error:
            raise CustodyError(f"Secret {name} cannot be read: {error.status} {error.reason}") from error


async def domains_with_keys(kube: Kube, namespace: str) -> frozenset[str]:
    """Return the ids of domains with non-empty Secrets in the operator's namespace. Raises CustodyError."""
    selector = ",".join(f"{name}={value}" for name, value in sorted(labels.of_custody(COMPONENT).items()))
    try:
        found = [
            str(raw["metadata"]["name"]) async for raw in kube.list(SECRET, namespace, selector) if raw.get("data")
        ]
    except KubeError as error:
        raise CustodyError(f"Secrets of wrapped keys cannot be listed: {error.status} {error.reason}") from error
    return frozenset(names.domain_of_wrapped_keys(name) for name in found) - {""}


def by_shard(epochs: Iterable[str]) -> dict[str, list[str]]:
    """Group epochs by their Secret, which their first digit names, in order."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for epoch in sorted(epochs):
        grouped[epoch[:1]].append(epoch)
    return dict(grouped)


def _records(shard: str, stored: Mapping[str, Any] | None) -> dict[str, WrappedKey]:
    values = decode(stored or {})
    read = {epoch: WrappedKey.decode(value) for epoch, value in values.items() if is_epoch(epoch)}
    return {epoch: record for epoch, record in read.items() if record is not None and epoch.startswith(shard)}
