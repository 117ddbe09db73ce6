"""Jobs that delete from tiers, and chains of receipts. Calls may be repeated; callers check leadership first."""

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
    """The deletion of keyspaces from all primaries of a tier by one Job.

    `erasure` is the uid of the order, `round` counts the Jobs for this tier from 1; with the tier's name they name the
    Job. `domain` is the domain's id; since `revision` no bundle of it has the keyspaces. `strays` are names of values
    without an index, found by a look. With `identities` the keyspaces stay in use, and only blocks of these cache
    identities are deleted; with `chunks` they are in use again afterwards, and only these chunks are deleted.
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
    """State of a Job. `job` is its uid, which no later Job has.

    `DONE` means a report that ends with `Outcome.ERASED` and exit code 0; any other end is `FAILED`. `lines` is the
    readable part of the report (empty while the Job runs), `ended` the pod's end by the kubelet's clock. `problem` is
    the failure, or why a running Job does not start (a quota, an image that cannot be pulled); it holds no keyspace and
    no secret. `begun` is False for a Job left incomplete by a process that died; `start` completes it.
    """

    job: str
    state: JobState
    ended: datetime | None = None
    lines: tuple[Line, ...] = ()
    problem: str = ""
    begun: bool = True


class DeletionJobs(Protocol):
    async def start(self, order: TierDeletion) -> DeletionRun:
        """Start the Job of an order, or return the existing one of the same erasure, tier and round. Raises
        KubeError, and LookupError, which names the object, if a Secret of the tier or a key in it is missing."""

    async def look(self, erasure: str, tier: str, round: int) -> DeletionRun | None:
        """Return a Job's state; None if there is none. While the log may still arrive, an unreadable report leaves
        the Job running. Raises KubeError."""

    async def remove(self, erasure: str) -> None:
        """Delete every Job of an erasure with its objects, running ones too. Raises KubeError."""


class ReceiptChains(Protocol):
    async def issue(
        self, namespace: str, domain: str, told: ReceiptChain | None, facts: Erasure
    ) -> Receipted | ChainConflict:
        """Append an erasure's receipt to the chain of a domain (its id), or find the existing one. `told` is the
        chain in the CacheDomain's status; the caller writes the result there. Returns after the receipt is stored.
        Raises KubeError; a retry finds what was written."""
