"""A Lease as one process sees it that froze, was started again, or ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest

from kvstrata.clients import lease as module
from kvstrata.clients.lease import Lease
from kvstrata.clients.resources import LEASE, Resource
from tests.support.memory_kube import MemoryKube
from tests.support.virtual_time import in_virtual_time


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


@in_virtual_time
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


class SlowReads(MemoryKube):
    """An API server whose answers to reads take `delay_s` seconds of a clock, after it looked."""

    def __init__(self, clock: Clock, delay_s: float) -> None:
        super().__init__()
        self._clock, self.delay_s = clock, delay_s

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """Read, and answer late."""
        self._clock.now_s += self.delay_s
        return await super().get(resource, namespace, name)


async def test_a_slow_read_takes_nothing_of_a_new_leaders_time() -> None:
    clock = Clock()
    lease = Lease(SlowReads(clock, module.RENEW_DEADLINE_S - 1), "ns", "lease", "one", clock)
    await lease.acquire()
    clock.now_s += module.RENEW_EVERY_S
    assert lease.held


async def test_a_contender_counts_from_when_it_saw_a_renewal_not_from_when_it_asked() -> None:
    clock = Clock()
    server = SlowReads(clock, 0.0)
    leader, contender = (Lease(server, "ns", "lease", name, clock) for name in ("one", "two"))
    await leader.acquire()
    # The renewal falls into the time that the contender's read takes.
    server.delay_s = module.DURATION_S - 1
    assert not await contender._try_once()
    server.delay_s = 0.0
    renewed_at = clock.now_s
    clock.now_s = renewed_at + module.DURATION_S - 1
    assert not await contender._try_once()
    clock.now_s = renewed_at + module.DURATION_S
    assert await contender._try_once()


class HangsOnce(MemoryKube):
    """An API server that never answers one write, when told to."""

    hangs = False
    hung = 0

    async def replace(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write, or never answer."""
        if self.hangs:
            self.hangs = False
            self.hung += 1
            await asyncio.Event().wait()
        return await super().replace(resource, namespace, body)


async def test_after_one_renewal_that_hangs_there_is_time_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.RENEW_DEADLINE_S - 2 * module.RENEW_EVERY_S - module.ATTEMPT_TIMEOUT_S >= 1.0
    monkeypatch.setattr(module, "RENEW_EVERY_S", module.RENEW_EVERY_S / 10)
    monkeypatch.setattr(module, "ATTEMPT_TIMEOUT_S", module.ATTEMPT_TIMEOUT_S / 10)
    server = HangsOnce()
    lease = Lease(server, "ns", "lease", "one", time.monotonic)
    await lease.acquire()
    server.hangs = True
    holding = asyncio.create_task(lease.hold())
    renewals = len(server.log)
    while len(server.log) < renewals + 2:
        assert not holding.done(), "the deadline passed while one renewal hung"
        await asyncio.sleep(0.05)
    assert server.hung == 1
    holding.cancel()


class CountedReads(MemoryKube):
    """An API server that counts what is asked of it."""

    reads = 0

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """Read."""
        self.reads += 1
        return await super().get(resource, namespace, name)


async def test_a_renewal_is_one_request_and_never_overwrites_what_another_wrote() -> None:
    server, clock = CountedReads(), Clock()
    lease = Lease(server, "ns", "lease", "one", clock)
    await lease.acquire()
    reads = server.reads
    assert await lease._try_once()
    assert await lease._try_once()
    assert server.reads == reads
    clock.now_s += module.DURATION_S + 1
    other = Lease(server, "ns", "lease", "two", lambda: clock.now_s)
    assert not await other._try_once()
    clock.now_s += module.DURATION_S + 1
    assert await other._try_once()
    assert not await lease._try_once()
    assert not await lease._try_once(), "it reads whose the Lease is"
    assert _spec(server)["holderIdentity"] == "two"


@pytest.mark.parametrize("released", [True, False])
async def test_another_release_in_the_namespace_waits_and_names_the_first(
    released: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server, clock = MemoryKube(), Clock()
    first = Lease(server, "ns", "lease", "one", clock, release="a")
    second = Lease(server, "ns", "lease", "two", clock, release="b")
    await first.acquire()
    assert not await second._try_once()
    assert not await second._try_once()
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "another Helm release has this namespace" in record.message
    assert (record.release, record.leader) == ("a", "one")  # type: ignore[attr-defined]
    if released:
        await first.release()
        assert not await second._try_once(), "the first's other pod may follow"
    clock.now_s += 24 * 3600
    assert not await second._try_once(), "time ends no release"
    lease = await server.get(LEASE, "ns", "lease")
    assert lease is not None
    await server.replace(LEASE, "ns", {**lease, "metadata": {**lease["metadata"], "annotations": {}}})
    await second._try_once()
    clock.now_s += module.DURATION_S
    assert await second._try_once(), "one that was uninstalled, or released by a person, is followed"
    assert not await first._try_once()


async def test_a_pod_that_stands_by_logs_for_whom_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    server, clock = MemoryKube(), Clock()
    await Lease(server, "ns", "lease", "one", clock, release="a").acquire()
    other = Lease(server, "ns", "lease", "two", clock, release="a")
    for _ in range(3):
        assert not await other._try_once()
    assert [one.leader for one in caplog.records if one.message == "standing by"] == ["one"]  # type: ignore[attr-defined]


async def test_a_lease_of_a_version_without_releases_is_followed_as_before() -> None:
    server, clock = MemoryKube(), Clock()
    first = Lease(server, "ns", "lease", "one", clock)
    await first.acquire()
    await first.release()
    assert await Lease(server, "ns", "lease", "two", clock, release="b")._try_once()
