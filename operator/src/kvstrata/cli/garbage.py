"""Garbage collection at the start: off, which saves a third of the time, then frozen for the long-lived objects."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

AT_MOST_S = 30.0
"""Also bounds a start that waits for leadership."""
LOOK_EVERY_S = 0.25
THRESHOLDS = (20_000, 20, 20)
"""One decoded list creates thousands of containers, more than Python's default threshold of 700."""


def rest() -> None:
    gc.disable()


def resume() -> None:
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


async def resume_after_start(started: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(AT_MOST_S):
            while not started():  # noqa: ASYNC110  (no event reports that a queue is empty)
                await asyncio.sleep(LOOK_EVERY_S)
    except TimeoutError:
        pass
    finally:
        resume()
