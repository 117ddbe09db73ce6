"""Records of wrapped data keys: sixteen Secrets for each domain, by epoch, written conditionally.

A record names the service and its wrapping key, so a service that was set up again cannot pass for the one that deleted
it. A revoked key's record stays, without the wrapped key, until the service's key is known to be gone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError

from kvstrata.clients.kube import Kube
from kvstrata.contract.policy.keyspace import is_epoch
from kvstrata.contract.wire import canonical_json
from kvstrata.objects import names
from kvstrata.reconcile.keys import CustodySecrets
from kvstrata.reconcile.secrets import decode

Text = Annotated[str, StringConstraints(min_length=1)]


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """One data key, wrapped by `key` at `place` (namespace and mount) of `service`; `wrapped` is empty once revoked."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    service: Text
    place: Text
    key: Text
    wrapped: str = field(default="", repr=False)
    revoked_at: str = ""

    def encode(self) -> bytes:
        return _RECORD.dump_json(self)

    @classmethod
    def decode(cls, data: bytes) -> WrappedKey | None:
        """None for anything but a stored record."""
        try:
            return _RECORD.validate_json(data)
        except ValidationError:
            return None


_RECORD = TypeAdapter(WrappedKey)

SHARDS = "0123456789abcdef"
COMPONENT = "wrapped-keys"

Change = Callable[[Mapping[str, WrappedKey]], Mapping[str, WrappedKey | None]]
"""Maps a Secret's records to changes: a new record, or None to remove one."""


@dataclass(frozen=True, slots=True)
class Held:
    """Records by epoch, and unusable entries with the names of their Secrets: they are unreadable, or do not name the
    epoch's own wrapping key. A writer of Secrets could plant another's: it is neither unwrapped nor deleted."""

    records: Mapping[str, WrappedKey]
    unusable: Mapping[str, str]


def wrapping_key(domain: str, epoch: str) -> str:
    """Return the service's name for the key of an epoch: it reveals the domain's id, but not the epoch."""
    digest = hashlib.sha256(b"kvstrata wrapping key\n" + canonical_json([domain, epoch])).hexdigest()
    return f"kvstrata-{domain}-{digest[:32]}"


class WrappedKeys:
    """The Secrets of the domain with this id, in the operator's `namespace`. Every call may raise CustodyError."""

    def __init__(self, kube: Kube, namespace: str, domain: str) -> None:
        self._secrets, self.domain = CustodySecrets(kube, namespace, COMPONENT), domain

    async def read(self, epochs: Iterable[str]) -> dict[str, WrappedKey]:
        wanted = frozenset(epochs)
        records = (await self.held(by_shard(wanted))).records
        return {epoch: record for epoch, record in records.items() if epoch in wanted}

    async def held(self, shards: Iterable[str] = SHARDS) -> Held:
        records, unusable = dict[str, WrappedKey](), dict[str, str]()
        for shard in shards:
            stored = await self._stored(shard)
            records |= (own := self._own(shard, stored))
            unusable |= dict.fromkeys((stored.get("data") or {}).keys() - own.keys(), self.name_of(shard))
        return Held(records, unusable)

    def name_of(self, epoch: str) -> str:
        return names.wrapped_keys_secret(self.domain, epoch[:1])

    async def remove(self) -> tuple[str, ...]:
        """Remove empty Secrets; return the names of the others, whose content is unreadable."""
        kept = []
        for shard in SHARDS:
            stored = await self._stored(shard)
            if stored.get("data"):
                kept.append(self.name_of(shard))
            elif stored:
                await self._secrets.delete(stored)
        return tuple(kept)

    async def change(self, shard: str, change: Change) -> None:
        """Change one Secret in one conditional write, keeping unusable entries."""
        stored = await self._stored(shard)
        own, values = self._own(shard, stored), decode(stored)
        changes = {epoch: new for epoch, new in change(own).items() if epoch in own or epoch not in values}
        if changes:
            kept = {epoch: value for epoch, value in values.items() if epoch not in changes}
            fresh = {epoch: record.encode() for epoch, record in changes.items() if record is not None}
            version = stored["metadata"]["resourceVersion"] if stored else ""
            await self._secrets.write(self.name_of(shard), kept | fresh, version)

    async def _stored(self, shard: str) -> Mapping[str, Any]:
        return await self._secrets.read(self.name_of(shard)) or {}

    def _own(self, shard: str, stored: Mapping[str, Any]) -> dict[str, WrappedKey]:
        epochs = {epoch: value for epoch, value in decode(stored).items() if is_epoch(epoch) and epoch[:1] == shard}
        read = {epoch: WrappedKey.decode(value) for epoch, value in epochs.items()}
        domain = self.domain
        return {epoch: one for epoch, one in read.items() if one and one.key == wrapping_key(domain, epoch)}


async def domains_with_keys(kube: Kube, namespace: str) -> frozenset[str]:
    """Return the ids of domains with non-empty Secrets in the operator's namespace. Raises CustodyError."""
    listed = CustodySecrets(kube, namespace, COMPONENT).list()
    found = [names.domain_of_wrapped_keys(raw["metadata"]["name"]) async for raw in listed if raw.get("data")]
    return frozenset(found) - {""}


def by_shard(epochs: Iterable[str]) -> dict[str, list[str]]:
    """Group epochs by their Secret, which their first digit names, in order."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for epoch in sorted(epochs):
        grouped[epoch[:1]].append(epoch)
    return dict(grouped)
