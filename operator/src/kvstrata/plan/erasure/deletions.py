"""Deletions from shared tiers: the protocol orders them per primary; a Job covers a whole tier and reports each
primary.

A running deletion is recorded before its Job is created, so that a new leader finds the Job by its round. Jobs report
totals since the keyspaces were revoked; a fact holds its own Job's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from kvstrata.contract.messages.erase_report import Erased, Line, PrimaryEnd, totals
from kvstrata.contract.receipt.facts import NOTHING, Amount
from kvstrata.model.erasure.facts import Deletion, JobState
from kvstrata.model.erasure.record import Erasure, TierNow

NOT_MADE = "not-made"
"""Stands for the uid of a Job that is about to be created."""


@dataclass(frozen=True, slots=True)
class DeletionRun:
    """State of a Job. `job` is its uid, which no later Job has.

    `DONE` means a report that ends with `Outcome.ERASED` and exit code 0; any other end is `FAILED`. `lines` is the
    readable part of the report (empty while the Job runs), `ended` the pod's end by the kubelet's clock. `problem` is
    the failure, or why a running Job does not start (a quota, an image that cannot be pulled); it holds no keyspace and
    no secret. `begun` is False for a Job left incomplete by a process that died; `start` completes it. `image` is the
    digest of its image, once its program ended.
    """

    job: str
    state: JobState
    ended: datetime | None = None
    lines: tuple[Line, ...] = ()
    problem: str = ""
    begun: bool = True
    image: str = ""


def running(erasure: Erasure) -> list[tuple[str, int]]:
    """Return tier and round of each Job not known to be over."""
    return sorted({(one.tier, one.round) for one in erasure.of(Deletion) if one.state is JobState.RUNNING})


def begun(erasure: Erasure, ordered: Iterable[str], tiers: Mapping[str, TierNow], now: datetime) -> Iterator[Deletion]:
    """Yield facts of new deletions: one Job for each of the ordered tiers, unless one runs there."""
    for tier in sorted(set(ordered) - {tier for tier, _ in running(erasure)}):
        primaries = tiers[tier].primaries
        round = 1 + max((one.round for one in erasure.of(Deletion, tier)), default=0)
        for node in primaries:
            yield Deletion(tier, node, round, NOT_MADE, JobState.RUNNING, now, len(primaries))


def over(erasure: Erasure, tier: str, round: int, run: DeletionRun, now: datetime) -> Iterator[Deletion]:
    """Yield the results of a finished Job, for each primary that it was to empty and each that it reports."""
    begun = {one.node: one for one in erasure.of(Deletion, tier) if one.round == round}
    if not begun:
        return
    began = min(one.began for one in begun.values())
    if run.state is not JobState.DONE:
        for _, one in sorted(begun.items()):
            yield _failed(one, run, now, run.problem or "the deletion failed")
        return
    lines = [line for line in run.lines if isinstance(line, Erased)]
    ends = {line.node: line for line in run.lines if isinstance(line, PrimaryEnd)}
    for node in sorted(begun.keys() - ends.keys()):
        yield _failed(begun[node], run, now, "its deletion does not report it: it has lost its slots")
    for node, end in sorted(ends.items()):
        before = [one for one in erasure.of(Deletion, tier, node) if one.state is JobState.DONE]
        found, deleted, remaining = totals(lines, node)
        # Where keyspaces stay in use, no tombstone remembers the deletions of earlier runs.
        earlier = sum((one.deleted for one in before), NOTHING) if erasure.order.prefix is None else NOTHING
        yield Deletion(
            tier, node, round, run.job, JobState.DONE, began, len(ends), now,
            found=_less(found, earlier), deleted=_less(deleted, earlier), remaining=remaining,
            replicas=end.replicas, replicas_in_step=end.replicas_in_step, image=run.image,
        )  # fmt: skip


def _failed(one: Deletion, run: DeletionRun, now: datetime, problem: str) -> Deletion:
    return replace(one, job=run.job or NOT_MADE, state=JobState.FAILED, ended=now, problem=problem, image=run.image)


def _less(amount: Amount, earlier: Amount) -> Amount:
    return Amount(max(0, amount.keys - earlier.keys), max(0, amount.bytes - earlier.bytes))
