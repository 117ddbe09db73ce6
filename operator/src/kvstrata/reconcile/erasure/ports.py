"""What erasures need of others: Jobs that delete from tiers, and the chain of receipts.

Every call may be repeated, by this process or by the next leader, and comes to the same. None of them decides whether
this process leads: callers ask before each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from kvstrata.api.cachedomain import ReceiptChain
from kvstrata.api.cachetier import CacheTier
from kvstrata.contract.messages.erase_report import Line
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.model.erasure.facts import JobState
from kvstrata.plan.erasure.receipt_chain import ChainConflict, Receipted


@dataclass(frozen=True, slots=True)
class TierDeletion:
    """The deletion of keyspaces from all primaries of a tier, which one Job carries out.

    `erasure` is the uid of what was ordered, `round` counts the Jobs for this tier from 1: with the tier's name they
    name the Job. `domain` is the domain's id, `revision` one since which no bundle of it has the keyspaces. `strays`
    are names of values without an index, from a look that found them. With `identities` the keyspaces stay in use, and
    only what was computed under one of these cache identities goes; with `chunks` they are in use again afterwards, and
    only these go.
    """

    erasure: str
    tier: CacheTier
    round: int
    domain: str
    revision: int
    keyspaces: tuple[str, ...]
    strays: tuple[str, ...] = ()
    identities: tuple[str, ...] = ()
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeletionRun:
    """How a Job stands. `job` is its uid, which no later Job has.

    `DONE` is a report that ends with `Outcome.ERASED` and exit code 0, and nothing else; a Job that is over in any
    other way has `FAILED`. `lines` is what it reported as far as it can be read (empty while it runs), `ended` when its
    pod ended, by the kubelet's clock. `problem` says what went wrong, or why a Job that runs does not begin (a quota,
    an image that cannot be pulled); empty if all is well. It holds no keyspace and no secret. `begun` is False of a Job
    that was not made to its end: whoever made it died meanwhile, and it begins when it is started again.
    """

    job: str
    state: JobState
    ended: datetime | None = None
    lines: tuple[Line, ...] = ()
    problem: str = ""
    begun: bool = True


class DeletionJobs(Protocol):
    """Runs deletions as Jobs in the operator's namespace."""

    async def start(self, order: TierDeletion) -> DeletionRun:
        """Have the Job of an order run; one of the same erasure, tier and round that exists is left as it is.

        Raises KubeError, and LookupError, whose text names the object, if a Secret by which the tier is reached or a
        key in it is missing.
        """

    async def look(self, erasure: str, tier: str, round: int) -> DeletionRun | None:
        """Return how a Job stands; None if there is none. A report that cannot be read (yet) is a problem of a Job that
        runs, not of one that failed, for as long as its pod's log may still come. Raises KubeError."""

    async def remove(self, erasure: str) -> None:
        """Remove every Job of an erasure with all that was made for it, running ones too. Raises KubeError."""


class ReceiptChains(Protocol):
    """Appends receipts to the chains of domains."""

    async def issue(
        self, namespace: str, domain: str, told: ReceiptChain | None, facts: Erasure
    ) -> Receipted | ChainConflict:
        """Append the receipt of an erasure to the chain of a domain (its id), or find the one that is there.

        `told` is what the CacheDomain's status says of the chain; to write what is returned there is the caller's.
        Returns only when the receipt is stored. Raises KubeError; what was written until then is found again.
        """
