"""Data keys in the clear, in memory. Overwriting does not cover swap, core dumps or the interpreter's copies."""

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
    def __init__(self) -> None:
        self._keys: dict[str, dict[str, _Key]] = {}

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(namespace for namespace, keys in self._keys.items() if keys)

    def add(self, namespace: str, epoch: str, secret: bytes) -> None:
        """Add a key; an existing one of the epoch stays."""
        self._keys.setdefault(namespace, {}).setdefault(epoch, _Key(key_id(secret), bytearray(secret)))

    def epochs(self, namespace: str) -> frozenset[str]:
        return frozenset(self._keys.get(namespace, ()))

    def ids(self, namespace: str, epochs: Iterable[str]) -> dict[str, str]:
        """Return the ids of known keys, by epoch, as bundles name them."""
        keys = self._keys.get(namespace, {})
        return {epoch: keys[epoch].id for epoch in epochs if epoch in keys}

    def secrets(self, namespace: str, ids: Iterable[str]) -> list[bytearray]:
        """Return the known keys with these ids, as the buffers that `remove` overwrites."""
        by_id = {key.id: key.secret for key in self._keys.get(namespace, {}).values()}
        return [by_id[one] for one in ids if one in by_id]

    def remove(self, namespace: str, epochs: Iterable[str]) -> None:
        keys = self._keys.get(namespace, {})
        for epoch in epochs:
            if (key := keys.pop(epoch, None)) is not None:
                overwrite(key.secret)
