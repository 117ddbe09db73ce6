"""What a gate asks the policy adapter about copies in the pod: erase them, and look for what could be read before.

Gate: `{"op":"erase","keyspaces":[…],"tiers":[…]}`; the adapter deletes what these keyspaces have in the cache server's
own memory and in its files, of the tiers that are named or of all, and answers what is left and who holds it. It goes
on with the rest by itself; asked again it tells how far it is.
Gate: `{"op":"verify","keyspace":K,"chunks":"<base64>"}`; the adapter answers which of these chunks its tiers find for
that keyspace; without `chunks`, of those that it remembers having erased. Nothing is loaded, locked or counted as used.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvstrata.contract import ContractError, contract_errors
from kvstrata.contract.policy.keyspace import is_keyspace
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES

MAX_ERASED_KEYSPACES = 4096
"""How many keyspaces one erasure may name."""

MAX_ERASED_TIERS = 64
MAX_VERIFIED_CHUNKS = 4096
"""How many chunks one verification may name."""

MAX_TEXT = 512
"""Characters of what a pod says in its own words."""

_MAX_NAME = 253
_MOST = 1 << 62


class EraseOutcome(StrEnum):
    """What became of a request to erase."""

    COMPLETE = "Complete"
    """Nothing is left: every check of every tier that is meant was made and found nothing, no key is held, nothing is
    under way."""

    REMAINING = "Remaining"
    """Something is left, or could not be looked at; the answer says what holds it."""

    IN_FORCE = "KeyspaceInForce"
    """The policy in force has one of the keyspaces: nothing was erased."""

    NOT_ENFORCED = "NotEnforced"
    """The cache server does not enforce the gate's policy yet, or there is none: nothing was erased."""

    CACHE_AWAY = "CacheServerAway"
    """The cache server did not answer: what it holds is not known."""


class Check(StrEnum):
    """A look that was made and found nothing."""

    TABLES = "Tables"
    """LMCache's tables of readable blocks and of those being written, and loans, name no block of the keyspaces."""

    OVERWRITTEN = "Overwritten"
    """After that look, everything that had been freed until then was overwritten with zeros."""

    INDEX = "Index"
    """The index of files has no block of the keyspaces: none to read, none being written, none being removed."""

    DIRECTORY = "Directory"
    """The directories of the keyspaces were listed after the removal was synced, and hold no file."""

    SPARES = "Spares"
    """Each file that had made room before, and was to be written over, is removed or written over in full."""


REQUIRED: Mapping[str, frozenset[Check]] = {
    "CPU": frozenset({Check.TABLES, Check.OVERWRITTEN}),
    "NVMe": frozenset({Check.INDEX, Check.DIRECTORY, Check.SPARES}),
}
"""What has to be checked before a tier of a medium may be said to hold nothing."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Blocks and their bytes."""

    blocks: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.blocks + other.blocks, self.bytes + other.bytes)

    @classmethod
    def from_json(cls, raw: Any) -> Amount:
        """Read the wire form. Raises ContractError for what is no amount."""
        blocks, size = raw
        return cls(_count(blocks), _count(size))


@dataclass(frozen=True, slots=True)
class ErasedTier:
    """What became of the keyspaces in one tier of the pod. `tier` is empty for memory that is no tier of the policy.

    `deleted` counts since the keyspaces left the policy (memory) or were first asked for (files), in this start of the
    cache server; `found` is that and what remains. Of what remains, `reading` and `writing` blocks are in use and
    `removing` blocks have files that are not removed yet, or could not be. `unoverwritten_bytes` of memory are freed
    and not overwritten yet, whosever they were. `rewriting` files made room before, may have been the keyspaces', and
    are not written over in full yet. `problem` says why something could not be looked at, `residue` what copies may be
    left that no erasure reaches; either may be empty.
    """

    tier: str
    medium: str
    encrypted: bool = False
    found: Amount = field(default_factory=Amount)
    deleted: Amount = field(default_factory=Amount)
    remaining: Amount = field(default_factory=Amount)
    reading: int = 0
    writing: int = 0
    removing: int = 0
    unoverwritten_bytes: int = 0
    rewriting: int = 0
    checked: tuple[Check, ...] = ()
    problem: str = ""
    residue: str = ""

    @property
    def complete(self) -> bool:
        """Whether nothing is left here that erasing reaches. Of a medium that nobody knows, that is never so."""
        required = REQUIRED.get(self.medium)
        looked = required is not None and required <= frozenset(self.checked)
        return looked and not (
            self.remaining.blocks or self.remaining.bytes or self.unoverwritten_bytes or self.rewriting or self.problem
        )

    @property
    def held_by(self) -> tuple[str, ...]:
        """What keeps the tier from being complete, for people."""
        where = f"tier {self.tier}" if self.tier else "the cache server's memory"
        reasons = (
            (self.reading, f"{self.reading} blocks are being read"),
            (self.writing, f"{self.writing} blocks are being written"),
            (self.removing, f"{self.removing} blocks are not removed yet"),
            (self.unoverwritten_bytes, f"{self.unoverwritten_bytes} bytes are freed and not overwritten yet"),
            (self.rewriting, f"{self.rewriting} files that made room are not written over yet"),
            (self.problem, self.problem),
        )
        told = tuple(f"{where}: {text}" for there, text in reasons if there)
        return told or (() if self.complete else (f"{where}: not everything was looked at",))

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        plain = {name: getattr(self, name) for name in (*_FIGURES, "tier", "medium", "encrypted")}
        amounts = {name: [getattr(self, name).blocks, getattr(self, name).bytes] for name in _AMOUNTS}
        words = {"problem": self.problem[:MAX_TEXT], "residue": self.residue[:MAX_TEXT]}
        return plain | amounts | words | {"checked": [str(check) for check in self.checked]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ErasedTier:
        """Read the wire form. Raises ContractError for anything malformed; checks of a later version are left out."""
        with contract_errors("an erased tier"):
            known = {str(check) for check in Check}
            figures: dict[str, Any] = {name: _count(raw[name]) for name in _FIGURES}
            figures |= {name: Amount.from_json(raw[name]) for name in _AMOUNTS}
            return cls(
                tier=text(raw["tier"], _MAX_NAME),
                medium=text(raw["medium"], _MAX_NAME),
                encrypted=flag(raw["encrypted"]),
                checked=tuple(Check(check) for check in raw["checked"] if check in known),
                problem=text(raw["problem"]),
                residue=text(raw["residue"]),
                **figures,
            )


_AMOUNTS = ("found", "deleted", "remaining")
_FIGURES = ("reading", "writing", "removing", "unoverwritten_bytes", "rewriting")


@dataclass(frozen=True, slots=True)
class EraseQuestion:
    """Erase these keyspaces from the pod's own tiers of these names, or from all of them."""

    keyspaces: tuple[str, ...]
    tiers: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the line."""
        return line({"op": "erase", "keyspaces": list(self.keyspaces), "tiers": list(self.tiers)})

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EraseQuestion:
        """Read the line's object. Raises ContractError for anything malformed."""
        with contract_errors("a request to erase"):
            return cls(keyspaces_of(raw["keyspaces"]), tiers_of(raw["tiers"]))


@dataclass(frozen=True, slots=True)
class AdapterErased:
    """What the cache server `boot` says of an erasure, while it enforces `revision` of `term`.

    `operations` of its tiers on these keyspaces are under way; each wipes what it staged before it ends. `keys` are
    data keys of theirs that it holds in memory. `elsewhere` names tiers that are meant and not this pod's alone.
    """

    boot: str
    revision: int
    term: int
    outcome: EraseOutcome
    operations: int = 0
    keys: int = 0
    tiers: tuple[ErasedTier, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def nothing_left(self) -> bool:
        """Whether there is nothing that keeps it from being complete."""
        return not self.operations and not self.keys and all(tier.complete for tier in self.tiers)

    def encode(self) -> bytes:
        """Return the line."""
        plain = {name: getattr(self, name) for name in ("boot", "revision", "term", "operations", "keys")}
        tiers = [tier.to_json() for tier in self.tiers]
        return line(
            {"erase": plain | {"outcome": str(self.outcome), "tiers": tiers, "elsewhere": list(self.elsewhere)}}
        )

    @classmethod
    def decode(cls, data: bytes) -> AdapterErased:
        """Read the line. Raises ContractError for an error answer or anything malformed."""
        with contract_errors("the adapter's answer"):
            told = answered(data, "erase")
            return cls(
                boot=text(told["boot"]),
                revision=_count(told["revision"]),
                term=_count(told["term"]),
                outcome=EraseOutcome(told["outcome"]),
                operations=_count(told["operations"]),
                keys=_count(told["keys"]),
                tiers=tuple(ErasedTier.from_json(tier) for tier in told["tiers"]),
                elsewhere=tiers_of(told["elsewhere"]),
            )


@dataclass(frozen=True, slots=True)
class VerifyQuestion:
    """Which of these chunks are found for a keyspace? `chunks` None asks for those that the server erased itself."""

    keyspace: str
    chunks: bytes | None = field(default=None, repr=False)

    def encode(self) -> bytes:
        """Return the line."""
        chunks = {} if self.chunks is None else {"chunks": base64.b64encode(self.chunks).decode()}
        return line({"op": "verify", "keyspace": self.keyspace} | chunks)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> VerifyQuestion:
        """Read the line's object. Raises ContractError for anything malformed."""
        with contract_errors("a request to verify"):
            (keyspace,) = keyspaces_of([raw["keyspace"]])
            if raw.get("chunks") is None:
                return cls(keyspace)
            chunks = base64.b64decode(raw["chunks"], validate=True)
            if not chunks or len(chunks) % CHUNK_HASH_BYTES or len(chunks) > MAX_VERIFIED_CHUNKS * CHUNK_HASH_BYTES:
                raise ContractError(f"a request to verify names between one and {MAX_VERIFIED_CHUNKS} chunks, or none")
            return cls(keyspace, chunks)


@dataclass(frozen=True, slots=True)
class VerifiedTier:
    """What a lookup finds in one tier: `found` of the `asked` blocks could be read for that keyspace.

    `refusal` is why the tier refuses the keyspace before it looks, empty where it does not. `kept` blocks are there
    under these names whatever the policy says, None where this pod cannot tell, as of a shared tier.
    """

    tier: str
    medium: str
    asked: int
    found: int
    refusal: str = ""
    kept: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        return {name: getattr(self, name) for name in VerifiedTier.__dataclass_fields__}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> VerifiedTier:
        """Read the wire form. Raises ContractError for anything malformed."""
        with contract_errors("a verified tier"):
            kept = None if raw["kept"] is None else _count(raw["kept"])
            told = cls(
                text(raw["tier"], _MAX_NAME),
                text(raw["medium"], _MAX_NAME),
                _count(raw["asked"]),
                _count(raw["found"]),
                text(raw["refusal"]),
                kept,
            )
            if told.found > told.asked or (told.kept or 0) > told.asked:
                raise ContractError("a tier found more blocks than it was asked for")
            return told


@dataclass(frozen=True, slots=True)
class AdapterVerified:
    """What the cache server `boot` finds, while it enforces `revision` of `term`.

    `known` is whether it can tell the names of blocks: not before an engine told it how they look. `chunks` is how many
    were asked for; a chunk is made of several blocks. `in_force` is whether the policy in force has the keyspace.
    """

    boot: str
    revision: int
    term: int
    known: bool
    in_force: bool
    chunks: int = 0
    tiers: tuple[VerifiedTier, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        plain = {name: getattr(self, name) for name in AdapterVerified.__dataclass_fields__}
        return plain | {"tiers": [tier.to_json() for tier in self.tiers]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> AdapterVerified:
        """Read the wire form. Raises ContractError for anything malformed."""
        with contract_errors("what a cache server finds"):
            return cls(
                boot=text(raw["boot"]),
                revision=_count(raw["revision"]),
                term=_count(raw["term"]),
                known=flag(raw["known"]),
                in_force=flag(raw["in_force"]),
                chunks=_count(raw["chunks"]),
                tiers=tuple(VerifiedTier.from_json(tier) for tier in raw["tiers"]),
            )

    def encode(self) -> bytes:
        """Return the line."""
        return line({"verify": self.to_json()})

    @classmethod
    def decode(cls, data: bytes) -> AdapterVerified:
        """Read the line. Raises ContractError for an error answer or anything malformed."""
        with contract_errors("the adapter's answer"):
            return cls.from_json(answered(data, "verify"))


def keyspaces_of(raw: Any) -> tuple[str, ...]:
    """Return the keyspaces that are named, each once, in order. Raises ContractError for anything else."""
    if not isinstance(raw, list | tuple) or not 0 < len(raw) <= MAX_ERASED_KEYSPACES:
        raise ContractError(f"between one and {MAX_ERASED_KEYSPACES} keyspaces are named at a time")
    if not all(isinstance(keyspace, str) and is_keyspace(keyspace) for keyspace in raw):
        raise ContractError("a malformed keyspace is named")
    return tuple(sorted(set(raw)))


def tiers_of(raw: Any) -> tuple[str, ...]:
    """Return the tiers that are named. Raises ContractError for what are no names of tiers."""
    if not isinstance(raw, list | tuple) or len(raw) > MAX_ERASED_TIERS:
        raise ContractError(f"no more than {MAX_ERASED_TIERS} tiers are named at a time")
    return tuple(text(name, _MAX_NAME) for name in raw)


def text(raw: Any, most: int = MAX_TEXT) -> str:
    """Return a text. Raises ContractError for what is none, is too long or cannot be shown."""
    if not isinstance(raw, str) or len(raw) > most or not raw.isprintable():
        raise ContractError("something is no text that can be shown")
    return raw


def flag(raw: Any) -> bool:
    """Return a truth value. Raises ContractError for anything else."""
    if type(raw) is not bool:
        raise ContractError("something is neither true nor false")
    return raw


def answered(data: bytes, what: str) -> dict[str, Any]:
    """Return what an adapter's line says under `what`. Raises ContractError for an error answer."""
    raw = json.loads(data)
    if "error" in raw:
        raise ContractError(f"the adapter refused: {raw['error']}")
    told: dict[str, Any] = raw[what]
    return told


def line(value: Mapping[str, Any]) -> bytes:
    """Return a line between gate and adapter."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _count(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw <= _MOST:
        raise ContractError("something is no count")
    return raw
