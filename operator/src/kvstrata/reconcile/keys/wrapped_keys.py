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

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.contract.policy.keyspace import is_epoch
from kvstrata.objects import labels, names
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.secrets import decode


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
COMPONENT = "wrapped-keys"

Change = Callable[[Mapping[str, WrappedKey]], Mapping[str, WrappedKey | None]]
"""From what a Secret holds to what is to be different in it: a record to put there, None to remove one."""


@dataclass(frozen=True, slots=True)
class Held:
    """What is stored: records by epoch, and by its name there whatever else is in the Secrets, with the Secret's."""

    records: Mapping[str, WrappedKey]
    unreadable: Mapping[str, str]


class WrappedKeys:
    """The Secrets with the wrapped keys of the domain with this id, in the operator's `namespace`."""

    def __init__(self, kube: Kube, namespace: str, domain_id: str) -> None:
        self._kube, self._namespace, self._domain_id = kube, namespace, domain_id

    async def read(self, epochs: Iterable[str]) -> dict[str, WrappedKey]:
        """Return what is stored of these epochs. Raises CustodyError."""
        wanted = frozenset(epochs)
        held = (await self.held(by_shard(wanted))).records
        return {epoch: record for epoch, record in held.items() if epoch in wanted}

    async def held(self, shards: Iterable[str] = SHARDS) -> Held:
        """Return everything that is stored in these Secrets. Raises CustodyError."""
        records, unreadable = dict[str, WrappedKey](), dict[str, str]()
        for shard in shards:
            stored = await self._stored(shard)
            there = _records(shard, stored)
            records |= there
            others = ((stored or {}).get("data") or {}).keys() - there.keys()
            unreadable |= dict.fromkeys(others, self.name_of(shard))
        return Held(records, unreadable)

    def name_of(self, epoch: str) -> str:
        """Return the name of the Secret that an epoch, or a shard, belongs into."""
        return names.wrapped_keys_secret(self._domain_id, epoch[:1])

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
    """Return the ids of the domains whose Secrets in the operator's namespace hold something. Raises CustodyError."""
    selector = ",".join(f"{name}={value}" for name, value in sorted(labels.of_custody(COMPONENT).items()))
    try:
        found = [
            str(raw["metadata"]["name"]) async for raw in kube.list(SECRET, namespace, selector) if raw.get("data")
        ]
    except KubeError as error:
        raise CustodyError(f"Secrets of wrapped keys cannot be listed: {error.status} {error.reason}") from error
    return frozenset(names.domain_of_wrapped_keys(name) for name in found) - {""}


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
