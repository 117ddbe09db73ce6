"""The jobs of a tier's sweeper."""

from __future__ import annotations

from functools import partial

from kvstrata_sidecar.adapter.redis.client.commands import Transport
from kvstrata_sidecar.adapter.redis.client.resp import Command, ReplyError
from kvstrata_sidecar.adapter.redis.deps import TierDeps
from kvstrata_sidecar.adapter.redis.sweep.apply_policy import ApplyPolicy
from kvstrata_sidecar.adapter.redis.sweep.audit_leases import AuditLeases
from kvstrata_sidecar.adapter.redis.sweep.reclaim import ReclaimCapacity
from kvstrata_sidecar.adapter.redis.sweep.scopes import SweepScopes
from kvstrata_sidecar.adapter.redis.sweep.sweeper import Deadline, Job, SweeperConnection


class FlushInbox:
    """Sends touches of blocks and abandoned reservations."""

    def __init__(self, deps: TierDeps) -> None:
        self._inbox = deps.inbox

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:  # noqa: ARG002
        for keyspace, command in self._inbox.take_commands():
            connection.attempt(keyspace, partial(_send, command=command))
        return False


def _send(transport: Transport, _: str, command: Command) -> None:
    try:
        transport.ask([command])
    except ReplyError as error:
        if error.code != "OOM":  # a full server takes no touches
            raise


def jobs_of(deps: TierDeps, apply_policy: ApplyPolicy) -> list[Job]:
    """Return the jobs of a tier in the order of a turn."""
    leases = AuditLeases(deps)
    capacity_bytes = deps.tier.capacity_bytes
    reclaim = None if capacity_bytes is None else ReclaimCapacity(deps, apply_policy.changes, capacity_bytes)
    sweep = SweepScopes(deps, leases, lambda: None if reclaim is None else reclaim.request())
    return [FlushInbox(deps), apply_policy, leases, *([] if reclaim is None else [reclaim]), sweep]
