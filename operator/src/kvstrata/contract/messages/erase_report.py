"""Report of a deletion Job for a shared tier: lines of canonical JSON, the end last.

The operator reads the Job's output, which has the facts of a receipt's `NodeFact`. A keyspace is named by its SHA-256,
because others may read the output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

from kvstrata.contract import ContractError
from kvstrata.contract.receipt.facts import NOTHING, Amount, Uid
from kvstrata.contract.receipt.vocabulary import evidence
from kvstrata.contract.wire import Form, HexDigest, canonical_json, from_wire, to_wire

Sentence = Annotated[str, Form(r"[^\x00-\x1f\x7f]{0,512}", "sentence of at most 512 characters")]


class Outcome(StrEnum):
    ERASED = "Erased"
    """Nothing that the indexes name is left and every replica is in step; of former identities, every index was walked.
    """

    STOPPED = "Stopped"
    """Another run continues from there."""


class StopReason(StrEnum):
    NONE = ""
    SERVER_AWAY = "ServerAway"
    ACCESS_REFUSED = "AccessRefused"
    REFUSED = "CommandRefused"
    SLOTS_UNSERVED = "SlotsUnserved"
    SLOT_MAP_CHANGED = "SlotMapChanged"
    REPLICAS_BEHIND = "ReplicasBehind"
    NOT_EMPTIED = "NotEmptied"


@evidence
class Erased:
    """Result of one keyspace on one primary, or of all that were ordered together. `found` is `deleted` and `remaining`
    together, over all runs since the keyspace was revoked in the tier."""

    keyspace: HexDigest | None
    """SHA-256 of the keyspace; null for all of them."""

    node: Uid
    found: Amount

    deleted: Amount
    """Values deleted by this run and those before it."""

    remaining: Amount
    """Blocks that the index still names."""


@evidence
class PrimaryEnd:
    node: Uid
    replicas: int

    replicas_in_step: int
    """Replicas that confirmed every write of their primary."""

    strays: int
    """Values without an index whose names this run was given and deleted."""


@evidence
class End:
    outcome: Outcome
    reason: StopReason

    message: Sentence
    """The reason for people: it names the server."""

    slots: HexDigest | None
    """Digest of the slot map under which all of it was done; null if it is not known."""

    since_revoked_ms: int
    """Milliseconds from the revocation, after which no writer can reserve, to the last check of the indexes."""


Line = Erased | PrimaryEnd | End
_KINDS: dict[str, type[Line]] = {"keyspace": Erased, "primary": PrimaryEnd, "end": End}


def keyspace_digest(keyspace: str) -> str:
    """Return the name of a keyspace in a report."""
    return hashlib.sha256(keyspace.encode()).hexdigest()


def encode_line(line: Line) -> bytes:
    kind = next(name for name, one in _KINDS.items() if one is type(line))
    return canonical_json({"kind": kind} | to_wire(line)) + b"\n"


def decode_line(data: bytes) -> Line:
    """Raises ContractError for anything but a line."""
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
    """Return blocks found, deleted and remaining on one primary, over all keyspaces. A report has lines for keyspaces
    or one line for all of them, never both."""
    found = deleted = remaining = NOTHING
    for line in lines:
        if line.node == node:
            found, deleted, remaining = found + line.found, deleted + line.deleted, remaining + line.remaining
    return found, deleted, remaining
