"""Data keys: what blocks of a keyspace are encrypted with where a tier requires it.

A key is drawn with its epoch and travels in the bundle's Secret shards. The gate writes each into a file of its own in
a memory volume, named by keyspace and generation, and removes it when the policy names it no more; the adapter reads
it from there. `policy.json`, status, logs and messages name generations only.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import ContractError
from .keyspace import is_keyspace

DATA_KEY_BYTES = 32
MAX_GENERATION = 255
KEYS_DIRECTORY = "keys"

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


def require_distinct(keys: tuple[DataKey, ...]) -> tuple[DataKey, ...]:
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
