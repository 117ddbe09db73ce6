"""Erasure of a pod's own copies, and verification afterwards: the same messages between operator, gate and adapter.

`POST /v1/erase` erases keyspaces that left the policy from the pod's own memory and files, and is answered when nothing
is left or after `wait_ms`. The cache server continues in the background; a repeated request reports its progress.

`POST /v1/verify` reports whether blocks are still found. Nothing is loaded, locked or counted as used.

No answer holds a keyspace, a key or a block's name. Every answer carries the header `Kvstrata-Ack-Token`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from kvstrata.contract import ContractError, Meaningful
from kvstrata.contract.policy.keyspace import Keyspace
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata.contract.wire import Base64, Count, Items, Message, Range, Request, ShortText, Text, shown, wired

ERASE_PATH = "/v1/erase"
VERIFY_PATH = "/v1/verify"
MAX_WAIT_MS = 120_000
MAX_ERASED_BYTES = 256 * 1024
MAX_ERASED_KEYSPACES = 4096
MAX_ERASED_TIERS = 64
MAX_VERIFIED_CHUNKS = 4096

MAX_TEXT = 512
"""Characters of a pod's free text."""


class EraseOutcome(Meaningful):
    COMPLETE = "Complete", "Every check of every named tier found nothing, no key is held, nothing is under way."
    REMAINING = "Remaining", "Something is left or could not be checked; the answer names its holder."
    IN_FORCE = "KeyspaceInForce", "The policy in force has one of the keyspaces: nothing was erased."
    NOT_ENFORCED = "NotEnforced", "The cache server enforces no policy of the gate yet: nothing was erased."
    CACHE_AWAY = "CacheServerAway", "The cache server did not answer: its content is unknown."


class Check(Meaningful):
    """A check that found nothing."""

    TABLES = "Tables", "LMCache's tables of blocks, readable or being written, and loans, name none of the keyspaces."
    OVERWRITTEN = "Overwritten", "After that check, all memory freed until then was overwritten with zeros."
    INDEX = "Index", "The index of files has no block of the keyspaces: none readable, being written or being removed."
    DIRECTORY = "Directory", "The keyspaces' directories were listed after the removal was synced, and hold no file."
    SPARES = "Spares", "Each file that was kept to be written over is removed or written over in full."
    PLACES = "Places", "In a node's folder no place of the tier, in use or not, holds a file of the keyspaces."


REQUIRED: Mapping[str, frozenset[Check]] = {
    "CPU": frozenset({Check.TABLES, Check.OVERWRITTEN}),
    "NVMe": frozenset({Check.INDEX, Check.DIRECTORY, Check.SPARES}),
}
"""Checks without which a tier of a medium is not reported empty."""


@wired("a request to erase", versioned=True, complete=True)
class EraseRequest(Request):
    """Erase keyspaces from the named tiers of a pod, or from all its own tiers."""

    keyspaces: Annotated[tuple[Keyspace, ...], Items(1, MAX_ERASED_KEYSPACES)] = field(repr=False)
    tiers: Annotated[tuple[ShortText, ...], Items(most=MAX_ERASED_TIERS)] = ()
    wait_ms: Annotated[int, Range(0, MAX_WAIT_MS)] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "keyspaces", tuple(sorted(set(self.keyspaces))))

    @property
    def wait_s(self) -> float:
        return self.wait_ms / 1000


@wired("a request to verify", versioned=True)
class VerifyRequest(Request):
    """Look for blocks of a keyspace: for chunks of these names, 32 bytes each, or for those that the cache server
    remembers having erased."""

    keyspace: Keyspace = field(repr=False)
    chunks: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_VERIFIED_CHUNKS, 1)] | None = field(default=None, repr=False)


@wired("an amount", complete=True, row=True)
class Amount:
    blocks: Count = 0
    bytes: Count = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.blocks + other.blocks, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class ErasedTier:
    """Result of an erasure in one tier of the pod. `tier` is empty for memory that is no tier of the policy.

    `deleted` counts since the keyspaces left the policy (memory) or were first requested (files), in this start of the
    cache server; `found` adds the remainder. Of the remaining blocks, `reading` and `writing` are in use and `removing`
    have files that are not removed yet. `unoverwritten_bytes` of memory are freed and not overwritten yet, of any
    keyspace. `rewriting` files may have been the keyspaces' and are not written over in full yet. `problem` is the
    reason why something could not be checked; `residue` names copies that no erasure reaches.
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
        object.__setattr__(self, "problem", shown(self.problem, MAX_TEXT))
        object.__setattr__(self, "residue", shown(self.residue, MAX_TEXT))

    @property
    def complete(self) -> bool:
        """Whether nothing is left here that erasing reaches. Never true for an unknown medium."""
        required = REQUIRED.get(self.medium)
        looked = required is not None and required <= frozenset(self.checked)
        return looked and not (
            self.remaining.blocks or self.remaining.bytes or self.unoverwritten_bytes or self.rewriting or self.problem
        )

    @property
    def held_by(self) -> tuple[str, ...]:
        where = f"tier {self.tier}" if self.tier else "the cache server's memory"
        reasons = (
            (self.reading, f"{self.reading} blocks are being read"),
            (self.writing, f"{self.writing} blocks are being written"),
            (self.removing, f"{self.removing} blocks are not removed yet"),
            (self.unoverwritten_bytes, f"{self.unoverwritten_bytes} bytes are freed and not overwritten yet"),
            (self.rewriting, f"{self.rewriting} files that made room are not written over yet"),
            (self.problem, self.problem),
        )
        reported = tuple(f"{where}: {text}" for there, text in reasons if there)
        return reported or (() if self.complete else (f"{where}: not everything was looked at",))


@wired("a cache server's report of an erasure", complete=True)
class AdapterErased:
    """Report of the cache server `boot` about an erasure, while it enforces `revision` of `term`.

    `operations` counts tier operations under way on these keyspaces; each wipes its staged bytes before it ends. `keys`
    counts their data keys in its memory. `elsewhere` names requested tiers that are not this pod's alone.
    """

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
        return not self.operations and not self.keys and all(tier.complete for tier in self.tiers)


@dataclass(frozen=True, slots=True)
class LeftKeys:
    """Data keys of the keyspaces that the gate still has, in its memory and as files in the pod's memory volume."""

    gate: Count = 0
    volume: Count = 0

    def __bool__(self) -> bool:
        return bool(self.gate or self.volume)


@wired("an erasure", versioned=True, complete=True)
class Erased(Message):
    """A pod's report of its own copies. `acked` is the revision that the pod has acknowledged; `requests` are in
    flight in the gate under these keyspaces."""

    gate_boot: Text
    acked: Count
    cache: AdapterErased
    requests: Count = 0
    keys: LeftKeys = field(default_factory=LeftKeys)

    def __post_init__(self) -> None:
        if self.cache.outcome is EraseOutcome.COMPLETE and not self.cache.boot:
            raise ContractError("a pod reports that an erasure is complete, without its cache server")

    @property
    def outcome(self) -> EraseOutcome:
        """Complete only if the cache server is and nothing in the pod holds anything."""
        left = self.requests or self.keys or not self.cache.nothing_left
        return EraseOutcome.REMAINING if left and self.cache.outcome is EraseOutcome.COMPLETE else self.cache.outcome

    @property
    def held_by(self) -> tuple[str, ...]:
        """Reasons why the erasure is not complete, for people; empty when it is, and when nothing was erased."""
        counted = (
            (self.requests, "requests are in flight in the gate"),
            (self.cache.operations, "operations of tiers are under way"),
            (self.keys.gate, "data keys are held by the gate"),
            (self.keys.volume, "data keys are files in the policy volume"),
            (self.cache.keys, "data keys are held by the cache server"),
        )
        reported = [f"{count} {what}" for count, what in counted if count]
        return (*reported, *(reason for tier in self.cache.tiers for reason in tier.held_by))


@dataclass(frozen=True, slots=True)
class VerifiedTier:
    """Result of a lookup in one tier: `found` of the `asked` blocks could be read for that keyspace.

    `refusal` is why the tier refuses the keyspace before it looks, empty if it does not. `kept` blocks exist under
    these names regardless of policy, None where this pod cannot know it, as for a shared tier.
    """

    tier: ShortText
    medium: ShortText
    asked: Count
    found: Count
    refusal: Text = ""
    kept: Count | None = None

    def __post_init__(self) -> None:
        if self.found > self.asked or (self.kept or 0) > self.asked:
            raise ContractError("a tier found more blocks than it was asked for")


@wired("a cache server's findings", complete=True)
class AdapterVerified:
    """Findings of the cache server `boot`, while it enforces `revision` of `term`.

    `known` is False until an engine has reported to the cache server how its blocks are named. `chunks` were requested;
    a chunk has several blocks. `in_force`: the policy in force has the keyspace.
    """

    boot: Text
    revision: Count
    term: Count
    known: bool
    in_force: bool
    chunks: Count = 0
    tiers: tuple[VerifiedTier, ...] = ()


@wired("a verification", versioned=True, complete=True)
class Verified(Message):
    gate_boot: Text
    acked: Count
    in_force: bool
    found: AdapterVerified

    @property
    def asked(self) -> int:
        return max((tier.asked for tier in self.found.tiers), default=0)
