"""What the deletion of keyspaces from a shared tier reports: lines of canonical JSON, as they are known, the end last.

The deletion runs in a Job, and the operator reads its output: the facts of a receipt's `NodeFact` are in it. A keyspace
is named by its SHA-256, because output is kept where others may read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from kvstrata.contract import ContractError
from kvstrata.contract.receipt.facts import Amount, Uid
from kvstrata.contract.receipt.vocabulary import EVIDENCE
from kvstrata.contract.wire import Form, HexDigest, Wire, canonical_json, from_wire, to_wire

Sentence = Annotated[str, Form(r"[^\x00-\x1f\x7f]{0,512}", "sentence of at most 512 characters")]


class Outcome(StrEnum):
    """How a deletion ended."""

    ERASED = "Erased"
    """Of keyspaces: nothing that the indexes name is left, and every replica is in step. Of former identities: every
    index was walked through."""

    STOPPED = "Stopped"
    """For a reason; another run goes on from there."""


class StopReason(StrEnum):
    """Why a deletion stopped before its end."""

    NONE = ""
    SERVER_AWAY = "ServerAway"
    ACCESS_REFUSED = "AccessRefused"
    REFUSED = "CommandRefused"
    SLOTS_UNSERVED = "SlotsUnserved"
    SLOT_MAP_CHANGED = "SlotMapChanged"
    REPLICAS_BEHIND = "ReplicasBehind"
    NOT_EMPTIED = "NotEmptied"


@dataclass(frozen=True, slots=True)
class Erased:
    """What became of one keyspace on one primary, or of all that were ordered together.

    `found` is `deleted` and `remaining` together, over all runs since the keyspace was revoked in the tier.
    """

    WIRE: ClassVar[Wire] = EVIDENCE

    keyspace: HexDigest | None
    """SHA-256 of the keyspace; null for all of them."""

    node: Uid
    """The primary's own id."""

    found: Amount
    """Values that were there."""

    deleted: Amount
    """Values that were deleted, by this run and those before it."""

    remaining: Amount
    """Blocks that the index still names."""


@dataclass(frozen=True, slots=True)
class PrimaryEnd:
    """How one primary was left."""

    WIRE: ClassVar[Wire] = EVIDENCE

    node: Uid
    """Its own id."""

    replicas: int
    """Replicas that it has."""

    replicas_in_step: int
    """Replicas that confirmed everything that it was told."""

    strays: int
    """Values without an index that were deleted by this run, because it was told their names."""


@dataclass(frozen=True, slots=True)
class End:
    """How the deletion ended."""

    WIRE: ClassVar[Wire] = EVIDENCE

    outcome: Outcome
    """Whether it is whole."""

    reason: StopReason
    """Why it stopped, empty if it did not."""

    message: Sentence
    """The same for people: it names the server."""

    slots: HexDigest | None
    """Digest of the map of slots to primaries under which all of it was done; null if it is not known."""

    since_revoked_ms: int
    """How long no writer could reserve anything any more when indexes were looked at for the last time."""


Line = Erased | PrimaryEnd | End
_KINDS: dict[str, type[Line]] = {"keyspace": Erased, "primary": PrimaryEnd, "end": End}


def keyspace_digest(keyspace: str) -> str:
    """Return what stands for a keyspace in a report."""
    return hashlib.sha256(keyspace.encode()).hexdigest()


def encode_line(line: Line) -> bytes:
    """Return a line, with its end."""
    kind = next(name for name, one in _KINDS.items() if one is type(line))
    return canonical_json({"kind": kind} | to_wire(line)) + b"\n"


def decode_line(data: bytes) -> Line:
    """Read a line. Raises ContractError for anything else."""
    try:
        raw: Any = json.loads(data)
    except ValueError as error:
        raise ContractError("a line of a deletion's report is no JSON") from error
    if not isinstance(raw, dict):
        raise ContractError("a line of a deletion's report is no object")
    kind = _KINDS.get(str(raw.pop("kind", "")))
    if kind is None:
        raise ContractError("a line of a deletion's report is of no kind that this version knows")
    return from_wire(kind, raw, "line")


def totals(lines: Iterable[Erased], node: str) -> tuple[Amount, Amount, Amount]:
    """Return what was found, deleted and left on one primary, of all keyspaces together.

    The lines are of one report, which names keyspaces or has one line for all of them, and never both.
    """
    mine = [line for line in lines if line.node == node]
    found, deleted, remaining = (
        Amount(sum(one.keys for one in amounts), sum(one.bytes for one in amounts))
        for amounts in ([one.found for one in mine], [one.deleted for one in mine], [one.remaining for one in mine])
    )
    return found, deleted, remaining
