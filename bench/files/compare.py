"""Rounds of fio, of the file tier and of LMCache's own adapter for files in turn, and their medians."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.adapter.stand import Client, lmcache_python
from bench.files.fio import ENGINES, Fio, command
from bench.machine import Busyness
from bench.result import OTHER_LOAD, Figure, Result
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.settings import Paths

NAME = "files"
FULL = ("plain", "sealed")
"""Full tiers, as tiers in use become: every stored block evicts another one."""

TIERS = (*FULL, "filling")
VARIANTS = (*ENGINES, *TIERS, "native")
WAYS = ("store", "load")
WORKERS = 4
LOOKED_UP = 64
MIB = 1 << 20
SPACE_BYTES = 2 << 30

Answer = dict[str, Any]
Rounds = dict[str, list[Answer]]
"""By variant, one answer for each round."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done: sizes of blocks in MiB, and how many bytes at once; rounds, and seconds after which none is
    begun any more; lookups.
    """

    sizes: Sequence[int] = (1, 4, 16)
    bytes_at_once: int = 128 * MIB
    warm_ups: int = 2
    rounds: int = 7
    least_rounds: int = 3
    seconds: float = 66.0
    lookup_rounds: int = 7
    lookups: int = 60
    variants: Sequence[str] = field(default=VARIANTS)


async def measure(effort: Effort | None = None) -> Result:
    """Install missing programs, start everything, run the rounds."""
    effort = effort or Effort()
    progress = Progress()
    python = lmcache_python(progress)
    fio_command = command()
    local = Paths().local
    local.mkdir(exist_ok=True)
    if shutil.disk_usage(local).free < SPACE_BYTES:
        raise ClusterError(f"{local} has less than 2 GiB left", advice="make room for the files to be measured")
    # Not below /tmp, which may be memory.
    with tempfile.TemporaryDirectory(prefix="bench-files-", dir=local) as name:
        directory = Path(name)
        client = Client(python, directory, "files.client")
        try:
            await _open(client, directory, effort)
            with Busyness(client.pid) as machine:
                transfers = {
                    size: await _transfers(client, directory, fio_command, size, effort, progress)
                    for size in effort.sizes
                }
                lookups = await _lookups(client, effort, progress)
            version = await Fio(fio_command, directory, 0, 0, 0).version()
        finally:
            client.stop()
    return _result(transfers, lookups, version, others_percent=machine.others_percent)


async def _open(client: Client, directory: Path, effort: Effort) -> None:
    folders = {name: directory / name for name in (*TIERS, "native")}
    for folder in folders.values():
        folder.mkdir()
    await client.ask("peer", name="native", path=str(folders["native"]), workers=WORKERS)
    for name in TIERS:
        # A full tier has room for a round's blocks and for some of those of the round before.
        capacity = effort.bytes_at_once * 5 // 4 if name in FULL else effort.bytes_at_once * 4
        encryption = "Required" if name == "sealed" else "Disabled"
        await client.ask(
            "file_tier", name=name, path=str(folders[name]), workers=WORKERS, capacity_bytes=capacity,
            encryption=encryption,
        )  # fmt: skip
    await client.ask("allow", scopes=1)


async def _transfers(
    client: Client, directory: Path, fio_command: list[str], size: int, effort: Effort, progress: Progress
) -> Rounds:
    """Store and load as many bytes by each variant in turn, the order changing from round to round."""
    count, results = effort.bytes_at_once // (size * MIB), Rounds()
    give_up_at_s = time.monotonic() + effort.seconds / len(effort.sizes)
    files = directory / f"fio-{size}"
    files.mkdir()
    fio = Fio(fio_command, files, size * MIB, count, WORKERS)
    with progress.step(f"{count} blocks of {size} MiB: rounds of {', '.join(effort.variants)}"):
        for number in range(-effort.warm_ups, effort.rounds):  # the first fill the tiers, and compare the loaded bytes
            if number >= effort.least_rounds and time.monotonic() > give_up_at_s:
                break
            turn = number % len(effort.variants)
            for name in (*effort.variants[turn:], *effort.variants[:turn]):
                if name in ENGINES and -effort.warm_ups < number < 0:
                    continue  # its files are laid out, and it needs nothing else
                if name in ENGINES:
                    answer = await fio.transfer(name)
                else:
                    answer = await client.ask(
                        "transfer", name=name, size=size * MIB, count=count, check=number < 0, keep=name in FULL
                    )
                if number >= 0:
                    results.setdefault(name, []).append(answer)
    shutil.rmtree(files)
    return results


async def _lookups(client: Client, effort: Effort, progress: Progress) -> Rounds:
    """Look blocks up that are there, by the tier and by the peer."""
    results: Rounds = {"filling": [], "native": []}
    for name in results:
        await client.ask("fill", name=name, label=name, size=4096, keys=LOOKED_UP, scopes=1)
    with progress.step(f"lookups of {LOOKED_UP} blocks"):
        for number in range(-1, effort.lookup_rounds):
            for name in list(results)[:: 1 if number % 2 else -1]:
                answer = await client.ask("lookup", name=name, label=name, times=effort.lookups)
                if answer["hits"] != LOOKED_UP * effort.lookups:
                    raise ClusterError(f"{answer['hits']} of {LOOKED_UP * effort.lookups} lookups were hits")
                if number >= 0:
                    results[name].append(answer)
    return results


def _result(transfers: Mapping[int, Rounds], lookups: Rounds, version: str, *, others_percent: float) -> Result:
    ours: dict[str, Figure] = {}
    theirs: dict[str, Figure] = {}
    spread: dict[str, list[float]] = {}
    of_limit: dict[str, list[float]] = {}
    for size, rounds in transfers.items():
        for way in WAYS:
            for name, answers in rounds.items():
                figures = ours if name in TIERS else theirs
                label = f"fio_{name}" if name in ENGINES else name
                speeds = [_speed(answer, way) for answer in answers]
                figures[f"{label}_{way}_{size}mb"] = Figure(statistics.median(speeds), "GB/s")
                spread[f"{label}_{way}_{size}mb"] = [round(min(speeds), 3), round(max(speeds), 3)]
                if name not in ENGINES:
                    cpu = [answer[f"{way}_cpu_s"] / answer["bytes"] * 1e9 for answer in answers]
                    figures[f"{label}_{way}_cpu_{size}mb"] = Figure(statistics.median(cpu), "s/GB")
            # The faster engine of all rounds, not of each: the better of two noisy figures is above either's truth.
            limit = max(ENGINES, key=lambda engine: theirs[f"fio_{engine}_{way}_{size}mb"].value)
            for name in (*TIERS, "native"):
                pairs = zip(rounds[name], rounds[limit], strict=True)
                each = [_speed(mine, way) / _speed(best, way) for mine, best in pairs]
                of_limit.setdefault(f"{name}_{way}_of_limit", []).append(statistics.median(each))
                spread[f"{name}_{way}_of_limit_{size}mb"] = [round(min(each), 3), round(max(each), 3)]
    for label, ratios in of_limit.items():
        # Over the sizes of blocks the geometric mean: none counts more than another.
        figures = theirs if label.startswith("native") else ours
        figures[label] = Figure(statistics.geometric_mean(ratios), "ratio")
    for name in FULL:
        both = [ours[f"{name}_{way}_of_limit"].value for way in WAYS]
        ours[f"{name}_of_limit"] = Figure(statistics.geometric_mean(both), "ratio")
    for name in TIERS:
        ours[f"{name}_cpu_of_native"] = Figure(statistics.geometric_mean(_cpu_ratios(transfers, name)), "ratio")
    mine, peer = (_typical_s(lookups[name]) for name in ("filling", "native"))
    ours["lookup_64"], theirs["native_lookup_64"] = Figure(mine * 1000, "ms"), Figure(peer * 1000, "ms")
    ours["lookup_64_of_native"] = Figure(mine / peer, "ratio")
    return Result(
        name=NAME,
        figures=ours,
        baseline=theirs,
        ratio=ours["plain_of_limit"].value,
        reproduce="make bench BENCH=files",
        conditions={
            "workers": WORKERS,
            "rounds": [len(next(iter(rounds.values()))) for rounds in transfers.values()],
            "processors": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "fio": version,
            OTHER_LOAD: round(others_percent),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "spread": spread,
        },
    )


def _speed(answer: Answer, way: str) -> float:
    """GB/s"""
    return float(answer["bytes"] / answer[f"{way}_s"] / 1e9)


def _cpu_ratios(transfers: Mapping[int, Rounds], name: str) -> list[float]:
    """Processor time by the peer's, stores and loads together, the median of each size's rounds."""
    return [
        statistics.median(
            sum(mine[f"{way}_cpu_s"] for way in WAYS) / sum(peer[f"{way}_cpu_s"] for way in WAYS)
            for mine, peer in zip(rounds[name], rounds["native"], strict=True)
        )
        for rounds in transfers.values()
    ]


def _typical_s(answers: Sequence[Answer]) -> float:
    return float(statistics.median(statistics.median(answer["seconds"]) for answer in answers))
