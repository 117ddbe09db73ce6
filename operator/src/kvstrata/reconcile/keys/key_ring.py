"""Data keys in the clear, as a KMS unwrapped them: in the memory of this process, and of pods that they are brought to.

Not covered by overwriting: swap and core dumps of the nodes, and pieces of a key that an interpreter copied and freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstrata.contract.messages.key_delivery import overwrite
from kvstrata.contract.policy.data_key import key_id


@dataclass(frozen=True, slots=True)
class _Key:
    id: str
    secret: bytearray = field(repr=False)


class KeyRing:
    """The keys of all namespaces, by epoch."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[str, _Key]] = {}

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Namespaces that have keys here."""
        return tuple(namespace for namespace, keys in self._keys.items() if keys)

    def add(self, namespace: str, epoch: str, secret: bytes) -> None:
        """Hold the key of an epoch; one that is here already stays."""
        self._keys.setdefault(namespace, {}).setdefault(epoch, _Key(key_id(secret), bytearray(secret)))

    def ids(self, namespace: str, epochs: Iterable[str]) -> dict[str, str]:
        """Return by epoch the ids of those keys that are here: what bundles say of them."""
        keys = self._keys.get(namespace, {})
        return {epoch: keys[epoch].id for epoch in epochs if epoch in keys}

    def secrets(self, namespace: str, ids: Iterable[str]) -> list[bytearray]:
        """Return those keys with these ids that are here. They are the buffers that `remove` overwrites."""
        by_id = {key.id: key.secret for key in self._keys.get(namespace, {}).values()}
        return [by_id[one] for one in ids if one in by_id]

    def remove(self, namespace: str, epochs: Iterable[str]) -> None:
        """Overwrite and forget the keys of these epochs."""
        keys = self._keys.get(namespace, {})
        for epoch in epochs:
            if (key := keys.pop(epoch, None)) is not None:
                overwrite(key.secret)
