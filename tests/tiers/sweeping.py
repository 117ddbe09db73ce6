"""A tier's sweeper, worked by hand."""

from __future__ import annotations

import time
from typing import TypeVar

from kvstrata_sidecar.adapter.redis.client.resp import Transport
from kvstrata_sidecar.adapter.redis.sweep.reclaim import ReclaimCapacity
from kvstrata_sidecar.adapter.redis.sweep.scopes import SweepScopes
from kvstrata_sidecar.adapter.redis.tier import Tier

J = TypeVar("J")


def stop(tier: Tier) -> None:
    """End the thread of a tier's sweeper, so that it does what a test has it do, and nothing else."""
    tier._sweeper.close()
    tier._sweeper.join(60)
    assert not tier._sweeper.is_alive()
    tier._deps.inbox.closed = False


def sweep(tier: Tier, keyspace: str, *, audit: bool | None = None) -> None:
    """Sweep a scope now, if the policy allows the tier for it."""

    def run(transport: Transport, keyspace: str) -> None:
        if job_of(tier, SweepScopes).sweep(transport, keyspace, audit=audit):
            tier._deps.inbox.urge(keyspace)

    with tier._sweeper._turning:
        assert not tier._sweeper._connection.attempt(keyspace, run), "the sweep failed"


def sweep_all(tier: Tier) -> None:
    """Do what is due once an interval; a turn that a busy machine makes too long leaves the rest to the next."""
    make_due(tier, time.monotonic())
    while tier._sweeper.turn():
        pass


def make_due(tier: Tier, at_s: float) -> None:
    """Have what is due once an interval be due at a moment."""
    for job in tier._sweeper._jobs:
        if isinstance(job, SweepScopes | ReclaimCapacity):
            job.due_s = at_s


def job_of(tier: Tier, kind: type[J]) -> J:
    return next(job for job in tier._sweeper._jobs if isinstance(job, kind))
