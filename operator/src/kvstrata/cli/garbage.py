"""Python's garbage collector at the start of the process.

What a start makes (modules, the world as it was listed, the first plans) stays, and the collector would walk through it
again and again while it grows: a third of what a start costs. So it rests meanwhile, and leaves alone for good what was
there when it begins: then a collection in a large world takes no time either.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

AT_MOST_S = 30.0
"""How long the collector rests, also in a process that only waits for its turn to lead."""
LOOK_EVERY_S = 0.25
THRESHOLDS = (20_000, 20, 20)
"""A decoded list makes thousands of containers that are no garbage, for which Python's 700 are meant too small."""


def rest() -> None:
    """Let the collector rest until `resume`."""
    gc.disable()


def resume() -> None:
    """Let the collector work, except on what there is now."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


async def resume_after_start(started: Callable[[], bool]) -> None:
    """Resume when `started` says so, and AT_MOST_S seconds from now at the latest."""
    try:
        async with asyncio.timeout(AT_MOST_S):
            while not started():  # noqa: ASYNC110  (nothing tells that a queue has run empty)
                await asyncio.sleep(LOOK_EVERY_S)
    except TimeoutError:
        pass
    finally:
        resume()
