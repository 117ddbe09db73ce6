"""What is done beside the loop: once at a time for each slot, and a defect in it is told and not lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvstrata.model.refs import Key
from kvstrata.reconcile import background, metrics
from kvstrata.reconcile.background import RETRY_S, Background, clock_problem, utc_now
from kvstrata.reconcile.queue import WorkQueue

KEY = Key("CachedModel", "team-a", "tiny")


class Errands(Background):
    """Does what it is told."""

    def __init__(self) -> None:
        super().__init__(WorkQueue(lambda: 0.0))
        self.done = 0

    def begin(self, slot: str, work: Coroutine[Any, Any, None]) -> None:
        self._begin(slot, work, "an errand failed", KEY)

    async def end(self, slot: str) -> None:
        await self._end(slot)

    async def over(self) -> None:
        async with asyncio.timeout(30):
            while self._tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def hang(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.done += 1

    async def count(self) -> None:
        self.done += 1


async def test_a_slot_is_taken_until_its_work_has_ended() -> None:
    errands = Errands()
    for _ in range(3):
        errands.begin("one", errands.count())
    errands.begin("other", errands.count())
    await errands.over()
    assert errands.done == 2
    errands.begin("one", errands.count())
    await errands.over()
    assert errands.done == 3


async def test_a_defect_is_logged_and_counted_and_its_object_planned_again(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("a defect")

    def counted() -> float:
        found: float = metrics.FAILURES.labels(KEY.kind, "Bug")._value.get()
        return found

    errands, before = Errands(), counted()
    errands.begin("one", fail())
    await errands.over()
    assert [(one.message, str(one.exc_info and one.exc_info[1])) for one in caplog.records] == [
        ("an errand failed", "a defect")
    ]
    assert counted() == before + 1
    assert errands._queue._due == {KEY: RETRY_S}


async def test_who_leaves_or_ends_a_slot_waits_until_its_work_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    async with Errands() as errands:
        for slot in ("one", "other"):
            errands.begin(slot, errands.hang())
        await asyncio.sleep(0)
        await errands.end("one")
        assert errands.done == 1
        await errands.end("one")
    assert errands.done == 2
    assert caplog.records == []
    assert errands._queue._due == {}


async def test_what_is_woken_by_the_end_of_work_may_begin_the_same_work_again() -> None:
    errands, woken = Errands(), asyncio.Event()

    async def wake() -> None:
        woken.set()

    errands.begin("one", wake())
    await woken.wait()
    errands.begin("one", errands.count())
    await errands.over()
    assert errands.done == 1


@pytest.mark.parametrize("hours", [5, -5])
def test_a_jump_of_the_wall_clock_moves_no_deadline_and_restarts_the_operator(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    class Jumped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(hours=hours)

    assert clock_problem() is None
    monkeypatch.setattr(background, "datetime", Jumped)
    assert abs(utc_now() - datetime.now(UTC)) < timedelta(seconds=60)
    assert clock_problem() == f"the wall clock was set by {hours * 3600} s"
