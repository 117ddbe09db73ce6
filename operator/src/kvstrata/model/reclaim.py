"""The cache under a former identity of a model, and the progress of its deletion."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.receipt.facts import NOTHING, Amount
from kvstrata.contract.wire import digest
from kvstrata.model.erasure.facts import JobState

ORDER_HEX_DIGITS = 32


@dataclass(frozen=True, slots=True)
class FormerCache:
    """Blocks cached under an identity that no pod has had since `since`; one that returns and goes makes another."""

    model: str
    uid: str
    identity: str
    since: datetime

    @property
    def order(self) -> str:
        return digest([self.uid, self.identity, format_timestamp(self.since)])[:ORDER_HEX_DIGITS]


@dataclass(frozen=True, slots=True)
class ReclaimReport:
    """Progress of one round of deleting a former cache. `deleted` is unknown before the round is over."""

    cache: FormerCache
    state: JobState
    at: datetime
    message: str = ""
    deleted: Amount = NOTHING
