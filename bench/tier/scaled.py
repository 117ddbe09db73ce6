"""Three shards become four with blocks in them, while a pod stores and loads at half of its capacity.

Once with blocks of 1 MiB, which go key by key, and once with blocks of 16 MiB on Valkey 9, which moves whole slots. How
long do small commands take meanwhile, and does a pod meet anything but a hit or a miss? The operator's rules and mover
do the work in this process; pod and prober are processes of their own. The baseline is the same traffic before.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.adapter.stand import Client
from bench.machine import Busyness
from bench.result import Figure
from bench.tier.part import Part
from e2e.cluster.progress import Progress
from kvstrata.objects.redis.cluster import NODE_TIMEOUT_MS
from tests.tiers.server_kinds import REDIS_7, VALKEY_9, ServerKind
from tests.topology.mover_rig import MoverRig, total

MIB = 1 << 20
RESIDENT_BYTES = 2 << 30
SERVER_BYTES = RESIDENT_BYTES
"""Memory limit of each server: room for all blocks, so that nothing is evicted or refused."""
CAPACITY_S = 3.0
BEFORE_S = 5.0
SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    kind: ServerKind
    block_bytes: int


RUNS = (_Run("scaled_1mib", REDIS_7, MIB), _Run("scaled_valkey_16mib", VALKEY_9, 16 * MIB))


async def measure(progress: Progress) -> Part:
    """Scale once with each kind of server that is here."""
    parts = [await _scaled(run, progress) for run in RUNS]
    return Part(
        figures={name: figure for part in parts for name, figure in part.figures.items()},
        baseline={name: figure for part in parts for name, figure in part.baseline.items()},
        ratio=parts[0].ratio,
        conditions={"scaled_resident_bytes": RESIDENT_BYTES, "scaled_share_of_capacity": SHARE, "scaled_replicas": 0}
        | {name: value for part in parts for name, value in part.conditions.items()},
        others_percent=max(part.others_percent for part in parts),
        not_measured={name: why for part in parts for name, why in part.not_measured.items()},
    )


async def _scaled(run: _Run, progress: Progress) -> Part:
    command = run.kind.binary()
    if command is None:
        why = f"there is no {run.kind.name}: `{run.kind.advice}` brings one"
        return Part({}, {}, 0.0, {}, 0.0, not_measured={run.name: why})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-scaled-")))
        rig = MoverRig(folder / "servers", command, replicas=0, timeout_ms=NODE_TIMEOUT_MS)
        rig.goal = replace(rig.goal, max_bytes_each=SERVER_BYTES)
        stack.callback(rig.close)
        rig.start()
        stack.push_async_callback(rig.nodes.close)
        await rig.settled()
        traffic, probe = (Client(Path(sys.executable), folder, f"tier.{name}") for name in ("traffic", "probe"))
        for client in (traffic, probe):
            stack.callback(client.stop)
        with progress.step(
            f"fill {run.kind} with {RESIDENT_BYTES >> 30} GiB in blocks of {run.block_bytes // MIB} MiB"
        ):
            await traffic.ask("open", host=str(rig.pod(0, 0).ip), port=rig.port)
            await traffic.ask("fill", total=RESIDENT_BYTES, size=run.block_bytes)
        capacity = (await traffic.ask("capacity", for_s=CAPACITY_S))["per_second"]
        asked = await _kept_slots(rig)
        with Busyness() as busyness:
            with progress.step("traffic at half of capacity"):
                await traffic.ask("begin", per_second=SHARE * capacity)
                await probe.ask("begin", servers=asked)
                await asyncio.sleep(BEFORE_S)
                before = await probe.ask("end")
            with progress.step("three shards become four"):
                await probe.ask("begin", servers=asked)
                began_s = time.monotonic()
                await rig.scale(4)
                await rig.settled(rig.mover(pause=asyncio.sleep))
                took_s = time.monotonic() - began_s
                during = await probe.ask("end")
            answers = await traffic.ask("end")
    return _figures(run, rig, (before, during, answers), capacity, took_s, busyness.others_percent)


def _figures(
    run: _Run, rig: MoverRig, answers: tuple[Any, Any, Any], capacity: float, took_s: float, others_percent: float
) -> Part:
    before, during, ended = answers
    moved = total(rig.reports)
    return Part(
        figures={
            f"{run.name}_small_p99": Figure(during["p99_ms"], "ms", baseline=before["p99_ms"]),
            f"{run.name}_small_p999": Figure(during["p999_ms"], "ms", baseline=before["p999_ms"]),
            f"{run.name}_small_max": Figure(during["max_ms"], "ms", baseline=before["max_ms"]),
            f"{run.name}_took": Figure(took_s, "s"),
            f"{run.name}_failed": Figure(ended["wrong"] + bool(ended["problem"]), "1"),
            f"{run.name}_late": Figure(ended["late"], "1"),
            f"{run.name}_adapter_errors": Figure(ended["errors"], "1"),
            f"{run.name}_missed": Figure(ended["missed"] / max(1, ended["asked"]), "1"),
            f"{run.name}_dropped": Figure(moved.dropped, "1"),
        },
        baseline={f"{run.name}_small_p99_before": Figure(before["p99_ms"], "ms")},
        ratio=during["p99_ms"] / before["p99_ms"],
        conditions={
            f"{run.name}_requests_per_second": round(SHARE * capacity, 2),
            f"{run.name}_requests": ended["requests"],
            f"{run.name}_answers": during["answers"],
            f"{run.name}_slots_moved": moved.slots,
            f"{run.name}_problem": ended["problem"],
        },
        others_percent=others_percent,
    )


async def _kept_slots(rig: MoverRig) -> list[tuple[str, int, int]]:
    """Every server with the first slot that it has, which it keeps: slots go from the ends of ranges."""
    servers = (await rig.look()).servers.values()
    return [(str(rig.pods[one.pod_uid].ip), rig.port, min(one.itself.slots)[0]) for one in servers]
