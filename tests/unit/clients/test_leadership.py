"""A Lease that is renewed in a thread of its own: what keeps the process busy does not end its leadership, and what
hangs it does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from kvstrata.clients import lease as lease_module
from kvstrata.clients import lease as module
from kvstrata.clients.kube import Kube
from kvstrata.clients.lease import Leadership, Lease
from kvstrata.reconcile.background import since_boot_s
from tests.support.memory_kube import MemoryKube
from tests.support.worlds import finish

SCALE = 10.0
"""How much faster than life these tests renew."""
SHORT_S = lease_module.RENEW_DEADLINE_S / SCALE
"""How long a Lease is good for in the tests in which it runs out; the others leave it as it is."""
PATIENCE_S = 60.0

Contend = Callable[[str], Leadership]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Lease is looked at SCALE times more often."""
    for name in ("RENEW_EVERY_S", "RETRY_EVERY_S"):
        monkeypatch.setattr(lease_module, name, getattr(lease_module, name) / SCALE)
    monkeypatch.setattr(module, "TICK_EVERY_S", module.TICK_EVERY_S / SCALE)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Lease is good for SHORT_S, and a process that does not turn for that long counts as hung."""
    monkeypatch.setattr(lease_module, "RENEW_DEADLINE_S", SHORT_S)
    monkeypatch.setattr(module, "SILENT_LIMIT_S", SHORT_S)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the thread found when it asked whether the process turns. After a False no write of it is under way."""
    found: list[bool] = []
    look = Leadership._turns

    def turns(leader: Leadership) -> bool:
        found.append(look(leader))
        return found[-1]

    monkeypatch.setattr(Leadership, "_turns", turns)
    return found


@pytest.fixture
def server() -> MemoryKube:
    return MemoryKube()


def candidate(name: str, kube: Kube, fit: Callable[[], bool]) -> Lease:
    return Lease(kube, "ns", "lease", name, since_boot_s, fit)


@pytest.fixture
async def contend(server: MemoryKube) -> AsyncIterator[Contend]:
    """Makes contenders for one Lease; they give up at the end."""
    made: list[Leadership] = []

    async def connect() -> Kube:
        return server

    def make(name: str) -> Leadership:
        made.append(Leadership(connect, partial(candidate, name), since_boot_s))
        return made[-1]

    yield make
    for leadership in made:
        await leadership.release()


def _renewals(server: MemoryKube) -> int:
    return sum(1 for verb, kind, _ in server.log if kind == "Lease")


def _hang_for(seconds: float) -> None:
    """Let the caller's event loop not turn."""
    time.sleep(seconds)


def _hang_until(condition: Callable[[], bool]) -> None:
    """Let the caller's event loop not turn until `condition` holds."""
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


async def test_a_lease_is_renewed_during_one_long_stretch_of_work(server: MemoryKube, contend: Contend) -> None:
    leader = contend("one")
    await leader.acquire()
    # No await from here on: the work begins before the one who leads hears of anything more.
    before, ends = _renewals(server), time.monotonic() + PATIENCE_S
    while _renewals(server) < before + 5:
        assert time.monotonic() < ends, "nothing was renewed"
    assert leader.held
    holding = asyncio.create_task(leader.hold())
    await asyncio.sleep(SHORT_S)
    assert not holding.done()
    holding.cancel()


@pytest.mark.usefixtures("short")
async def test_a_process_that_hangs_renews_no_more_and_its_lease_runs_out(
    server: MemoryKube, contend: Contend, turns: list[bool]
) -> None:
    leader = contend("one")
    await leader.acquire()
    _hang_until(lambda: not leader.held and not turns[-1])
    told = _renewals(server)
    _hang_for(SHORT_S)
    assert _renewals(server) == told
    # It turns again, too late: it is told that it leads no more.
    await asyncio.wait_for(leader.hold(), PATIENCE_S)
    assert not leader.held


@pytest.mark.usefixtures("short")
async def test_a_process_that_hangs_does_not_take_the_lease(
    server: MemoryKube, contend: Contend, turns: list[bool]
) -> None:
    holder = Lease(server, "ns", "lease", "other", lambda: 0.0)
    await holder.acquire()
    waiting = asyncio.create_task(contend("one").acquire())
    await asyncio.sleep(SHORT_S / 2)
    turns.clear()
    _hang_until(lambda: turns.count(False) > 1)
    finish(holder._give_up())
    turns.clear()
    _hang_until(lambda: len(turns) > 5)
    assert server.objects[("Lease", "ns", "lease")]["spec"]["holderIdentity"] == ""
    assert await asyncio.wait_for(waiting, PATIENCE_S) == 2, "as soon as it turns again"


async def test_who_releases_renews_no_more_and_the_next_leads_at_once(server: MemoryKube, contend: Contend) -> None:
    leader, successor = contend("one"), contend("two")
    assert await leader.acquire() == 1
    waiting = asyncio.create_task(successor.acquire())
    await asyncio.sleep(SHORT_S)
    assert not waiting.done()
    await leader.release()
    assert await asyncio.wait_for(waiting, PATIENCE_S) == 2
    assert successor.held
    await asyncio.sleep(SHORT_S)
    assert server.objects[("Lease", "ns", "lease")]["spec"]["holderIdentity"] == "two"
    assert not leader.held


@pytest.mark.usefixtures("short")
async def test_to_cancel_the_holding_ends_the_renewals(server: MemoryKube, contend: Contend) -> None:
    leader = contend("one")
    await leader.acquire()
    holding = asyncio.create_task(leader.hold())
    await asyncio.sleep(SHORT_S / 2)
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        while leader.held:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_the_connection_is_made_in_the_thread_that_uses_it_and_its_failure_is_told() -> None:
    threads = []

    async def refuse() -> Kube:
        threads.append(threading.current_thread().name)
        raise OSError("no such file")

    leader = Leadership(refuse, partial(candidate, "one"), since_boot_s)
    with pytest.raises(OSError, match="no such file"):
        await leader.acquire()
    assert threads == ["lease"]
    assert not leader.held
    await leader.release()


async def test_who_never_contended_has_nothing_to_release(contend: Contend) -> None:
    leader = contend("one")
    await leader.release()
    assert not leader.held
