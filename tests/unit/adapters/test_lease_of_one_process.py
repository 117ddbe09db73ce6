"""A Lease as one process sees it that froze, was started again, or ends."""

from __future__ import annotations

import asyncio

from kvstrata.adapters import lease as module
from kvstrata.adapters.lease import Lease
from tests.support.memory_kube import MemoryKube


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _spec(server: MemoryKube) -> dict[str, object]:
    spec: dict[str, object] = server.objects[("Lease", "ns", "lease")]["spec"]
    return spec


async def test_a_process_that_was_frozen_knows_at_once_that_its_lease_ran_out() -> None:
    server, clock = MemoryKube(), Clock()
    lease = Lease(server, "ns", "lease", "one", clock)
    assert not lease.held
    await lease.acquire()
    assert lease.held
    clock.now_s += module.RENEW_DEADLINE_S
    assert not lease.held
    assert module.RENEW_DEADLINE_S < module.DURATION_S, "a successor must not start before"


async def test_a_container_that_was_started_again_leads_at_once_and_with_a_term_of_its_own() -> None:
    server, clock = MemoryKube(), Clock()
    first = await Lease(server, "ns", "lease", "pod", clock).acquire()
    successor = Lease(server, "ns", "lease", "pod", clock)
    assert await asyncio.wait_for(successor.acquire(), 1) == first + 1
    assert await successor._try_once()
    assert successor.term == first + 1, "a renewal is no change of holder"


async def test_a_lease_that_ran_out_is_not_given_up_for_the_one_who_has_it_now() -> None:
    server, clock = MemoryKube(), Clock()
    lease = Lease(server, "ns", "lease", "one", clock)
    await lease.acquire()
    clock.now_s += module.DURATION_S + 1
    await lease.release()
    assert _spec(server)["holderIdentity"] == "one", "who froze does not touch it"
    clock.now_s -= module.DURATION_S
    await lease.release()
    assert _spec(server)["holderIdentity"] == ""
