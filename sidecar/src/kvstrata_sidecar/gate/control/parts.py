"""Shared by all work for the operator: the gate's parts, refusals, waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvstrata_sidecar.gate.adapter_link import AdapterLink
from kvstrata_sidecar.gate.http.engine_client import EnginePool
from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.policy.enforcement import Enforcement

T = TypeVar("T")

later = partial(Refusal, 503, Reason.ENGINE, retry_after_s=5)


@dataclass(frozen=True, slots=True)
class Parts:
    """`render_id` identifies the engine's tokenizer and template. `draining()`: the pod terminates."""

    model: str
    render_id: str
    boot: str
    enforcement: Enforcement
    engine: EnginePool
    link: AdapterLink
    random_salt: Callable[[], str]
    draining: Callable[[], bool]


async def until(done: Callable[[T], bool], look: Callable[[], Awaitable[T]], within_s: float, every_s: float) -> T:
    """Return the result of `look` that is `done`, or the last one when time is up."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + within_s
    while True:
        found = await look()
        left_s = give_up_at_s - loop.time()
        if done(found) or left_s <= 0:
            return found
        await asyncio.sleep(min(every_s, left_s))
