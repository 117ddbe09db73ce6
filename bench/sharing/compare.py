"""The whole benchmark: replays of the trace in every mode, the real engine, and hits of both kinds in turn."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.adapter.stand import Redis, servers
from bench.environment import ROOT, install
from bench.machine import Busyness
from bench.result import OTHER_LOAD, Result
from bench.sharing.cost import Cost, hits_compared
from bench.sharing.excerpt import EXCERPT
from bench.sharing.figures import (
    Points,
    costs_of,
    engine_figures,
    memory_figures,
    points,
    replay_figures,
    series,
    table,
)
from bench.sharing.optimum import Mode
from bench.sharing.real_engine import RealEngine, Served
from bench.sharing.replay import Replay, replays
from bench.sharing.stand import Stand, engine_python
from bench.sharing.trace import Request, load
from e2e.cluster.progress import Progress

NAME = "sharing"
REPRODUCE = "make bench BENCH=sharing"
REPLAY_TOKEN_BYTES = 16
"""Blocks of 8 KiB: a replay is about how many there are."""

HIT_TOKEN_BYTES = 2048
"""Blocks of 1 MiB, less than models have: the cost of a block besides its bytes weighs more than with a model."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done: numbers of tenants, pairs of turns, and hits a turn."""

    tenants: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    pairs: int = 12
    reads: int = 24


async def measure(effort: Effort | None = None) -> Result:
    """Install missing programs, start everything, run the parts one after the other."""
    effort = effort or Effort()
    progress = Progress()
    python = engine_python(progress)
    plotter = install("plot", progress)
    requests = load(EXCERPT)
    with tempfile.TemporaryDirectory(prefix=NAME) as name:
        directory = Path(name)
        with servers(directory, (), (), ()) as (replayed, behind_engine, hit):
            with _engine(python, directory, behind_engine) as engine:
                with _stand(python, directory / "replays", replayed) as stand:
                    shared = await asyncio.to_thread(_replays, stand, requests, effort, progress)
                served = await asyncio.to_thread(_serve, engine, progress)
            with _stand(python, directory / "memory", None) as stand:
                in_memory = await asyncio.to_thread(_replays_in_memory, stand, requests, effort, progress)
            with (
                _stand(python, directory / "hits", hit) as over_redis,
                _stand(python, directory / "memory-hits", None) as over_memory,
            ):
                stands = {"redis": over_redis, "memory": over_memory}
                costs, others_percent = await asyncio.to_thread(_costs, stands, effort, progress)
    return _result(shared, served, in_memory, costs, others_percent, len(requests), plotter)


def _replays(stand: Stand, requests: Sequence[Request], effort: Effort, progress: Progress) -> list[Replay]:
    with progress.step("a cache server before Redis"):
        stand.wait_until_ready()
        stand.attach_engine(REPLAY_TOKEN_BYTES)
    with progress.step(f"{len(requests)} prompts of 1 to {max(effort.tenants)} tenants in every mode, from Redis"):
        return replays(stand, requests, [(mode, tenants) for tenants in effort.tenants for mode in Mode])


def _replays_in_memory(stand: Stand, requests: Sequence[Request], effort: Effort, progress: Progress) -> list[Replay]:
    with progress.step("a cache server with memory alone"):
        stand.wait_until_ready()
        stand.attach_engine(REPLAY_TOKEN_BYTES)
    with progress.step(f"prompts of {max(effort.tenants)} tenants with and without a pool, from memory"):
        return replays(stand, requests, [(mode, max(effort.tenants)) for mode in (Mode.ISOLATED, Mode.POOL)])


def _serve(engine: RealEngine, progress: Progress) -> Served:
    with progress.step("the real engine"):
        engine.wait_until_ready()
    with progress.step("prompts to the real engine: without a cache, each tenant for itself, with a pool"):
        return engine.serve()


def _costs(stands: dict[str, Stand], effort: Effort, progress: Progress) -> tuple[dict[str, Cost], float]:
    with progress.step("two cache servers, one before Redis, one with memory alone"):
        for stand in stands.values():
            stand.wait_until_ready()
            stand.attach_engine(HIT_TOKEN_BYTES)
    with Busyness() as machine, progress.step("hits in a pool and private hits, in turn"):
        costs = {name: hits_compared(stand, effort.pairs, effort.reads) for name, stand in stands.items()}
    return costs, machine.others_percent


@contextmanager
def _stand(python: Path, directory: Path, backing: Redis | None) -> Iterator[Stand]:
    stand = Stand(python, directory, backing, memory_gb=0.2)
    try:
        yield stand
    finally:
        stand.stop()


@contextmanager
def _engine(python: Path, directory: Path, backing: Redis) -> Iterator[RealEngine]:
    engine = RealEngine(python, directory, backing)
    try:
        yield engine
    finally:
        engine.stop()


def _result(
    shared: Sequence[Replay],
    served: Served,
    in_memory: Sequence[Replay],
    costs: dict[str, Cost],
    others_percent: float,
    requests: int,
    plotter: Path,
) -> Result:
    block_bytes = REPLAY_TOKEN_BYTES
    shown = points(shared, block_bytes)
    ours, isolated = replay_figures(shared, block_bytes)
    spread = {name: cost.spread() for name, cost in costs.items()}
    return Result(
        name=NAME,
        figures=ours | memory_figures(in_memory, block_bytes) | costs_of(costs) | engine_figures(served),
        baseline=isolated,
        ratio=ours["pool_stored"].value / isolated["isolated_stored"].value,
        reproduce=REPRODUCE,
        conditions={
            "requests": requests,
            "processors": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            OTHER_LOAD: round(others_percent),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "spread": spread,
        },
        beside={"md": table(shown, requests, block_bytes, REPRODUCE), "svg": _drawn(plotter, shown)},
    )


def _drawn(plotter: Path, shown: Points) -> str:
    """Return the plot. The program's environment is empty, so that no settings of this machine change it."""
    drawn = subprocess.run(
        [plotter / "bin/python", "-m", "bench.sharing.picture"], cwd=ROOT, env={"MPLCONFIGDIR": str(plotter)},
        input=json.dumps(series(shown)), stdout=subprocess.PIPE, encoding="utf-8", check=True,
    )  # fmt: skip
    return drawn.stdout
