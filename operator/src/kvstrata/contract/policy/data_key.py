"""Data keys, which encrypt blocks of a keyspace where a tier requires it.

A key is drawn with its epoch. With keys in Secrets it travels in the bundle's shards (`DataKey`); with every other
custody a bundle names it (`KeyReference`), and the operator delivers it (`key_delivery`). The gate writes each into a
file in a memory volume, where the adapter reads it, and removes it when the policy no longer names it. `policy.json`,
status, logs and messages name generations only.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Annotated

from kvstrata.contract import ContractError
from kvstrata.contract.policy.keyspace import is_keyspace
from kvstrata.contract.wire import Base64, Form, Range, wired

DATA_KEY_BYTES = 32
MAX_GENERATION = 255
KEYS_DIRECTORY = "keys"

KEY_ID_DIGITS = 64
"""Digits of a key's id: a SHA-256 of 256 random bits."""

Generation = Annotated[int, Range(0, MAX_GENERATION)]
KeyId = Annotated[str, Form(f"[0-9a-f]{{{KEY_ID_DIGITS}}}", "id of a data key")]

_FILE_NAME = re.compile(r"([0-9a-f]{32})\.(0|[1-9][0-9]{0,2})")


@wired("a data key", names={"secret": "key"})
class DataKey:
    """`generation`, 0 to 255, is stored with encrypted values. `repr` hides `secret`."""

    generation: Generation
    secret: Annotated[bytes, Base64(DATA_KEY_BYTES, 1, 1)] = field(repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.generation <= MAX_GENERATION:
            raise ContractError(f"the generation of a data key is a number from 0 to {MAX_GENERATION}")
        if len(self.secret) != DATA_KEY_BYTES or not any(self.secret):
            raise ContractError(f"a data key has {DATA_KEY_BYTES} random bytes")

    def __repr__(self) -> str:
        return f"DataKey(generation={self.generation}, secret=***)"


@dataclass(frozen=True, slots=True)
class KeyReference:
    """A data key that the bundle names and does not hold."""

    generation: Generation
    id: KeyId


BundledKey = DataKey | KeyReference


def what_is_kept(key: BundledKey) -> bytes | str:
    """Return a key's identity: the key itself, or its id where only that is known."""
    return key.secret if isinstance(key, DataKey) else key.id


def check_keys(keys: tuple[BundledKey, ...]) -> None:
    """Raises ContractError if two keys share a generation, or only some of them are in the bundle."""
    if len({key.generation for key in keys}) != len(keys):
        raise ContractError("two data keys of one keyspace have the same generation")
    if len(set(map(type, keys))) > 1:
        raise ContractError("a keyspace has data keys in the bundle and others that are only named")


def file_name(keyspace: str, generation: int) -> str:
    return f"{keyspace}.{generation}"


def parse_file_name(name: str) -> tuple[str, int] | None:
    """Return keyspace and generation of a key's file, None for other names."""
    matched = _FILE_NAME.fullmatch(name)
    if matched is None or not is_keyspace(matched[1]) or int(matched[2]) > MAX_GENERATION:
        return None
    return matched[1], int(matched[2])


def key_id(secret: bytes | bytearray) -> str:
    """Return the id of a data key, its fingerprint in receipts: a holder of a key can check whether it is this one."""
    hashed = hashlib.sha256(b"kvstrata data key\n")
    hashed.update(secret)
    return hashed.hexdigest()
