"""Rounds of all variants in turn, so that other load of the machine affects all of them alike, and their medians."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import platform
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.gate import bodies, fairness, load
from bench.gate.load import Block, Sample
from bench.gate.processes import resident_mb
from bench.gate.proxies import TENANTS, Proxy, Stand, running
from bench.machine import Busyness
from bench.result import OTHER_LOAD, Figure, Result, percentile
from e2e.cluster.progress import Progress

NAME = "gate"
ROUNDS = 9
LEAST_ROUNDS = 5
WORKLOAD_BUDGET_S = 40.0
"""After this time a busy machine gets no further round of a workload once it has had the least number."""
STREAMS = 64
STREAM_EVENTS = 150
EVENT_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of request and how much of it each variant gets in a round; 0 connections: not measured there."""

    name: str
    body_bytes: int
    requests: Mapping[str, int]
    connections: Mapping[str, int]
    events: int = 0
    tls: bool = False

    def block(self, proxy: Proxy, authority: str) -> Block:
        """Return the block of one variant."""
        stream = {"stream": True, "max_tokens": self.events} if self.events else {}
        connections = self.connections[proxy.name]
        return Block(
            port=proxy.tls_port if self.tls else proxy.port,
            request=bodies.post(bodies.chat(self.body_bytes, **stream), proxy.key),
            requests=self.requests[proxy.name],
            connections=connections,
            pid=proxy.pid,
            stagger_s=EVENT_INTERVAL_S / connections if self.events > 1 else 0.0,
            authority=authority if self.tls else "",
        )


def _each(direct: int, gate: int, envoy: int, litellm: int) -> dict[str, int]:
    return {"direct": direct, "gate": gate, "envoy": envoy, "litellm": litellm}


WORKLOADS = (
    Workload("8kb", 8_000, _each(2000, 2000, 2000, 60), _each(32, 32, 32, 8)),
    Workload("200kb", 200_000, _each(300, 300, 300, 20), _each(8, 8, 8, 4)),
    Workload("first_chunk", 8_000, _each(150, 150, 150, 15), _each(1, 1, 1, 1), events=1),
    Workload("stream", 8_000, _each(STREAMS, STREAMS, STREAMS, 8), _each(STREAMS, STREAMS, STREAMS, 8),
             events=STREAM_EVENTS),
    Workload("8kb_tls", 8_000, _each(0, 2000, 2000, 0), _each(0, 32, 32, 0), tls=True),
)  # fmt: skip

Samples = dict[str, list[Sample]]
"""By variant, one sample for each round."""


async def measure() -> Result:
    """Install missing programs, start everything, run the rounds."""
    progress = Progress()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="gate") as directory:
        async with running(Path(directory), cores[0], cores[-1], progress) as stand:
            with Busyness(*stand.pids) as machine:
                samples = await _rounds(stand, cores[0], progress)
                memory = {proxy.name: resident_mb(proxy.pid) for proxy in stand.all if proxy.pid}
                with progress.step("fairness: a quiet phase and one with hostile bodies"):
                    shared = await fairness.measure(stand.fairness, cores[0])
    return _result(samples, memory, shared, others_percent=machine.others_percent, shared_core=len(cores) == 1)


async def _rounds(stand: Stand, core: int, progress: Progress) -> dict[str, Samples]:
    loop = asyncio.get_running_loop()
    context = multiprocessing.get_context("spawn")
    samples: dict[str, Samples] = {}
    with ProcessPoolExecutor(1, mp_context=context, initializer=load.pin, initargs=(core,)) as pool:
        for workload in WORKLOADS:
            measured = [proxy for proxy in stand.all if workload.connections[proxy.name]]
            blocks = {proxy.name: workload.block(proxy, stand.authority) for proxy in measured}
            results: Samples = {name: [] for name in blocks}
            begun = loop.time()
            with progress.step(f"{workload.name}: rounds of {', '.join(blocks)}"):
                for number in range(-1, ROUNDS):  # the first warms up
                    if number >= LEAST_ROUNDS and loop.time() - begun > WORKLOAD_BUDGET_S:
                        break
                    for name, block in blocks.items():
                        sample = await loop.run_in_executor(pool, load.run, block)
                        if number >= 0:
                            results[name].append(sample)
            samples[workload.name] = results
    return samples


def _result(
    samples: Mapping[str, Samples],
    memory: Mapping[str, float],
    shared: Mapping[str, Figure],
    *,
    others_percent: float,
    shared_core: bool,
) -> Result:
    ours: dict[str, Figure] = dict(shared)
    others: dict[str, Figure] = {}
    spread: dict[str, list[float]] = {}
    for workload in ("8kb", "200kb", "8kb_tls", "stream"):
        unit = "event" if workload == "stream" else "request"
        for name, rounds in samples[workload].items():
            if name == "direct":
                continue
            costs = [_cost_ms(sample) for sample in rounds]
            figures = ours if name == "gate" else others
            figures[f"{name}_cpu_{workload}"] = Figure(statistics.median(costs), f"ms/{unit}")
            spread[f"{name}_cpu_{workload}"] = [round(min(costs), 4), round(max(costs), 4)]
        ours[f"cpu_{workload}_of_envoy"] = Figure(_ratio(samples[workload], "gate", "envoy"), "ratio")
    for workload in ("8kb", "200kb"):  # not streams: LiteLLM gets fewer at a time, and an event's cost depends on that
        ours[f"litellm_{workload}_of_cpu"] = Figure(_ratio(samples[workload], "litellm", "gate"), "ratio")
    for name, seconds in _over_direct(samples["stream"], "event_s", 99).items():
        (ours if name == "gate" else others)[f"{name}_event_added_p99"] = Figure(seconds * 1000, "ms")
    for name, seconds in _over_direct(samples["first_chunk"], "first_s", 50).items():
        (ours if name == "gate" else others)[f"{name}_first_chunk_added_p50"] = Figure(seconds * 1000, "ms")
    for name, megabytes in memory.items():
        (ours if name == "gate" else others)[f"{name}_memory"] = Figure(megabytes, "MB")
    return Result(
        name=NAME,
        figures=ours,
        baseline=others,
        ratio=ours["cpu_8kb_of_envoy"].value,
        reproduce="make bench BENCH=gate",
        conditions={
            "rounds": {name: len(by_variant["gate"]) for name, by_variant in samples.items()},
            "tenants": TENANTS,
            "streams": STREAMS,
            "events_per_second_and_stream": round(1 / EVENT_INTERVAL_S),
            "litellm_streams": 8,
            "hostile_connections": fairness.CONNECTIONS,
            "tls": "off, but for 8kb_tls",
            "proxies_share_the_load_generators_core": shared_core,
            "kernel": platform.release(),
            OTHER_LOAD: round(others_percent),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "spread": spread,
        },
    )


def _cost_ms(sample: Sample) -> float:
    return sample.cpu_s * 1000 / (sample.events if sample.events else sample.requests)


def _ratio(samples: Samples, above: str, below: str) -> float:
    """Return the median over the rounds of a cost divided by the other cost of the same round."""
    pairs: Iterable[tuple[Sample, Sample]] = zip(samples[above], samples[below], strict=True)
    return statistics.median(_cost_ms(a) / _cost_ms(b) for a, b in pairs)


def _over_direct(samples: Samples, times: str, percent: float) -> dict[str, float]:
    """Return, by variant, the median over the rounds of a percentile less the same of the direct way, in seconds."""

    def typical(rounds: Sequence[Sample]) -> float:
        return statistics.median(percentile(getattr(sample, times), percent) for sample in rounds)

    direct = typical(samples["direct"])
    return {name: typical(rounds) - direct for name, rounds in samples.items() if name != "direct"}
