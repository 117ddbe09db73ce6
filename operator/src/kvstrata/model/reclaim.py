"""The cache of an identity that a model had before, and how far its deletion is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.wire import digest
from kvstrata.model.erasure.facts import NOTHING, JobState

ORDER_HEX_DIGITS = 32


@dataclass(frozen=True, slots=True)
class FormerCache:
    """What pods of a model cached under an identity that none of them has had since a moment.

    An identity may come back and be replaced again: then it is another former cache, with a deletion of its own.
    """

    model: str
    uid: str
    identity: str
    since: datetime

    @property
    def order(self) -> str:
        """What stands for it in names and labels: the same for whoever leads, and for nothing else."""
        return digest([self.uid, self.identity, format_timestamp(self.since)])[:ORDER_HEX_DIGITS]


@dataclass(frozen=True, slots=True)
class ReclaimReport:
    """How a round of the deletion of a former cache stands, `at` a moment.

    `message` is for people. `deleted` is what the round deleted as far as its Jobs told; it is not known before the
    round is over.
    """

    cache: FormerCache
    state: JobState
    at: datetime
    message: str = ""
    deleted: Amount = NOTHING
