"""The garbage collector rests while the process starts, and never for long."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from kvstrata.cli import garbage


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*thresholds)


async def test_the_collector_rests_until_the_start_is_over_and_leaves_alone_what_was_made_by_then() -> None:
    started = False
    garbage.rest()
    waiting = asyncio.create_task(garbage.resume_after_start(lambda: started))
    await asyncio.sleep(0)
    assert not gc.isenabled()
    started = True
    await waiting
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000


async def test_the_collector_works_again_in_a_process_that_never_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "AT_MOST_S", 0.0)
    garbage.rest()
    await garbage.resume_after_start(lambda: False)
    assert gc.isenabled()


async def test_the_collector_works_again_when_the_process_ends_early() -> None:
    garbage.rest()
    waiting = asyncio.create_task(garbage.resume_after_start(lambda: False))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert gc.isenabled()
