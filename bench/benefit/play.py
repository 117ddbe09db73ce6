"""One run: its requests played on a fleet in three phases, and all that was counted meanwhile.

- opening: the first request of each tenant, one after another;
- paced: conversations, one request after another, each after the fleet has come to rest;
- full: conversations with several requests in flight, so that no engine rests: saturation.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from bench.benefit.arms import Arm, Cell, Settings
from bench.benefit.fleet import Fleet
from bench.benefit.gates import key_of
from bench.benefit.http import complete
from bench.benefit.meter import spent
from bench.benefit.metrics import computed_tokens, difference, samples
from bench.benefit.programs import MODEL
from bench.benefit.text import text
from bench.benefit.workload import COMMON, Phase, Request, Workload
from bench.machine import Busyness
from e2e.cluster.progress import ClusterError


class Play:
    """Plays a workload on a fleet. `seed` decides the text and the pod that each connection comes to."""

    def __init__(self, fleet: Fleet, cell: Cell, settings: Settings, seed: str, vocabulary: Sequence[str]) -> None:
        self._fleet, self._cell, self._settings = fleet, cell, settings
        self._seed, self._vocabulary = seed, vocabulary
        self._rows: list[dict[str, Any]] = []
        self._phases: dict[str, dict[str, Any]] = {}
        self._begun_s = time.monotonic()

    async def run(self, workload: Workload, report: Callable[[str], None]) -> dict[str, Any]:
        """Play all of it; return rows of requests, and by phase the cost."""
        begun = self._fleet.redis_counts()
        with Busyness() as machine:
            if self._cell.arm is Arm.POOL:
                report("the pool is computed")
                await self._phase(Phase.WARMING, self._fleet.share(text([COMMON], self._seed, self._vocabulary)))
            report(f"first requests of {len(workload.opening)} tenants")
            await self._phase(Phase.OPENING, self._one_by_one(Phase.OPENING, workload.opening))
            report(f"{len(workload.paced)} requests, one at a time")
            await self._phase(Phase.PACED, self._one_by_one(Phase.PACED, workload.paced))
            report(f"{len(workload.saturating)} requests at saturation")
            await self._phase(Phase.FULL, self._at_once(workload.saturating))
        memory = [await pod.memory_bytes() for pod in self._fleet.pods]
        redis = {name: count - begun[name] for name, count in self._fleet.redis_counts().items()}
        return {
            "requests": self._rows, "phases": self._phases, "redis": redis, "memory_bytes": sum(memory),
            "others_percent": round(machine.others_percent, 1), "load_average": round(os.getloadavg()[0], 2),
        }  # fmt: skip

    async def _phase(self, name: str, playing: Any) -> None:
        fleet = self._fleet
        fleet.meter.refresh()
        before = [samples(await pod.engine_metrics()) for pod in fleet.pods]
        cpu, begun_s = fleet.meter.now(), time.monotonic()
        await playing
        seconds = time.monotonic() - begun_s
        await fleet.rest()
        fleet.meter.refresh()
        costs = spent(cpu, fleet.meter.now())
        after = [samples(await pod.engine_metrics()) for pod in fleet.pods]
        engines = [difference(*pair) for pair in zip(before, after, strict=True)]
        self._phases[name] = {
            "wall_s": round(seconds, 3), "cpu_s": costs, "computed": sum(map(computed_tokens, engines)),
        }  # fmt: skip

    async def _one_by_one(self, phase: str, requests: Sequence[Request]) -> None:
        for request in requests:
            await self._ask(phase, request, alone=True)
            await self._fleet.rest()

    async def _at_once(self, requests: Sequence[Request]) -> None:
        waiting, done = list(requests), set[int]()
        changed = asyncio.Condition()

        async def worker() -> None:
            while True:
                async with changed:
                    while waiting and not (ready := [one for one in waiting if one.after in done or one.after is None]):
                        await changed.wait()
                    if not waiting:
                        return
                    request = ready[0]
                    waiting.remove(request)
                await self._ask(Phase.FULL, request, alone=False)
                async with changed:
                    done.add(request.number)
                    changed.notify_all()

        async with asyncio.TaskGroup() as group:
            for _ in range(self._settings.in_flight_per_pod * len(self._fleet.pods)):
                group.create_task(worker())

    async def _ask(self, phase: str, request: Request, *, alone: bool) -> None:
        arm, meter = self._cell.arm, self._fleet.meter
        pod = Random(f"{self._seed}/{request.number}").randrange(len(self._fleet.pods))
        body: dict[str, Any] = {
            "model": MODEL, "prompt": text(request.segments, self._seed, self._vocabulary),
            "max_tokens": self._settings.output_tokens, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        if arm is Arm.SALTED:
            body["cache_salt"] = f"salt-{request.tenant}"
        key = key_of(request.tenant) if arm.product else None
        cpu_s: list[float] = []
        before_s, at_s = meter.total(), time.monotonic()
        answer = await complete(
            self._fleet.pods[pod].callers, body, key, lambda: cpu_s.append(meter.total() - before_s)
        )
        if answer.prompt_tokens != request.tokens:
            raise ClusterError(f"a prompt of {request.tokens} words has {answer.prompt_tokens} tokens")
        self._rows.append({
            "number": request.number, "phase": phase, "pod": pod, "sent_s": round(at_s - self._begun_s, 4),
            "first_s": round(answer.first_s, 4), "whole_s": round(answer.whole_s, 4), "cached": answer.cached_tokens,
            **({"first_cpu_s": round(cpu_s[0], 4)} if alone else {}),
        })  # fmt: skip
