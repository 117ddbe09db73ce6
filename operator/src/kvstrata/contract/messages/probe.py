"""The isolation probe: checks in a pod whether its scopes can reuse one another's blocks.

`POST /v1/probe`, at the control port. The gate has the engine compute one chunk of random tokens for a tenant of the
bundle in force, and looks for it under the same scope, under others and under other tokens, in every tier and in the
engine. The stored chunk is deleted again. No answer holds a keyspace, a token or a block's name.

Gate to adapter: `{"op":"forget","keyspace":K,"chunks":"<base64>"}` deletes exactly these chunks of this keyspace from
every tier of the pod; the adapter answers the number of deleted blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from kvstrata.contract import ContractError, Meaningful
from kvstrata.contract.policy.keyspace import Keyspace
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata.contract.wire import Base64, Count, Items, Message, Range, Request, Text, wired

PROBE_PATH = "/v1/probe"
MAX_PROBED_BYTES = 64 * 1024

MAX_READERS = 16
"""Foreign scopes in which one probe looks, at most."""

MAX_FORGOTTEN_CHUNKS = 64
MAX_TIERS = 64
ENGINE = "Engine"
"""The medium of the row for reuse from the engine's own memory."""


class ProbeOutcome(Meaningful):
    ISOLATED = "Isolated", "In every tier with a control hit other scopes looked too, and found nothing."
    FOREIGN_HIT = "ForeignHit", "A scope found another one's blocks, or two scopes of the bundle have one keyspace."
    WRONG_HIT = "WrongHit", "Other tokens found these blocks."
    NO_CONTROL = "NoControl", "The same scope found nothing, so misses of others prove nothing."
    ONE_SCOPE = "OneScope", "The bundle has one scope only, so there is no other to look in."
    NO_REUSE = "NoReuse", "Reuse is off, or the policy is stale: no tenant has a keyspace."
    MOVED = "Moved", "The policy changed meanwhile, or is older than the requested one."
    UNREADY = "Unready", "Engine or cache server did not answer, or the pod is terminating."

    @property
    def failed(self) -> bool:
        """Whether isolation was found broken, as opposed to not shown."""
        return self in (ProbeOutcome.FOREIGN_HIT, ProbeOutcome.WRONG_HIT)


@wired("a request to probe", versioned=True, complete=True)
class ProbeRequest(Request):
    """Probe under `revision` or a later one, in at most `readers` foreign scopes."""

    revision: Count
    readers: Annotated[int, Range(1, MAX_READERS)] = 8


@dataclass(frozen=True, slots=True)
class ProbedTier:
    """Lookups of the whole chunk in one tier, or requests if the medium is the engine.

    `controls` were made for the storing scope, before and after all others. `foreign` were made for other scopes,
    `altered` under other tokens; their hits should be 0. The tier refused `refused` of the foreign ones before it
    looked: they missed, and prove nothing about names.
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
        parts = ((self.control_hits, self.controls), (self.foreign_hits, self.foreign), (self.refused, self.foreign))
        if any(part > whole for part, whole in (*parts, (self.altered_hits, self.altered))):
            raise ContractError("a probed tier found more than was looked for")

    @property
    def proven(self) -> bool:
        """Whether others missed here between two controls that hit."""
        found = self.foreign_hits + self.altered_hits
        return 2 <= self.controls == self.control_hits and self.foreign > self.refused and not found


@wired("a probe's answer", versioned=True, complete=True)
class Probed(Message):
    """A pod's findings, in the processes of these boots, under `revision` of `term`.

    `scopes` counts the bundle's scopes, `looked` those in which a lookup was made. `culprits` are the scopes that
    stored and found, if any did; `clashes`: they have one keyspace.
    """

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
        if self.outcome in _BY_COUNTS and self.outcome is not outcome_of(self.tiers, clashes=self.clashes):
            raise ContractError("a probe's outcome contradicts its counts")

    @property
    def proven(self) -> tuple[str, ...]:
        """Tiers in which isolation was shown, by name; the engine's own memory is `Engine`."""
        return tuple(row.tier or row.medium for row in self.tiers if row.proven)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Tiers in which it was not shown, for lack of a control or of a permitted reader."""
        return tuple(row.tier or row.medium for row in self.tiers if not row.proven)

    @property
    def lookups(self) -> int:
        """Lookups that should have missed."""
        return sum(row.foreign + row.altered for row in self.tiers)

    @property
    def controls(self) -> int:
        """Lookups that should have hit."""
        return sum(row.controls for row in self.tiers)


def outcome_of(tiers: tuple[ProbedTier, ...], *, clashes: bool) -> ProbeOutcome:
    """A hit outweighs everything else; without a control hit nothing was shown."""
    if clashes or any(row.foreign_hits for row in tiers):
        return ProbeOutcome.FOREIGN_HIT
    if any(row.altered_hits for row in tiers):
        return ProbeOutcome.WRONG_HIT
    return ProbeOutcome.ISOLATED if any(row.proven for row in tiers) else ProbeOutcome.NO_CONTROL


_BY_COUNTS = (ProbeOutcome.ISOLATED, ProbeOutcome.FOREIGN_HIT, ProbeOutcome.WRONG_HIT, ProbeOutcome.NO_CONTROL)


@wired("a request to forget")
class ForgetRequest:
    keyspace: Keyspace
    chunks: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_FORGOTTEN_CHUNKS, 1)] = field(repr=False)


@wired("a cache server's deletion of a chunk", complete=True)
class Forgotten:
    """Blocks that the cache server `boot` deleted, and those in its memory that are in use."""

    boot: Text
    deleted: Count
    in_use: Count = 0
