"""What is known of the end of a data key: who took it away, who says that no copy exists, and what may be left."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstrata.contract.receipt.facts import Word
from kvstrata.contract.receipt.residue import Residue
from kvstrata.contract.receipt.vocabulary import KeyCustody


@dataclass(frozen=True, slots=True)
class Revocation:
    """A key that its custody gives to nobody any more.

    `removed` is who took it out of where it was kept; None if it is still there. `residue` is what the custody knows
    to be left nevertheless. Copies in bundles and pods are none of its business.
    """

    custody: KeyCustody
    removed: Word | None
    residue: tuple[Residue, ...] = ()


class Undestroyed(StrEnum):
    """Why nobody can say that no copy of a key exists."""

    CUSTODY_CANNOT_KNOW = "CustodyCannotKnow"
    """Copies of a Secret are in etcd's history and in backups."""

    NOT_REVOKED = "NotRevoked"
    """It is still given away."""

    HOLDERS_OPEN = "HoldersOpen"
    """A process that had it has neither said that it is gone nor ended for certain."""

    PREDECESSOR_UNKNOWN = "PredecessorUnknown"
    """An operator before this one had it, and nobody knows whether that process has ended."""

    EXPORTABLE = "Exportable"
    """The key that wraps it may have been taken out of the KMS, so its word is not enough."""

    ANOTHER_KMS = "AnotherKms"
    """The KMS that answers is not the one that wrapped it, so what it lacks proves nothing."""

    STILL_THERE = "StillThere"
    """The KMS was told to delete the key that wraps it, and still has it."""


@dataclass(frozen=True, slots=True)
class Destruction:
    """Whether no copy of a key exists: `confirmed` by whom and when, otherwise `why_not`.

    `evidence` is what was seen, in words that reveal nothing: for those who look into it later.
    """

    custody: KeyCustody
    confirmed: Word | None
    why_not: Undestroyed | None = None
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless it is either confirmed or says why not."""
        if (self.confirmed is None) == (self.why_not is None):
            raise ValueError("a key's end is confirmed, or there is a reason why it is not")


class LetGo(StrEnum):
    """How a holder's copy of a key ended."""

    SAID = "Said"
    """The process says so: a pod under a revision that does not name the key, an operator when it overwrote its own."""

    ENDED = "Ended"
    """The kubelet reported all of its containers as ended: memory and memory volumes went with them."""


@dataclass(frozen=True, slots=True)
class Release:
    """When and how a holder's copy ended. `holder` is the uid of its pod, or the name of an operator's."""

    holder: str
    how: LetGo
    at: str
