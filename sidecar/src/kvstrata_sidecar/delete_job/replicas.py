"""Waits until a primary's replicas confirm all its writes."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.contract.messages.erase_report import StopReason
from kvstrata_sidecar.delete_job.servers import Primary, Servers, StoppedError

PATIENCE_S = 30.0
POLL_S = 0.1


def await_replicas(
    servers: Servers,
    primary: Primary,
    told: Callable[[int, int], None],
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Report the counts of replicas and of confirming ones to `told`, until all confirm. Raises StoppedError if they do
    not in time."""
    written = servers.written(primary)
    give_up_at_s = clock() + PATIENCE_S
    while True:
        replicas, in_step = servers.in_step(primary, written)
        told(replicas, in_step)
        if in_step >= replicas:
            return
        if clock() >= give_up_at_s:
            late = f"{replicas - in_step} of {replicas} replicas do not confirm"
            raise StoppedError(StopReason.REPLICAS_BEHIND, f"{primary.address}: {late}")
        sleep(POLL_S)
