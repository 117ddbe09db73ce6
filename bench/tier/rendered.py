"""100 managed clusters, applied at once to an operator at rest: how fast it creates their objects, and at which cost.

No pod runs, so that nothing but the operator and the API server is measured: the clusters wait for their pods, and
the operator, which looks after each of them by now, has nothing to write. The baselines are the same objects, created
and applied by a client that does nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from bench.apiserver import NAMESPACE, ApiServer, running_api_server
from bench.enforce import own
from bench.machine import Busyness
from bench.operator_under_test import OperatorUnderTest, running_operator
from bench.result import RATIO, Figure
from bench.same_objects import MADE, applies_per_second, creates_per_second
from bench.tier.part import Part
from bench.watching import Watch
from bench.writes import writes_so_far
from e2e.cluster.progress import Progress
from kvstrata.objects import labels

TIERS = 100
CONNECTIONS = 16
SHARDS, REPLICAS = 3, 1
CHILDREN_OF_A_TIER = 8
"""A StatefulSet for each of three shards, Service, PodDisruptionBudget, NetworkPolicy, and two Secrets: the users'
passwords and the servers' certificate. Measured as found; fewer is an error."""

TIMEOUT_S = 300.0
QUIET_S = 3.0
REST_S = 10.0


async def measure(progress: Progress) -> Part:
    """Start API server and operator, apply the tiers, wait for rest, and write the same objects without an operator."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(running_api_server(progress))
        with progress.step("install the CRDs"):
            await server.prepare()
        watches = [await stack.enter_async_context(Watch(server, made, NAMESPACE, metadata_only=True)) for made in MADE]
        async with running_operator(server) as operator:
            with progress.step("start the operator"):
                await operator.wait_until_synced()
                await operator.wait_until_settled(QUIET_S, TIMEOUT_S)
            idle_memory_mb, cpu_before = operator.memory_mb(), operator.cpu_s()
            writes_before = await writes_so_far(server)
            with progress.step(f"apply {TIERS} managed clusters"):
                with Busyness(operator.process.pid, *server.pids()) as busyness:
                    started = time.monotonic()
                    await server.send_all(
                        [own("CacheTier", f"tier-{n:03d}", _spec()) for n in range(TIERS)], CONNECTIONS
                    )
                    await _all_made(operator, watches)
                made_at = [at for watch in watches for name, at in watch.added_at.items() if _is_of_tier(watch, name)]
                elapsed_s = max(made_at) - started
            with progress.step("wait for rest"):
                await _no_more_writes(server)
            cpu_s, writes = operator.cpu_s() - cpu_before, await writes_so_far(server) - writes_before - TIERS
            with progress.step(f"watch for writes during {REST_S:.0f} s of rest"):
                before, cpu_before = await writes_so_far(server), operator.cpu_s()
                await asyncio.sleep(REST_S)
                rest_writes, rest_cpu_s = await writes_so_far(server) - before, operator.cpu_s() - cpu_before
            memory_mb = operator.memory_mb()
        with progress.step("create the same objects without an operator"):
            raw_per_s = await creates_per_second(server, labels.TIER, CONNECTIONS)
        with progress.step("apply the same objects without an operator"):
            raw_applies_per_s = await applies_per_second(server, labels.TIER, CONNECTIONS)
    children_per_s = len(made_at) / elapsed_s
    return Part(
        figures={
            "rendered_children_per_second": Figure(children_per_s, "1/s", baseline=raw_per_s),
            "rendered_of_raw": Figure(children_per_s / raw_per_s, RATIO),
            "rendered_of_raw_applies": Figure(children_per_s / raw_applies_per_s, RATIO),
            "rendered_first_apply_to_last_child": Figure(elapsed_s, "s", baseline=len(made_at) / raw_per_s),
            "rendered_operator_cpu_per_tier": Figure(1000 * cpu_s / TIERS, "ms"),
            "rendered_operator_writes_per_tier": Figure(writes / TIERS, "1"),
            "rendered_operator_memory": Figure(memory_mb, "MB", baseline=idle_memory_mb),
            "rendered_writes_at_rest": Figure(rest_writes, "1"),
            "rendered_cpu_at_rest": Figure(1000 * rest_cpu_s / REST_S, "ms/s"),
        },
        baseline={
            "rendered_raw_creates_per_second": Figure(raw_per_s, "1/s"),
            "rendered_raw_applies_per_second": Figure(raw_applies_per_s, "1/s"),
        },
        ratio=children_per_s / raw_per_s,
        conditions={"rendered_tiers": TIERS, "rendered_children": len(made_at), "rendered_connections": CONNECTIONS},
        others_percent=busyness.others_percent,
    )


async def _all_made(operator: OperatorUnderTest, watches: Sequence[Watch]) -> None:
    """Wait until every tier has all of its objects."""
    async with asyncio.timeout(TIMEOUT_S):
        while sum(_is_of_tier(watch, name) for watch in watches for name in watch.objects) < TIERS * CHILDREN_OF_A_TIER:
            operator.check()
            await asyncio.sleep(0.05)


async def _no_more_writes(server: ApiServer) -> None:
    """Wait until nothing is written any more: tiers without pods are planned, and looked at, again and again."""
    async with asyncio.timeout(TIMEOUT_S):
        before, writes = -1, await writes_so_far(server)
        while before != writes:
            await asyncio.sleep(QUIET_S)
            before, writes = writes, await writes_so_far(server)


def _is_of_tier(watch: Watch, name: str) -> bool:
    found = watch.objects.get(name)
    return found is not None and labels.TIER in (found["metadata"].get("labels") or {})


def _spec() -> dict[str, object]:
    managed = {"shards": SHARDS, "replicasPerShard": REPLICAS}
    return {"medium": "Redis", "capacity": "3Gi", "redis": {"managed": managed}}
