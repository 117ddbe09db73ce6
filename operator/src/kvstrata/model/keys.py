"""What is reported of the end of a data key."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstrata.contract.receipt.facts import Word


class Undestroyed(StrEnum):
    """Why a KMS does not confirm that what wraps a key is gone."""

    CUSTODY_CANNOT_KNOW = "CustodyCannotKnow"
    """There is no record of which KMS wrapped it."""

    NOT_REVOKED = "NotRevoked"
    """Its record still holds it."""

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

    confirmed: Word | None
    why_not: Undestroyed | None = None
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless it is either confirmed or says why not."""
        if (self.confirmed is None) == (self.why_not is None):
            raise ValueError("a key's end is confirmed, or there is a reason why it is not")
