"""`outages`: cost of a cache server that ends for the requests of its engine.

A real engine with a real cache server behind the connector guard. The server is killed, runs out of memory or is
terminated, while no request runs; the requests after that are held against those before it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.machine import Busyness
from bench.result import OTHER_LOAD, Figure, Result
from bench.sharing.stand import engine_python
from e2e.cluster.progress import Progress
from tests.dataplane.ending_server import ENDS, Pod
from tests.dataplane.engine_process import CHUNK_TOKENS, EngineProcess
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import GateStandIn

NAME = "outages"
REQUESTS = 20
ROUNDS = 3


async def measure() -> Result:
    """Start engine and server, end the server again and again, stop both."""
    return await asyncio.to_thread(_measure, Progress())


def _measure(progress: Progress) -> Result:
    python = engine_python(progress)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=NAME)))
        with progress.step("an engine and its cache server"):
            server = LMCacheServer(python, directory, GateStandIn(directory), [None], CHUNK_TOKENS)
            stack.callback(server.stop)
            server.wait_until_ready()
            engine = EngineProcess(python, directory, server.rpc_port)
            stack.callback(engine.stop)
            engine.wait_until_ready()
        return _ended(server, engine, progress)


def _ended(server: LMCacheServer, engine: EngineProcess, progress: Progress) -> Result:
    figures: dict[str, Figure] = {}
    others: list[float] = []
    ratios: list[float] = []
    for end in ENDS:
        pod = Pod(server, engine, end)
        before: list[float] = []
        after: list[float] = []
        for _ in range(ROUNDS):
            with progress.step(f"{REQUESTS} requests before and after: {end.__name__}"), Busyness() as machine:
                before += [pod.ask() for _ in range(REQUESTS)]
                with pod.no_request_waits():
                    end(server)
                    after += [pod.ask() for _ in range(REQUESTS)]
            others.append(machine.others_percent)
            pod.come_back()
        for what, take in (("max", max), ("p50", statistics.median)):
            figures[f"{end.__name__}_added_{what}"] = _added(before, after, take)
        ratios.append(statistics.median(after) / statistics.median(before))
    return Result(
        name=NAME,
        figures=figures,
        baseline={},
        ratio=max(ratios),
        reproduce=f"make bench BENCH={NAME}",
        conditions={"requests": REQUESTS * ROUNDS, OTHER_LOAD: round(max(others))},
    )


def _added(before: Sequence[float], after: Sequence[float], take: Callable[[Sequence[float]], float]) -> Figure:
    """Return by how much requests were slower after than before, in milliseconds."""
    usual, found = 1000 * take(before), 1000 * take(after)
    return Figure(found - usual, "ms", baseline=usual)
