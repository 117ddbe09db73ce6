"""Rounds of our tier and of Valkey GLIDE in turn, on a Redis Cluster of three servers with TLS."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.adapter.stand import Client
from bench.environment import install
from bench.result import Figure
from e2e.cluster.progress import Progress
from e2e.cluster.rootfs import server_command
from tests.tiers.certificates import Authority
from tests.tiers.redis_cluster import RedisCluster

OURS, THEIRS = "cluster_tls", "glide"
PRIMARIES = 3
MIB = 1 << 20
PARTS = {
    "": ("store_s", "load_s"),
    "_store": ("store_s",),
    "_load": ("load_s",),
    "_cpu": ("store_cpu_s", "load_cpu_s"),
}
"""By the middle of a ratio's name, the times that are added up."""


@dataclass(slots=True)
class Compared:
    """Figures of ours, of GLIDE, and the lowest and highest of each over the rounds."""

    ours: dict[str, Figure] = field(default_factory=dict)
    theirs: dict[str, Figure] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)


Rounds = Mapping[str, Sequence[Mapping[str, float]]]
"""By name, one answer for each round."""


async def cluster_tls(blocks: Mapping[int, int], rounds: int, workers: int, progress: Progress) -> Compared:
    """Compare both with so many blocks (value) of so many MiB (key) at once."""
    python = install("glide", progress) / "bin/python"
    with tempfile.TemporaryDirectory(prefix="adapter") as name:
        directory = Path(name)
        with _cluster(directory) as (cluster, ca_file):
            client = Client(python, directory, "adapter.cluster_client")
            try:
                ports = [node.port for node in cluster.primaries]
                await client.ask("open", ports=ports, workers=workers, ca_file=str(ca_file))
                return compare({size: await _rounds(client, size, n, rounds, progress) for size, n in blocks.items()})
            finally:
                client.stop()


@contextmanager
def _cluster(directory: Path) -> Iterator[tuple[RedisCluster, Path]]:
    authority = Authority(directory)
    options = authority.issue("127.0.0.1").redis_options
    cluster = RedisCluster(directory, PRIMARIES, tls=lambda _: options, command=server_command())
    try:
        cluster.start()
        yield cluster, authority.file
    finally:
        cluster.kill()


async def _rounds(client: Client, size: int, count: int, rounds: int, progress: Progress) -> Rounds:
    results: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
    with progress.step(f"{count} blocks of {size} MiB, cluster with TLS: rounds of {', '.join(results)}"):
        for number in range(-1, rounds):  # the first warms up, and compares the loaded bytes
            for name, answers in results.items():
                answer = await client.ask("transfer", name=name, size=size * MIB, count=count, check=number < 0)
                if number >= 0:
                    answers.append(answer)
    return results


def compare(transfers: Mapping[int, Rounds]) -> Compared:
    """Return the figures for rounds by size in MiB. Ratios are throughput of ours by theirs, `_cpu` costs of a byte."""
    compared = Compared()
    ratios: dict[str, list[float]] = {part: [] for part in PARTS}
    for size, rounds in transfers.items():
        for name, answers in rounds.items():
            figures = compared.ours if name == OURS else compared.theirs
            for way in ("store", "load"):
                cpu = [answer[f"{way}_cpu_s"] / answer["bytes"] * 1e9 for answer in answers]
                speed = [answer["bytes"] / answer[f"{way}_s"] / 1e9 for answer in answers]
                figures[f"{name}_{way}_cpu_{size}mb"] = Figure(statistics.median(cpu), "s/GB")
                figures[f"{name}_{way}_{size}mb"] = Figure(statistics.median(speed), "GB/s")
                compared.spread[f"{name}_{way}_{size}mb"] = [round(min(speed), 3), round(max(speed), 3)]
        for part, keys in PARTS.items():
            pairs = zip(rounds[OURS], rounds[THEIRS], strict=True)
            costs = [sum(mine[key] for key in keys) / sum(other[key] for key in keys) for mine, other in pairs]
            each = costs if part == "_cpu" else [1 / cost for cost in costs]
            ratios[part].append(statistics.median(each))
            compared.spread[f"{OURS}{part}_of_{THEIRS}_{size}mb"] = [round(min(each), 3), round(max(each), 3)]
    for part, by_size in ratios.items():
        # Over the sizes of blocks the geometric mean: none counts more than another.
        compared.ours[f"{OURS}{part}_of_{THEIRS}"] = Figure(statistics.geometric_mean(by_size), "ratio")
    return compared
