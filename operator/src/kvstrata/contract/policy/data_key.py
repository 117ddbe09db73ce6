"""Data keys: what blocks of a keyspace are encrypted with where a tier requires it.

A key is drawn with its epoch. Where keys are kept in Secrets it travels in the bundle's shards (`DataKey`); with every
other custody a bundle names it (`KeyReference`), and the operator brings it (`keydelivery`). The gate writes each into
a file of its own in a memory volume, named by keyspace and generation, and removes it when the policy names it no more;
the adapter reads it from there. `policy.json`, status, logs and messages name generations only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.contract import ContractError, contract_errors
from kvstrata.contract.policy.keyspace import is_keyspace

DATA_KEY_BYTES = 32
MAX_GENERATION = 255
KEYS_DIRECTORY = "keys"

KEY_ID_DIGITS = 64
"""Digits of a key's id, which is what a receipt says of it: a SHA-256 of 256 random bits."""

_ID = re.compile(rf"[0-9a-f]{{{KEY_ID_DIGITS}}}")
_FILE_NAME = re.compile(r"([0-9a-f]{32})\.(0|[1-9][0-9]{0,2})")


@dataclass(frozen=True, slots=True, repr=False)
class DataKey:
    """One key of a keyspace. `generation`, 0 to 255, is what values name it by. Nothing prints `secret`."""

    generation: int
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raise ContractError for a key that cannot be one."""
        if type(self.generation) is not int or not 0 <= self.generation <= MAX_GENERATION:
            raise ContractError(f"the generation of a data key is a number from 0 to {MAX_GENERATION}")
        if len(self.secret) != DATA_KEY_BYTES or not any(self.secret):
            raise ContractError(f"a data key has {DATA_KEY_BYTES} random bytes")

    def __repr__(self) -> str:
        return f"DataKey(generation={self.generation}, secret=***)"

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, which is as secret as the key."""
        return {"generation": self.generation, "key": base64.b64encode(self.secret).decode()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DataKey:
        """Read the wire form. Raises ContractError, which does not quote it, for anything malformed."""
        try:
            return cls(raw["generation"], base64.b64decode(raw["key"], validate=True))
        except ContractError:
            raise
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise ContractError("a data key is malformed") from None


def key_id(secret: bytes | bytearray) -> str:
    """Return a data key's id: what a receipt says of it."""
    return key_fingerprint(secret)


def require_key_id(raw: Any) -> None:
    """Raise ContractError unless this has the form of a key's id."""
    if not isinstance(raw, str) or _ID.fullmatch(raw) is None:
        raise ContractError(f"the id of a data key has {KEY_ID_DIGITS} hexadecimal digits")


@dataclass(frozen=True, slots=True)
class KeyReference:
    """What a bundle says of a data key that it does not hold. `generation`, 0 to 255, is what values name it by."""

    generation: int
    id: str

    def __post_init__(self) -> None:
        """Raise ContractError for a reference that cannot be one."""
        if type(self.generation) is not int or not 0 <= self.generation <= MAX_GENERATION:
            raise ContractError(f"the generation of a data key is a number from 0 to {MAX_GENERATION}")
        require_key_id(self.id)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        return {"generation": self.generation, "id": self.id}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> KeyReference:
        """Read the wire form. Raises ContractError for anything malformed."""
        with contract_errors("a reference to a data key"):
            return cls(raw["generation"], raw["id"])


BundledKey = DataKey | KeyReference
"""A key as a bundle has it."""


def what_is_kept(key: BundledKey) -> bytes | str:
    """Return what tells one key from another: the key itself, or its id where only that is known."""
    return key.secret if isinstance(key, DataKey) else key.id


def keys_to_json(keys: tuple[BundledKey, ...]) -> dict[str, Any]:
    """Return the fields of an entry or of a pool's version that tell its data keys.

    Those that are only named have a field of their own: a reader of the version before has no key for the keyspace
    then, and uses no tier that requires one for it.
    """
    held = [key.to_json() for key in keys if isinstance(key, DataKey)]
    named = [key.to_json() for key in keys if isinstance(key, KeyReference)]
    return ({"keys": held} if held else {}) | ({"namedKeys": named} if named else {})


def keys_from_json(raw: Mapping[str, Any]) -> tuple[BundledKey, ...]:
    """Read what `keys_to_json` wrote. Raises ContractError for anything malformed, or two keys of one generation.

    An operator of an earlier version writes neither field.
    """
    held = tuple(DataKey.from_json(key) for key in raw.get("keys", ()))
    named = tuple(KeyReference.from_json(key) for key in raw.get("namedKeys", ()))
    if held and named:
        raise ContractError("a keyspace has data keys in the bundle and others that are only named")
    return require_distinct(held or named)


def require_distinct(keys: tuple[BundledKey, ...]) -> tuple[BundledKey, ...]:
    """Return `keys`. Raises ContractError if two of them have the same generation."""
    if len({key.generation for key in keys}) != len(keys):
        raise ContractError("two data keys of one keyspace have the same generation")
    return keys


def file_name(keyspace: str, generation: int) -> str:
    """Return the name of a key's file in `KEYS_DIRECTORY`."""
    return f"{keyspace}.{generation}"


def parse_file_name(name: str) -> tuple[str, int] | None:
    """Return the keyspace and the generation that a file name stands for, None if it is not a key's."""
    matched = _FILE_NAME.fullmatch(name)
    if matched is None or not is_keyspace(matched[1]) or int(matched[2]) > MAX_GENERATION:
        return None
    return matched[1], int(matched[2])


def key_fingerprint(secret: bytes | bytearray) -> str:
    """Return what a receipt says of a data key: whoever finds a key can tell whether it is this one."""
    hashed = hashlib.sha256(b"kvstrata data key\n")
    hashed.update(secret)
    return hashed.hexdigest()
