"""The isolation probe: the operator asks a pod to find out whether its scopes can reuse one another's blocks.

`POST /v1/probe`, at the port on which gates tell their state. The gate has the engine compute one chunk of random
tokens for a tenant of the bundle in force, and looks for it: for the same scope, for others, under other tokens, in
every tier and in the engine. What was stored is deleted again. No answer holds a keyspace, a token or a block's name.

Gate to adapter: `{"op":"forget","keyspace":K,"chunks":"<base64>"}` deletes these chunks of this keyspace, and nothing
else, from every tier of the pod; the adapter answers how many blocks it deleted.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvstrata.contract import CONTRACT_VERSION, ContractError, contract_errors, require_version
from kvstrata.contract.messages.erase_2 import flag, keyspaces_of, line, text
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata.contract.wire import canonical_json

PROBE_PATH = "/v1/probe"
MAX_PROBED_BYTES = 64 * 1024
"""How large an answer may be."""

MAX_READERS = 16
"""In how many foreign scopes one probe may look."""

MAX_FORGOTTEN_CHUNKS = 64
MAX_TIERS = 64
ENGINE = "Engine"
"""The medium of the row of what the engine reused from its own memory."""

_MOST = 1 << 62


class ProbeOutcome(StrEnum):
    """What became of a probe."""

    ISOLATED = "Isolated"
    """Every tier whose control hit was asked on behalf of others too, and nobody found anything."""

    FOREIGN_HIT = "ForeignHit"
    """A scope found what another one stored, or two scopes of the bundle have one keyspace."""

    WRONG_HIT = "WrongHit"
    """Other tokens found what these stored."""

    NO_CONTROL = "NoControl"
    """Nothing was found where the same scope looked, so that others missed proves nothing."""

    ONE_SCOPE = "OneScope"
    """The bundle has one scope only: there is nobody to be told apart."""

    NO_REUSE = "NoReuse"
    """Reuse is off, or the policy is stale: nobody has a keyspace."""

    MOVED = "Moved"
    """The policy changed meanwhile, or is older than the one that was meant."""

    UNREADY = "Unready"
    """Engine or cache server did not answer, or the pod is on its way out."""

    @property
    def failed(self) -> bool:
        """Whether isolation was found broken, rather than not shown."""
        return self in (ProbeOutcome.FOREIGN_HIT, ProbeOutcome.WRONG_HIT)


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Probe under `revision` or a later one, and look in at most so many foreign scopes."""

    revision: int
    readers: int = 8

    def encode(self) -> bytes:
        """Return the body. Raises ContractError for what no gate would take."""
        body = canonical_json({"contract": CONTRACT_VERSION, "revision": self.revision, "readers": self.readers})
        ProbeRequest.decode(body)
        return body

    @classmethod
    def decode(cls, data: bytes) -> ProbeRequest:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("a request to probe"):
            raw = json.loads(data)
            require_version(raw, "a request to probe")
            asked = cls(_figure(raw["revision"]), _figure(raw["readers"]))
            if not 0 < asked.readers <= MAX_READERS:
                raise ContractError(f"a probe looks in between one and {MAX_READERS} scopes")
            return asked


@dataclass(frozen=True, slots=True)
class ProbedTier:
    """What was looked for in one tier, in lookups of the whole chunk, or requests where the medium is the engine.

    `controls` were made for the scope that stored it, before and after all others, and `control_hits` of them found it.
    `foreign` were made for other scopes, `altered` under other tokens; their hits should be 0. `refused` of the foreign
    ones the tier turned down before it looked: they missed, and show nothing of names.
    """

    tier: str
    medium: str
    controls: int = 0
    control_hits: int = 0
    foreign: int = 0
    foreign_hits: int = 0
    refused: int = 0
    altered: int = 0
    altered_hits: int = 0

    @property
    def proven(self) -> bool:
        """Whether others missed here between two controls that hit."""
        found = self.foreign_hits + self.altered_hits
        return 2 <= self.controls == self.control_hits and self.foreign > self.refused and not found

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        return {name: getattr(self, name) for name in ProbedTier.__dataclass_fields__}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ProbedTier:
        """Read the wire form. Raises ContractError for sums that cannot be."""
        told = cls(text(raw["tier"]), text(raw["medium"]), *(_figure(raw[name]) for name in _COUNTS))
        parts = ((told.control_hits, told.controls), (told.foreign_hits, told.foreign), (told.refused, told.foreign))
        if any(part > whole for part, whole in (*parts, (told.altered_hits, told.altered))):
            raise ContractError("a probed tier found more than was looked for")
        return told


_COUNTS = tuple(name for name in ProbedTier.__dataclass_fields__ if name not in ("tier", "medium"))


@dataclass(frozen=True, slots=True)
class Probed:
    """What a pod found, by the processes that these boots name, under `revision` of `term`.

    `scopes` is how many scopes the bundle has, and `looked` in how many of them somebody looked. `culprits` are the
    scopes that stored and found, if any did, and `clashes` whether they have one keyspace.
    """

    gate_boot: str
    cache_boot: str
    revision: int
    term: int
    outcome: ProbeOutcome
    scopes: int = 0
    looked: int = 0
    tiers: tuple[ProbedTier, ...] = ()
    culprits: tuple[str, ...] = ()
    clashes: bool = False

    @property
    def proven(self) -> tuple[str, ...]:
        """The tiers in which isolation was shown, by name; the engine's own memory is `Engine`."""
        return tuple(row.tier or row.medium for row in self.tiers if row.proven)

    @property
    def unproven(self) -> tuple[str, ...]:
        """The tiers in which it was not shown, for want of a control or of somebody who may look."""
        return tuple(row.tier or row.medium for row in self.tiers if not row.proven)

    @property
    def lookups(self) -> int:
        """How many lookups should have missed."""
        return sum(row.foreign + row.altered for row in self.tiers)

    @property
    def controls(self) -> int:
        """How many lookups should have hit."""
        return sum(row.controls for row in self.tiers)

    def encode(self) -> bytes:
        """Return the body."""
        plain = {name: getattr(self, name) for name in (*_TEXTS, *_FIGURES, "clashes")}
        rows = {"tiers": [row.to_json() for row in self.tiers], "culprits": list(self.culprits)}
        return canonical_json({"contract": CONTRACT_VERSION, "outcome": str(self.outcome), **plain, **rows})

    @classmethod
    def decode(cls, data: bytes) -> Probed:
        """Read the body. Raises ContractError for anything malformed, of an unknown version, or that says isolated of
        something that is not.
        """
        with contract_errors("a probe's answer"):
            raw = json.loads(data)
            require_version(raw, "a probe's answer")
            if len(raw["tiers"]) > MAX_TIERS or len(raw["culprits"]) > MAX_READERS:
                raise ContractError("a probe's answer has more rows than a pod has tiers")
            plain: dict[str, Any] = {name: text(raw[name]) for name in _TEXTS}
            plain |= {name: _figure(raw[name]) for name in _FIGURES}
            told = cls(
                outcome=ProbeOutcome(raw["outcome"]),
                tiers=tuple(ProbedTier.from_json(row) for row in raw["tiers"]),
                culprits=tuple(text(scope) for scope in raw["culprits"]),
                clashes=flag(raw["clashes"]),
                **plain,
            )
            if told.outcome is not outcome_of(told.tiers, clashes=told.clashes) and told.outcome in _BY_COUNTS:
                raise ContractError("a probe's outcome is not what its counts say")
            return told


def outcome_of(tiers: tuple[ProbedTier, ...], *, clashes: bool) -> ProbeOutcome:
    """Return what the counts say: what was found weighs most, and where no control hit nothing was shown."""
    if clashes or any(row.foreign_hits for row in tiers):
        return ProbeOutcome.FOREIGN_HIT
    if any(row.altered_hits for row in tiers):
        return ProbeOutcome.WRONG_HIT
    return ProbeOutcome.ISOLATED if any(row.proven for row in tiers) else ProbeOutcome.NO_CONTROL


_TEXTS = ("gate_boot", "cache_boot")
_FIGURES = ("revision", "term", "scopes", "looked")
_BY_COUNTS = (ProbeOutcome.ISOLATED, ProbeOutcome.FOREIGN_HIT, ProbeOutcome.WRONG_HIT, ProbeOutcome.NO_CONTROL)


@dataclass(frozen=True, slots=True)
class ForgetQuestion:
    """Delete these chunks of a keyspace, 32 bytes of name each, from every tier."""

    keyspace: str
    chunks: bytes = field(repr=False)

    def encode(self) -> bytes:
        """Return the line."""
        return line({"op": "forget", "keyspace": self.keyspace, "chunks": base64.b64encode(self.chunks).decode()})

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ForgetQuestion:
        """Read the line's object. Raises ContractError for anything malformed."""
        with contract_errors("a request to forget"):
            (keyspace,) = keyspaces_of([raw["keyspace"]])
            chunks = base64.b64decode(raw["chunks"], validate=True)
            if not chunks or len(chunks) % CHUNK_HASH_BYTES or len(chunks) > MAX_FORGOTTEN_CHUNKS * CHUNK_HASH_BYTES:
                raise ContractError(f"a request to forget names between one and {MAX_FORGOTTEN_CHUNKS} chunks")
            return cls(keyspace, chunks)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """How many blocks the cache server `boot` deleted, and how many of its memory somebody uses."""

    boot: str
    deleted: int
    in_use: int = 0

    def encode(self) -> bytes:
        """Return the line."""
        return line({"forgotten": {"boot": self.boot, "deleted": self.deleted, "in_use": self.in_use}})

    @classmethod
    def decode(cls, data: bytes) -> Forgotten:
        """Read the line. Raises ContractError for an error answer or anything malformed."""
        with contract_errors("the adapter's answer"):
            raw = json.loads(data)
            if "error" in raw:
                raise ContractError(f"the adapter refused: {raw['error']}")
            told = raw["forgotten"]
            return cls(text(told["boot"]), _figure(told["deleted"]), _figure(told["in_use"]))


def _figure(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw <= _MOST:
        raise ContractError("something is no count")
    return raw
