"""Rounds of LMCache's own Redis client and of the policy adapter in turn, plain and encrypted, and their medians."""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.adapter.cluster_tls import Compared, cluster_tls
from bench.adapter.stand import Client, Redis, lmcache_python, servers
from bench.machine import Busyness
from bench.result import OTHER_LOAD, Figure, Result
from e2e.cluster.progress import ClusterError, Progress

NAME = "adapter"
VARIANTS = ("native", "plain", "sealed")
WORKERS = 4
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done: sizes of blocks in MiB and how many of each at once, rounds, lookups, scopes."""

    blocks: Mapping[int, int] = field(default_factory=lambda: {1: 128, 4: 64, 16: 24, 40: 12})
    cluster_blocks: Mapping[int, int] = field(default_factory=lambda: {1: 128, 4: 64, 16: 24})
    rounds: int = 7
    lookup_rounds: int = 9
    lookups: int = 60
    scopes: int = 1000


Rounds = dict[str, list[dict[str, Any]]]
"""By variant, one answer for each round."""


async def measure(effort: Effort | None = None) -> Result:
    """Install missing programs, start everything, run the rounds."""
    effort = effort or Effort()
    progress = Progress()
    python = lmcache_python(progress)
    with tempfile.TemporaryDirectory(prefix="adapter") as name:
        directory = Path(name)
        with servers(directory, (), (), ()) as (redis, sealed, doomed):
            client = Client(python, directory)
            try:
                await _open(client, redis, sealed, doomed)
                with Busyness(client.pid, redis.pid, sealed.pid, doomed.pid) as machine:
                    limits = [await client.ask("limits", size=size * MIB) for size in effort.blocks]
                    transfers = {
                        size: await _transfers(client, size, count, effort.rounds, progress)
                        for size, count in effort.blocks.items()
                    }
                    lookups = await _lookups(client, effort, progress)
                    dead = await _dead(client, doomed, progress)
                    clustered = await cluster_tls(effort.cluster_blocks, effort.rounds, WORKERS, progress)
            finally:
                client.stop()
    return _result(transfers, lookups, dead, limits, clustered, others_percent=machine.others_percent)


async def _open(client: Client, redis: Redis, sealed: Redis, doomed: Redis) -> None:
    # An encrypting tier deletes plain blocks of its domain, so it has a server of its own.
    await client.ask("native", name="native", port=redis.port, workers=WORKERS)
    await client.ask("policy_adapter", name="plain", ports=[redis.port], workers=WORKERS)
    await client.ask("policy_adapter", name="sealed", ports=[sealed.port], workers=WORKERS, encryption="Required")
    await client.ask("policy_adapter", name="doomed", ports=[doomed.port], workers=WORKERS)
    await client.ask("allow", scopes=1)


async def _transfers(client: Client, size: int, count: int, rounds: int, progress: Progress) -> Rounds:
    """Store and load the same buffers by each variant in turn, the order changing from round to round."""
    results: Rounds = {name: [] for name in VARIANTS}
    with progress.step(f"{count} blocks of {size} MiB: rounds of {', '.join(VARIANTS)}"):
        for number in range(-1, rounds):  # the first warms up, and compares the loaded bytes
            for name in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:
                answer = await client.ask("transfer", name=name, size=size * MIB, count=count, check=number < 0)
                if number >= 0:
                    results[name].append(answer)
    return results


async def _lookups(client: Client, effort: Effort, progress: Progress) -> Rounds:
    """Look 64 blocks up: one scope's by either client, and, by ours, those of one among many scopes."""
    asked = (("native", "one_native"), ("plain", "one"), ("plain", "many"))
    await client.ask("allow", scopes=effort.scopes)
    with progress.step(f"store 64 small blocks in each of {effort.scopes} scopes"):
        for name, label in asked:
            scopes = effort.scopes if label == "many" else 1
            await client.ask("fill", name=name, label=label, size=4096, keys=64, scopes=scopes)
    results: Rounds = {label: [] for _, label in asked}
    with progress.step("lookups of 64 keys: rounds of native, one scope, one of many scopes"):
        for number in range(-1, effort.lookup_rounds):
            for name, label in asked[number % 3 :] + asked[: number % 3]:
                answer = await client.ask("lookup", name=name, label=label, times=effort.lookups)
                if answer["hits"] != 64 * effort.lookups:
                    raise ClusterError(f"{answer['hits']} of {64 * effort.lookups} lookups of {label} were hits")
                if number >= 0:
                    results[label].append(answer)
    return results


async def _dead(client: Client, doomed: Redis, progress: Progress) -> dict[str, float]:
    """Look up in a tier whose server was killed: the first times, and when its breaker has opened."""
    await client.ask("fill", name="doomed", label="doomed", size=4096, keys=64, scopes=1)
    await client.ask("lookup", name="doomed", label="doomed", times=20)
    with progress.step("lookups in a tier that died"):
        doomed.kill()
        first: list[float] = []
        while (await client.ask("status", name="doomed"))["breaker"] == "closed" and len(first) < 50:
            first += (await client.ask("lookup", name="doomed", label="doomed", times=1))["seconds"]
        await asyncio.sleep(0.1)
        after = (await client.ask("lookup", name="doomed", label="doomed", times=200))["seconds"]
    return {"first": max(first) * 1000, "after": statistics.median(after) * 1000, "after_max": max(after) * 1000}


def _result(
    transfers: Mapping[int, Rounds],
    lookups: Rounds,
    dead: Mapping[str, float],
    limits: Sequence[Mapping[str, float]],
    clustered: Compared,
    *,
    others_percent: float,
) -> Result:
    ours: dict[str, Figure] = {}
    theirs: dict[str, Figure] = {}
    spread: dict[str, list[float]] = {}
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name in ("plain", "sealed")}
    for size, rounds in transfers.items():
        for name, answers in rounds.items():
            figures = theirs if name == "native" else ours
            for way in ("store", "load"):
                cpu = [answer[f"{way}_cpu_s"] / answer["bytes"] * 1e9 for answer in answers]
                speed = [answer["bytes"] / answer[f"{way}_s"] / 1e9 for answer in answers]
                figures[f"{name}_{way}_cpu_{size}mb"] = Figure(statistics.median(cpu), "s/GB")
                figures[f"{name}_{way}_{size}mb"] = Figure(statistics.median(speed), "GB/s")
                spread[f"{name}_{way}_{size}mb"] = [round(min(speed), 3), round(max(speed), 3)]
        for name, by_kind in ratios.items():
            pairs = list(zip(rounds[name], rounds["native"], strict=True))
            for kind, parts in (("cpu", ("store_cpu_s", "load_cpu_s")), ("time", ("store_s", "load_s"))):
                each = [_sum(mine, parts) / _sum(other, parts) for mine, other in pairs]
                by_kind.setdefault(kind, []).append(statistics.median(each))
                spread[f"{name}_{kind}_of_native_{size}mb"] = [round(min(each), 3), round(max(each), 3)]
    for name, by_kind in ratios.items():
        # Over the sizes of blocks the geometric mean: none counts more than another.
        ours[f"{name}_cpu_of_native"] = Figure(statistics.geometric_mean(by_kind["cpu"]), "ratio")
        ours[f"{name}_worst_cpu_of_native"] = Figure(max(by_kind["cpu"]), "ratio")
        ours[f"{name}_throughput_of_native"] = Figure(1 / statistics.geometric_mean(by_kind["time"]), "ratio")
        ours[f"{name}_worst_throughput_of_native"] = Figure(1 / max(by_kind["time"]), "ratio")
    typical = {label: _typical(rounds) for label, rounds in lookups.items()}
    theirs["native_lookup_64"] = Figure(typical["one_native"][0] * 1000, "ms")
    theirs["native_lookup_64_cpu"] = Figure(typical["one_native"][1] * 1000, "ms")
    ours["lookup_64"] = Figure(typical["one"][0] * 1000, "ms")
    ours["lookup_64_cpu"] = Figure(typical["one"][1] * 1000, "ms")
    ours["lookup_64_of_native"] = Figure(_paired(lookups, "one", "one_native", 0), "ratio")
    ours["lookup_many_scopes_of_one"] = Figure(_paired(lookups, "many", "one", 0), "ratio")
    ours["lookup_cpu_many_scopes_of_one"] = Figure(_paired(lookups, "many", "one", 1), "ratio")
    ours["dead_tier_first_lookups_max"] = Figure(dead["first"], "ms")
    ours["dead_tier_lookup_p50"] = Figure(dead["after"], "ms")
    ours["dead_tier_lookup_max"] = Figure(dead["after_max"], "ms")
    for limit in ("memcpy", "aes_gcm"):
        theirs[limit] = Figure(statistics.median(one[limit] for one in limits), "GB/s")
    return Result(
        name=NAME,
        figures=ours | clustered.ours,
        baseline=theirs | clustered.theirs,
        ratio=ours["plain_cpu_of_native"].value,
        reproduce="make bench BENCH=adapter",
        conditions={
            "workers": WORKERS,
            "processors": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            OTHER_LOAD: round(others_percent),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "spread": spread | clustered.spread,
        },
    )


def _sum(answer: Mapping[str, float], parts: Iterable[str]) -> float:
    return sum(answer[part] for part in parts)


def _each(answer: Mapping[str, Any]) -> tuple[float, float]:
    """The median seconds of a lookup in a round, and the mean processor seconds."""
    return statistics.median(answer["seconds"]), answer["cpu_s"] / len(answer["seconds"])


def _typical(rounds: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    each = [_each(answer) for answer in rounds]
    return statistics.median(one for one, _ in each), statistics.median(one for _, one in each)


def _paired(lookups: Rounds, above: str, below: str, which: int) -> float:
    pairs = zip(lookups[above], lookups[below], strict=True)
    return statistics.median(_each(a)[which] / _each(b)[which] for a, b in pairs)
