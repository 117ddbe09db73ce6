"""The isolation probe: the operator asks a pod to find out whether its scopes can reuse one another's blocks.

`POST /v1/probe`, at the port on which gates tell their state. The gate has the engine compute one chunk of random
tokens for a tenant of the bundle in force, and looks for it: for the same scope, for others, under other tokens, in
every tier and in the engine. What was stored is deleted again. No answer holds a keyspace, a token or a block's name.

Gate to adapter: `{"op":"forget","keyspace":K,"chunks":"<base64>"}` deletes these chunks of this keyspace, and nothing
else, from every tier of the pod; the adapter answers how many blocks it deleted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from kvstrata.contract import ContractError
from kvstrata.contract.policy.keyspace import Keyspace
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata.contract.wire import Base64, Count, Items, Message, Range, Request, Text, Wire

PROBE_PATH = "/v1/probe"
MAX_PROBED_BYTES = 64 * 1024
"""How large an answer may be."""

MAX_READERS = 16
"""In how many foreign scopes one probe may look."""

MAX_FORGOTTEN_CHUNKS = 64
MAX_TIERS = 64
ENGINE = "Engine"
"""The medium of the row of what the engine reused from its own memory."""


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
class ProbeRequest(Request):
    """Probe under `revision` or a later one, and look in at most so many foreign scopes."""

    WIRE: ClassVar[Wire] = Wire("a request to probe", versioned=True, complete=True)

    revision: Count
    readers: Annotated[int, Range(1, MAX_READERS)] = 8


@dataclass(frozen=True, slots=True)
class ProbedTier:
    """What was looked for in one tier, in lookups of the whole chunk, or requests where the medium is the engine.

    `controls` were made for the scope that stored it, before and after all others, and `control_hits` of them found it.
    `foreign` were made for other scopes, `altered` under other tokens; their hits should be 0. `refused` of the foreign
    ones the tier turned down before it looked: they missed, and show nothing of names.
    """

    tier: Text
    medium: Text
    controls: Count = 0
    control_hits: Count = 0
    foreign: Count = 0
    foreign_hits: Count = 0
    refused: Count = 0
    altered: Count = 0
    altered_hits: Count = 0

    def __post_init__(self) -> None:
        """Raise ContractError for sums that cannot be."""
        parts = ((self.control_hits, self.controls), (self.foreign_hits, self.foreign), (self.refused, self.foreign))
        if any(part > whole for part, whole in (*parts, (self.altered_hits, self.altered))):
            raise ContractError("a probed tier found more than was looked for")

    @property
    def proven(self) -> bool:
        """Whether others missed here between two controls that hit."""
        found = self.foreign_hits + self.altered_hits
        return 2 <= self.controls == self.control_hits and self.foreign > self.refused and not found


@dataclass(frozen=True, slots=True)
class Probed(Message):
    """What a pod found, by the processes that these boots name, under `revision` of `term`.

    `scopes` is how many scopes the bundle has, and `looked` in how many of them somebody looked. `culprits` are the
    scopes that stored and found, if any did, and `clashes` whether they have one keyspace.
    """

    WIRE: ClassVar[Wire] = Wire("a probe's answer", versioned=True, complete=True)

    gate_boot: Text
    cache_boot: Text
    revision: Count
    term: Count
    outcome: ProbeOutcome
    scopes: Count = 0
    looked: Count = 0
    tiers: Annotated[tuple[ProbedTier, ...], Items(most=MAX_TIERS)] = ()
    culprits: Annotated[tuple[Text, ...], Items(most=MAX_READERS)] = ()
    clashes: bool = False

    def __post_init__(self) -> None:
        """Raise ContractError for an outcome that is not what the counts say."""
        if self.outcome in _BY_COUNTS and self.outcome is not outcome_of(self.tiers, clashes=self.clashes):
            raise ContractError("a probe's outcome is not what its counts say")

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


def outcome_of(tiers: tuple[ProbedTier, ...], *, clashes: bool) -> ProbeOutcome:
    """Return what the counts say: what was found weighs most, and where no control hit nothing was shown."""
    if clashes or any(row.foreign_hits for row in tiers):
        return ProbeOutcome.FOREIGN_HIT
    if any(row.altered_hits for row in tiers):
        return ProbeOutcome.WRONG_HIT
    return ProbeOutcome.ISOLATED if any(row.proven for row in tiers) else ProbeOutcome.NO_CONTROL


_BY_COUNTS = (ProbeOutcome.ISOLATED, ProbeOutcome.FOREIGN_HIT, ProbeOutcome.WRONG_HIT, ProbeOutcome.NO_CONTROL)


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """Delete these chunks of a keyspace, 32 bytes of name each, from every tier."""

    WIRE: ClassVar[Wire] = Wire("a request to forget")

    keyspace: Keyspace
    chunks: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_FORGOTTEN_CHUNKS, 1)] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """How many blocks the cache server `boot` deleted, and how many of its memory somebody uses."""

    WIRE: ClassVar[Wire] = Wire("what a cache server forgot", complete=True)

    boot: Text
    deleted: Count
    in_use: Count = 0
