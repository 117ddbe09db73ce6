"""Erasure of a pod's own copies, and the look for what could be read before: the same request on both hops.

`POST /v1/erase` has the pod erase keyspaces that left the policy from its own memory and files, and answers when
nothing is left or after `wait_ms`. The gate passes the request on to the cache server (`adapter`), which deletes what
these keyspaces have in its memory and its files, of the tiers that are named or of all, and answers what is left and
who holds it. It goes on with the rest by itself; asked again it tells how far it is.

`POST /v1/verify` asks whether blocks are still found. Nothing is loaded, locked or counted as used.

No answer holds a keyspace, a key or a block's name. Every answer carries the header `Kvstrata-Ack-Token`, as states do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from kvstrata.contract import ContractError
from kvstrata.contract.policy.keyspace import Keyspace
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata.contract.wire import Base64, Count, Items, Message, Range, Request, ShortText, Text, Wire, shown

ERASE_PATH = "/v1/erase"
VERIFY_PATH = "/v1/verify"
MAX_WAIT_MS = 120_000
MAX_ERASED_BYTES = 256 * 1024
"""How large an answer may be."""

MAX_ERASED_KEYSPACES = 4096
"""How many keyspaces one erasure may name."""

MAX_ERASED_TIERS = 64
MAX_VERIFIED_CHUNKS = 4096
"""How many chunks one verification may name."""

MAX_TEXT = 512
"""Characters of what a pod says in its own words."""


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
class EraseRequest(Request):
    """Erase keyspaces from the tiers of a pod that are named, or from all that are its own; the gate waits for it."""

    WIRE: ClassVar[Wire] = Wire("a request to erase", versioned=True, complete=True)

    keyspaces: Annotated[tuple[Keyspace, ...], Items(1, MAX_ERASED_KEYSPACES)] = field(repr=False)
    tiers: Annotated[tuple[ShortText, ...], Items(most=MAX_ERASED_TIERS)] = ()
    wait_ms: Annotated[int, Range(0, MAX_WAIT_MS)] = 0

    def __post_init__(self) -> None:
        """Name each keyspace once, in order."""
        object.__setattr__(self, "keyspaces", tuple(sorted(set(self.keyspaces))))

    @property
    def wait_s(self) -> float:
        """How long the gate waits."""
        return self.wait_ms / 1000


@dataclass(frozen=True, slots=True)
class VerifyRequest(Request):
    """Look for blocks under a keyspace: for the chunks of these names, 32 bytes each, or for those that the cache
    server remembers having erased.
    """

    WIRE: ClassVar[Wire] = Wire("a request to verify", versioned=True)

    keyspace: Keyspace = field(repr=False)
    chunks: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_VERIFIED_CHUNKS, 1)] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Amount:
    """Blocks and their bytes."""

    WIRE: ClassVar[Wire] = Wire("an amount", complete=True, row=True)

    blocks: Count = 0
    bytes: Count = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.blocks + other.blocks, self.bytes + other.bytes)


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

    tier: ShortText
    medium: ShortText
    encrypted: bool = False
    found: Amount = field(default_factory=Amount)
    deleted: Amount = field(default_factory=Amount)
    remaining: Amount = field(default_factory=Amount)
    reading: Count = 0
    writing: Count = 0
    removing: Count = 0
    unoverwritten_bytes: Count = 0
    rewriting: Count = 0
    checked: Annotated[tuple[Check, ...], Items(known_only=True)] = ()
    problem: str = ""
    residue: str = ""

    def __post_init__(self) -> None:
        """Keep of the pod's own words what can be shown."""
        object.__setattr__(self, "problem", shown(self.problem, MAX_TEXT))
        object.__setattr__(self, "residue", shown(self.residue, MAX_TEXT))

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


@dataclass(frozen=True, slots=True)
class AdapterErased:
    """What the cache server `boot` says of an erasure, while it enforces `revision` of `term`.

    `operations` of its tiers on these keyspaces are under way; each wipes what it staged before it ends. `keys` are
    data keys of theirs that it holds in memory. `elsewhere` names tiers that are meant and not this pod's alone.
    """

    WIRE: ClassVar[Wire] = Wire("what a cache server erased", complete=True)

    boot: Text
    revision: Count
    term: Count
    outcome: EraseOutcome
    operations: Count = 0
    keys: Count = 0
    tiers: tuple[ErasedTier, ...] = ()
    elsewhere: Annotated[tuple[ShortText, ...], Items(most=MAX_ERASED_TIERS)] = ()

    @property
    def nothing_left(self) -> bool:
        """Whether there is nothing that keeps it from being complete."""
        return not self.operations and not self.keys and all(tier.complete for tier in self.tiers)


@dataclass(frozen=True, slots=True)
class LeftKeys:
    """Data keys of the keyspaces that the gate still has: in its policy and its list of files, and as files in the
    pod's memory volume. Each was counted when the answer was made.
    """

    gate: Count = 0
    volume: Count = 0

    def __bool__(self) -> bool:
        return bool(self.gate or self.volume)


@dataclass(frozen=True, slots=True)
class Erased(Message):
    """What a pod says of its own copies: its gate, of this boot, and by `cache` its cache server.

    `acked` is the revision that the pod has acknowledged, `requests` are in flight in the gate under these keyspaces.
    """

    WIRE: ClassVar[Wire] = Wire("an erasure", versioned=True, complete=True)

    gate_boot: Text
    acked: Count
    cache: AdapterErased
    requests: Count = 0
    keys: LeftKeys = field(default_factory=LeftKeys)

    def __post_init__(self) -> None:
        """Raise ContractError for an erasure that is complete by no cache server."""
        if self.cache.outcome is EraseOutcome.COMPLETE and not self.cache.boot:
            raise ContractError("a pod says that an erasure is complete, and not by which cache server")

    @property
    def outcome(self) -> EraseOutcome:
        """What became of the request: complete if the cache server is and nobody in the pod holds anything."""
        left = self.requests or self.keys or not self.cache.nothing_left
        return EraseOutcome.REMAINING if left and self.cache.outcome is EraseOutcome.COMPLETE else self.cache.outcome

    @property
    def held_by(self) -> tuple[str, ...]:
        """What keeps the erasure from being complete, for people; empty when it is, and when nothing was erased."""
        counted = (
            (self.requests, "requests are in flight in the gate"),
            (self.cache.operations, "operations of tiers are under way"),
            (self.keys.gate, "data keys are held by the gate"),
            (self.keys.volume, "data keys are files in the policy volume"),
            (self.cache.keys, "data keys are held by the cache server"),
        )
        told = [f"{count} {what}" for count, what in counted if count]
        return (*told, *(reason for tier in self.cache.tiers for reason in tier.held_by))


@dataclass(frozen=True, slots=True)
class VerifiedTier:
    """What a lookup finds in one tier: `found` of the `asked` blocks could be read for that keyspace.

    `refusal` is why the tier refuses the keyspace before it looks, empty where it does not. `kept` blocks are there
    under these names whatever the policy says, None where this pod cannot tell, as of a shared tier.
    """

    tier: ShortText
    medium: ShortText
    asked: Count
    found: Count
    refusal: Text = ""
    kept: Count | None = None

    def __post_init__(self) -> None:
        """Raise ContractError for more blocks than were asked for."""
        if self.found > self.asked or (self.kept or 0) > self.asked:
            raise ContractError("a tier found more blocks than it was asked for")


@dataclass(frozen=True, slots=True)
class AdapterVerified:
    """What the cache server `boot` finds, while it enforces `revision` of `term`.

    `known` is whether it can tell the names of blocks: not before an engine told it how they look. `chunks` is how many
    were asked for; a chunk is made of several blocks. `in_force` is whether the policy in force has the keyspace.
    """

    WIRE: ClassVar[Wire] = Wire("what a cache server finds", complete=True)

    boot: Text
    revision: Count
    term: Count
    known: bool
    in_force: bool
    chunks: Count = 0
    tiers: tuple[VerifiedTier, ...] = ()


@dataclass(frozen=True, slots=True)
class Verified(Message):
    """What a pod's tiers find, by the gate of this boot and what its cache server says."""

    WIRE: ClassVar[Wire] = Wire("a verification", versioned=True, complete=True)

    gate_boot: Text
    acked: Count
    in_force: bool
    found: AdapterVerified

    @property
    def asked(self) -> int:
        """How many blocks each tier was asked for."""
        return max((tier.asked for tier in self.found.tiers), default=0)
