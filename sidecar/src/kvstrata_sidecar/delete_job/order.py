"""Order of a deletion: a JSON file, which names files with secrets and never contains one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.contract.policy.keyspace import is_keyspace
from kvstrata.contract.store.redis_keys import IDENTITY_PATTERN, parse_block_key
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client.commands import WRITE_WINDOW_MS

_DOMAIN = re.compile(r"[0-9a-f]{16}")
_IDENTITY = re.compile(IDENTITY_PATTERN)
_CHUNK = re.compile(r"[0-9a-f]{64}")

MAX_STRAYS = 4_096


@dataclass(frozen=True, slots=True)
class Order:
    """Delete `keyspaces`, which no bundle since `revision` has, from one tier of a domain, or only their `chunks`, or
    only blocks of cache `identities`, of which one without a fingerprint stands for all of that identity.

    `parallelism` bounds the primaries in work at once. Indexes are checked for the last time `window_ms` after the
    revocation: until then values reserved before may arrive. `strays` are names of values without an index, from a
    verification, because only a user that may list names finds them. `sums` reports all keyspaces of a primary in one
    line, since thousands of keyspaces on many primaries exceed a container's log.
    """

    domain: str
    revision: int
    keyspaces: tuple[str, ...]
    tier: TierParams
    parallelism: int = 4
    window_ms: int = WRITE_WINDOW_MS
    strays: tuple[str, ...] = ()
    sums: bool = False
    identities: tuple[str, ...] = ()
    chunks: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, raw: Any) -> Order:
        """Raises ValueError, which names the field, for anything missing, unknown or malformed."""
        if not isinstance(raw, Mapping):
            raise ValueError("an order must be an object")
        required = {"domain", "revision", "keyspaces", "tier"}
        known = required | {"parallelism", "window_ms", "strays", "sums", "identities", "chunks"}
        if missing := sorted(required - raw.keys()):
            raise ValueError(f"the order lacks {', '.join(missing)}")
        if unknown := sorted(raw.keys() - known):
            raise ValueError(f"the order has unknown fields: {', '.join(unknown)}")
        if not isinstance(raw["domain"], str) or not _DOMAIN.fullmatch(raw["domain"]):
            raise ValueError("domain must be 16 lower-case hexadecimal digits")
        keyspaces = _texts(raw["keyspaces"], "keyspaces", 65_536)
        if not keyspaces or not all(map(is_keyspace, keyspaces)) or len(set(keyspaces)) < len(keyspaces):
            raise ValueError("keyspaces must be different keyspaces, at least one")
        strays = _texts(raw.get("strays", []), "strays", MAX_STRAYS)
        for name in strays:
            key = parse_block_key(name)
            if key is None or key.domain != raw["domain"] or key.keyspace not in keyspaces:
                raise ValueError("strays must be names of blocks in one of the keyspaces")
        if type(raw.get("sums", False)) is not bool:
            raise ValueError("sums must be true or false")
        identities = _texts(raw.get("identities", []), "identities", 64)
        if not all(map(_IDENTITY.fullmatch, identities)) or ("identities" in raw and not identities):
            raise ValueError("identities must be cache identities, with or without a fingerprint, at least one")
        if identities and strays:
            raise ValueError("strays go with whole keyspaces, not with identities")
        chunks = _texts(raw.get("chunks", []), "chunks", 4_096)
        if not all(map(_CHUNK.fullmatch, chunks)) or len(set(chunks)) < len(chunks):
            raise ValueError("chunks must be different names of 64 lower-case hexadecimal digits")
        if chunks and identities:
            raise ValueError("chunks are deleted regardless of identity: leave identities out")
        return cls(
            raw["domain"],
            _number(raw["revision"], "revision", 0, 1 << 53),
            keyspaces,
            TierParams.from_json(raw["tier"]),
            _number(raw.get("parallelism", 4), "parallelism", 1, 64),
            _number(raw.get("window_ms", WRITE_WINDOW_MS), "window_ms", 0, 10 * WRITE_WINDOW_MS),
            strays,
            raw.get("sums", False),
            identities,
            chunks,
        )


def _texts(raw: Any, name: str, most: int) -> tuple[str, ...]:
    if not isinstance(raw, list) or len(raw) > most or not all(isinstance(one, str) for one in raw):
        raise ValueError(f"{name} must be a list of at most {most} texts")
    return tuple(raw)


def _number(raw: Any, name: str, least: int, most: int) -> int:
    if type(raw) is not int or not least <= raw <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}")
    return raw
