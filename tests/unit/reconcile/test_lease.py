"""Leadership: at any instant at most one, whatever the contenders' clocks and network do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest

from kvstrata.clients import lease as module
from kvstrata.clients.kube import KubeError
from kvstrata.clients.lease import Lease, WentBackError
from kvstrata.clients.resources import Resource
from tests.support.amounts import seeds
from tests.support.memory_kube import MemoryKube
from tests.support.virtual_time import in_virtual_time


class Network(MemoryKube):
    """The API server as one contender sees it: slow, failing or cut off as the test says."""

    def __init__(self, server: MemoryKube, chance: random.Random) -> None:
        super().__init__(server.api)
        self._server, self._chance = server, chance
        self.cut = self.hang = False
        self.trouble = 0.0

    async def _travel(self) -> None:
        if self.hang:
            await asyncio.sleep(3600)
        await asyncio.sleep(self._chance.random())
        if self.cut or self._chance.random() < self.trouble:
            raise KubeError(0, "Cut", "no answer")

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """Ask, slowly."""
        await self._travel()
        return await self._server.get(resource, namespace, name)

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write; the answer may be lost although the write was not."""
        await self._travel()
        written = await self._server.create(resource, namespace, body)
        await self._travel()
        return written

    async def replace(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write; the answer may be lost although the write was not."""
        await self._travel()
        written = await self._server.replace(resource, namespace, body)
        await self._travel()
        return written


class Contender:
    """One operator that leads when it can. Its clock has an offset and drifts a little."""

    def __init__(self, name: str, server: MemoryKube, seed: int, leaders: set[str]) -> None:
        chance = random.Random(seed)
        self.network = Network(server, chance)
        offset, drift = chance.uniform(-1e6, 1e6), chance.uniform(0.98, 1.02)
        clock = asyncio.get_running_loop().time
        self.lease = Lease(self.network, "ns", "lease", name, lambda: offset + clock() * drift)
        self.name, self.leaders = name, leaders
        self.terms: list[int] = []

    async def run(self) -> None:
        """Contend for ever."""
        while True:
            self.terms.append(await self.lease.acquire())
            assert not self.leaders, f"{self.name} leads beside {self.leaders}"
            self.leaders.add(self.name)
            try:
                await self.lease.hold()
            finally:
                self.leaders.discard(self.name)


async def _contend(seed: int, trouble: float, seconds: float) -> tuple[list[Contender], MemoryKube]:
    server, leaders = MemoryKube(), set[str]()
    contenders = [Contender(f"operator-{n}", server, seed * 10 + n, leaders) for n in range(3)]
    for contender in contenders:
        contender.network.trouble = trouble
    tasks = [asyncio.create_task(contender.run()) for contender in contenders]
    chance = random.Random(seed)
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        await asyncio.sleep(chance.uniform(3, 12))
        victim = chance.choice(contenders).network
        victim.cut, victim.hang = chance.choice([(True, False), (False, True), (False, False), (False, False)])
    done = [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    return contenders, server


@pytest.mark.parametrize("seed", seeds(4))
@in_virtual_time
async def test_at_most_one_leads_at_any_instant(seed: int) -> None:
    contenders, _ = await _contend(seed, trouble=0.1, seconds=250)
    terms = [term for contender in contenders for term in contender.terms]
    assert terms


@in_virtual_time
async def test_terms_grow_with_every_change_of_holder() -> None:
    contenders, server = await _contend(99, trouble=0.0, seconds=200)
    terms = [term for contender in contenders for term in contender.terms]
    by_holder = {(c.name, term) for c in contenders for term in c.terms}
    assert len({term for _, term in by_holder}) == len(by_holder), "two holders had one term"
    assert server.objects[("Lease", "ns", "lease")]["spec"]["leaseTransitions"] >= max(terms)


@in_virtual_time
async def test_a_released_lease_is_taken_at_once() -> None:
    server = MemoryKube()
    clock = asyncio.get_running_loop().time
    one = Lease(server, "ns", "lease", "one", clock)
    two = Lease(server, "ns", "lease", "two", clock)
    assert await one.acquire() == 1
    assert not await two._try_once()
    await one.release()
    assert await asyncio.wait_for(two.acquire(), 1) == 2


@in_virtual_time
async def test_a_renewal_that_hangs_ends_leadership_before_the_lease_expires() -> None:
    server = MemoryKube()
    network = Network(server, random.Random(1))
    start = asyncio.get_running_loop().time()
    lease = Lease(network, "ns", "lease", "one", lambda: asyncio.get_running_loop().time() - start)
    await lease.acquire()
    renewed = lease._renewed_at
    network.cut = True
    holding = asyncio.create_task(lease.hold())
    await asyncio.sleep(9.0)
    network.cut, network.hang = False, True
    await asyncio.wait_for(holding, 30)
    led_s = asyncio.get_running_loop().time() - start - renewed
    assert led_s < module.DURATION_S


@in_virtual_time
async def test_a_conflict_of_the_holder_with_its_own_write_ends_nothing_and_a_successor_does() -> None:
    server = MemoryKube()
    now = 0.0
    holder = Lease(server, "ns", "lease", "a", lambda: now)
    await holder.acquire()
    conflicts = 1

    def refuse(verb: str, kind: str, name: str) -> None:
        nonlocal conflicts
        if verb == "replace" and conflicts:
            conflicts -= 1
            raise KubeError(409, "Conflict", "another write was faster")

    server.before_write = refuse
    with pytest.raises(KubeError):
        await holder._try_once()
    assert await holder._try_once()
    now += 20
    other = Lease(server, "ns", "lease", "b", lambda: now)
    assert not await other._try_once()
    now += 20
    assert await other._try_once()
    assert not await holder._try_once()


@pytest.mark.parametrize("bumped", [False, True])
@in_virtual_time
async def test_a_holder_ends_when_the_api_server_shows_its_lease_as_it_was_before(bumped: bool) -> None:
    server = MemoryKube()
    lease = Lease(server, "ns", "kvstrata", "a", asyncio.get_running_loop().time)
    await lease.acquire()
    slot = ("Lease", "ns", "kvstrata")
    backup = server.objects[slot]
    await lease._try_once()
    version = "10000" if bumped else backup["metadata"]["resourceVersion"]
    server.api.objects[slot] = {**backup, "metadata": {**backup["metadata"], "resourceVersion": version}}
    async with asyncio.timeout(20):
        await lease.hold()
    assert not lease.held


@in_virtual_time
async def test_one_that_waits_starts_anew_when_the_lease_is_older_than_before() -> None:
    server = MemoryKube()
    holder = Lease(server, "ns", "kvstrata", "a", asyncio.get_running_loop().time)
    await holder.acquire()
    backup = server.objects[("Lease", "ns", "kvstrata")]
    await holder._try_once()
    waiting = Lease(server, "ns", "kvstrata", "b", asyncio.get_running_loop().time)
    acquiring = asyncio.create_task(waiting.acquire())
    await asyncio.sleep(0.05)
    server.api.objects[("Lease", "ns", "kvstrata")] = backup
    async with asyncio.timeout(10):
        with pytest.raises(WentBackError):
            await acquiring
