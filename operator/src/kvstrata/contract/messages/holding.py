"""What the tiers of a pod hold of a pool: asked by the gate over its line to the cache server, and told the operator.

Gate: `{"op":"pool","keyspace":K,"hashes":"<base64>"}`; the adapter answers how many of these chunks of the version
under that keyspace each tier has which the version is kept in; without `hashes`, of all its chunks.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.contract import ContractError, contract_errors
from kvstrata.contract.policy.keyspace import is_keyspace
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, MAX_CHUNKS

MAX_MISSING = 64
"""How many missing chunks an answer names."""

_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class PoolTierState:
    """How much of a pool's version one tier of a pod holds: chunks and their bytes."""

    name: str
    stored: int
    expected: int
    bytes: int

    def to_json(self) -> list[str | int]:
        """Return the wire form."""
        return [self.name, self.stored, self.expected, self.bytes]

    @classmethod
    def from_json(cls, raw: Any) -> PoolTierState:
        """Read the wire form. Raises ContractError for what is no count."""
        name, *figures = raw
        stored, expected, size = figures[:3]
        if not isinstance(name, str) or len(name) > 253 or not name.isprintable():
            raise ContractError("a pool is told of in a tier without a name")
        if not all(type(one) is int and 0 <= one <= _MOST for one in (stored, expected, size)) or stored > expected:
            raise ContractError("a pool is told of with figures that are none")
        return cls(name, stored, expected, size)


@dataclass(frozen=True, slots=True)
class PoolQuestion:
    """Which of these chunks do tiers hold under a pool's keyspace? `hashes` None asks for all of the version's."""

    keyspace: str
    hashes: bytes | None = field(default=None, repr=False)

    def encode(self) -> bytes:
        """Return the line."""
        hashes = {"hashes": base64.b64encode(self.hashes).decode()} if self.hashes is not None else {}
        return _line({"op": "pool", "keyspace": self.keyspace} | hashes)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PoolQuestion:
        """Read the line's object. Raises ContractError for anything malformed."""
        with contract_errors("a question about a pool"):
            if not is_keyspace(raw["keyspace"]):
                raise ContractError("a question about a pool names a malformed keyspace")
            if "hashes" not in raw:
                return cls(raw["keyspace"])
            hashes = base64.b64decode(raw["hashes"], validate=True)
            if len(hashes) % CHUNK_HASH_BYTES or len(hashes) > MAX_CHUNKS * CHUNK_HASH_BYTES:
                raise ContractError(f"a question about a pool names {MAX_CHUNKS} chunks at most")
            return cls(raw["keyspace"], hashes)


@dataclass(frozen=True, slots=True)
class PoolHolding:
    """What the tiers behind the cache server `boot` hold of what was asked for.

    `known` is whether that can be told: not before an engine said of how many parts a chunk is made. `missing` are
    chunks that a tier lacks, `MAX_MISSING` at most, as hexadecimal hashes.
    """

    boot: str
    known: bool
    tiers: tuple[PoolTierState, ...] = ()
    missing: tuple[str, ...] = field(default=(), repr=False)

    @property
    def complete(self) -> bool:
        """Whether every tier holds every chunk. Of chunks that the cache server does not know, none is there."""
        return self.known and bool(self.tiers) and all(0 < tier.expected == tier.stored for tier in self.tiers)

    def encode(self) -> bytes:
        """Return the line."""
        told = {
            "boot": self.boot,
            "known": self.known,
            "tiers": [tier.to_json() for tier in self.tiers],
            "missing": list(self.missing[:MAX_MISSING]),
        }
        return _line({"pool": told})

    @classmethod
    def decode(cls, line: bytes) -> PoolHolding:
        """Read the line. Raises ContractError for an error answer or anything malformed."""
        with contract_errors("the adapter's answer"):
            raw = json.loads(line)
            if "error" in raw:
                raise ContractError(f"the adapter refused: {raw['error']}")
            told = raw["pool"]
            missing = tuple(told["missing"])[:MAX_MISSING]
            if type(told["known"]) is not bool:
                raise ContractError("the adapter does not say whether it can tell")
            if not all(len(bytes.fromhex(one)) == CHUNK_HASH_BYTES for one in missing):
                raise ContractError("the adapter names chunks that are none")
            tiers = tuple(PoolTierState.from_json(tier) for tier in told["tiers"])
            return cls(str(told["boot"]), told["known"], tiers, missing)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
