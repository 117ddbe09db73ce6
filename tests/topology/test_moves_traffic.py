"""Shards come and go while pods use the tier: no error, no wrong byte, nothing lost, and the books add up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata_sidecar.adapter.params import Endpoint
from tests.tiers.conftest import gate, start  # noqa: F401  (fixtures)
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn
from tests.tiers.redis_cluster import until
from tests.tiers.server_kinds import ServerKind
from tests.tiers.sweeping import sweep
from tests.tiers.tier_driver import Driver, block
from tests.tiers.tier_on_cluster import all_closed, load_right, store_all
from tests.topology.mover_rig import Moved, MoverRig, total
from tests.topology.rig import Patience

pytestmark = pytest.mark.redis

KEPT = [block(KEYSPACE_A, number) for number in range(0, 256, 2)]
RENEWED = [block(KEYSPACE_A, number) for number in range(1, 256, 2)]
WINDOW_MS = 10_000
"""How long a block of an interrupted store lives, and how late a busy machine may commit one."""


@pytest.fixture
async def rig(tmp_path: Path, server_kind: ServerKind, few: int) -> AsyncIterator[MoverRig]:
    rig = MoverRig(tmp_path, server_kind.command(), shards=few, replicas=0)
    rig.start()
    await rig.made_anew(few)
    yield rig
    await rig.nodes.close()
    rig.close()


class Traffic:
    """A pod that reads what is there, and one that deletes and stores again, until the end.

    What is `asked` for and `missed` counts as long as the reader's map names all servers that there are.
    """

    def __init__(self, rig: MoverRig, reader: Driver, writer: Driver) -> None:
        self.problems: list[BaseException] = []
        self.rounds = {"read": 0, "written": 0}
        self.asked = self.missed = 0
        self._rig = rig
        self._reader, self._writer = reader, writer
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=[work]) for work in (self._read, self._write)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    async def go_on(self, rounds: int = 10) -> None:
        """Wait until reader and writer have done so many more rounds, and some of them count."""
        before, asked, patience = dict(self.rounds), self.asked, Patience()
        while self.asked == asked or any(self.rounds[one] < before[one] + rounds for one in before):
            assert not self.problems, self.problems
            patience.ask(dict(self.rounds))
            await asyncio.sleep(0.01)

    def _run(self, work: Callable[[int], None]) -> None:
        try:
            number = 0
            while not self._ended.is_set():
                work(number)
                number += 1
                self._ended.wait(0.01)  # the mover runs in this process, too
        except BaseException as problem:
            self.problems.append(problem)

    def _read(self, number: int) -> None:
        some, known = KEPT[number % 16 :: 16], self._reader.tier.nodes().keys()
        assert self._reader.lookup(some) is not None
        hits = load_right(self._reader, some)
        if {f"{pod.ip}:{self._rig.port}" for pod in tuple(self._rig.pods.values())} <= known:
            self.asked += len(some)
            self.missed += len(some) - sum(hits)
        load_right(self._reader, RENEWED[number % 32 :: 32])
        self.rounds["read"] += 1

    def _write(self, number: int) -> None:
        some = RENEWED[number % 32 :: 32]
        self._writer.tier.delete(some)
        store_all(self._writer, some)
        self.rounds["written"] += 1


@pytest.mark.on_every_server
@pytest.mark.parametrize(("few", "many"), [(3, 4), (1, 3)])
async def test_shards_come_and_go_under_traffic_and_nothing_is_lost(
    rig: MoverRig,
    few: int,
    many: int,
    start: Callable[..., Driver],  # noqa: F811
    gate: GateStandIn,  # noqa: F811
) -> None:
    endpoints = (Endpoint(str(rig.pod(0, 0).ip), rig.port),)
    options: dict[str, Any] = {"endpoints": endpoints, "cluster": True, "workers": 2, "window_ms": WINDOW_MS}
    reader, writer = (start(rig.port, **options) for _ in range(2))
    gate.allow(KEYSPACE_A)
    for driver in (reader, writer):
        await asyncio.to_thread(all_closed, driver, few)
    assert await asyncio.to_thread(store_all, writer, KEPT) == len(KEPT)

    with Traffic(rig, reader, writer) as traffic:
        await traffic.go_on()
        await rig.scale(many)
        await rig.settled(rig.mover(pause=asyncio.sleep))
        assert len({await rig.owner(slot) for slot in range(0, 16_384, 512)}) == many
        await traffic.go_on()
        await rig.scale(few)
        rig.removes = False  # a server that goes is another matter than slots that go
        await rig.settled(rig.mover(pause=asyncio.sleep))
        assert rig.steps[-1].drained == tuple(range(few, many))
    assert not traffic.problems, traffic.problems
    # Without TLS a new server is not asked before the map names it; all else can be read all the time.
    assert traffic.missed * 50 < traffic.asked
    for driver in (reader, writer):
        assert driver.tier.state().errors == 0, driver.tier.state()
    assert total(rig.reports) == Moved(2 * (16_384 * (many - few) // many), 0)

    # A store that was interrupted is in the way of the next until its window ends.
    await asyncio.to_thread(until, lambda: store_all(writer, RENEWED) >= 0 and all(load_right(reader, RENEWED)))
    await asyncio.to_thread(sweep, writer.tier, KEYSPACE_A, audit=True)
    drift = {name: count for name, count in writer.tier.counters().items() if name.startswith("drift_") and count}
    assert not drift
    assert await asyncio.to_thread(load_right, reader, KEPT) == [1] * len(KEPT)
    assert await asyncio.to_thread(load_right, reader, RENEWED) == [1] * len(RENEWED)
    rig.removes = True
    await rig.settled()
    await rig.assert_whole()
