"""100 external tiers, each on a redis-server of its own, applied at once to an operator at rest.

From the first apply until every tier is Ready, which takes a whole check of each server; then, at rest, the cost of the
checks every 15 s, and that they write nothing. The baseline does only the necessary steps with the same servers and
decides nothing: it creates the objects, asks each server for INFO, and writes each status once.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.apiserver import NAMESPACE, NAMESPACES, ApiServer, Request, created, merged, running_api_server
from bench.enforce import own
from bench.machine import Busyness
from bench.operator_under_test import OperatorUnderTest, running_operator
from bench.result import Figure
from bench.tier.part import Part
from bench.watching import Watch
from bench.writes import writes_so_far
from e2e.cluster.progress import Progress
from kvstrata.clients.resources import BY_KIND
from tests.tiers.redis_process import RedisProcess

TIERS = 100
CONNECTIONS = 16
CAPACITY = "64Mi"
BASELINE_NAMESPACE = "baseline"
READY_TIMEOUT_S = 180.0
QUIET_S = 3.0
REST_S = 30.0
"""Two checks of each server."""

CACHE_TIER = BY_KIND["CacheTier"]


async def measure(progress: Progress) -> Part:
    """Start servers, API server and operator, and apply the tiers."""
    async with AsyncExitStack() as stack:
        with progress.step(f"start {TIERS} redis-servers"):
            ports = stack.enter_context(_servers())
        server = stack.enter_context(running_api_server(progress))
        with progress.step("install the CRDs"):
            await server.prepare()
        watch = await stack.enter_async_context(Watch(server, CACHE_TIER, NAMESPACE))
        async with running_operator(server) as operator:
            with progress.step("start the operator"):
                await operator.wait_until_synced()
                await operator.wait_until_settled(QUIET_S, READY_TIMEOUT_S)
            return await _applied(server, watch, operator, ports, progress)


async def _applied(
    server: ApiServer, watch: Watch, operator: OperatorUnderTest, ports: list[int], progress: Progress
) -> Part:
    cpu_before, writes_before = operator.cpu_s(), await writes_so_far(server)
    ready = [asyncio.ensure_future(watch.seen(_name(number), _is_ready, READY_TIMEOUT_S)) for number in range(TIERS)]
    with progress.step(f"apply {TIERS} tiers"), Busyness(operator.process.pid, *server.pids()) as busyness:
        started = time.monotonic()
        await server.send_all([own("CacheTier", _name(n), _spec(port)) for n, port in enumerate(ports)], CONNECTIONS)
        until_ready_s = max(await asyncio.gather(*ready)) - started
    with progress.step("wait for rest"):
        await operator.wait_until_settled(QUIET_S, READY_TIMEOUT_S)
    cpu_s, writes = operator.cpu_s() - cpu_before, await writes_so_far(server) - writes_before - TIERS
    with progress.step(f"watch for writes during {REST_S:.0f} s of rest"):
        before, cpu_before = await writes_so_far(server), operator.cpu_s()
        await asyncio.sleep(REST_S)
        rest_writes, rest_cpu_s = await writes_so_far(server) - before, operator.cpu_s() - cpu_before
    with progress.step("do the same without deciding anything"):
        raw_s = await _baseline(server, ports, dict(watch.objects[_name(0)]["status"]))
    return Part(
        figures={
            "external_first_apply_to_all_ready": Figure(until_ready_s, "s"),
            "external_operator_cpu_per_tier": Figure(1000 * cpu_s / TIERS, "ms"),
            "external_operator_writes_per_tier": Figure(writes / TIERS, "1"),
            "external_writes_at_rest": Figure(rest_writes, "1"),
            "external_cpu_at_rest": Figure(1000 * rest_cpu_s / REST_S, "ms/s"),
            "external_operator_memory": Figure(operator.memory_mb(), "MB"),
        },
        baseline={"external_created_asked_and_written": Figure(raw_s, "s")},
        ratio=raw_s / until_ready_s,
        conditions={"external_tiers": TIERS, "external_connections": CONNECTIONS},
        others_percent=busyness.others_percent,
    )


async def _baseline(server: ApiServer, ports: list[int], status: dict[str, Any]) -> float:
    """Create the objects, ask the servers, write the statuses; return the seconds that it took."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": BASELINE_NAMESPACE}}
    await server.send_all([created(NAMESPACES, None, body)], 1)
    creations = [
        created(
            CACHE_TIER,
            BASELINE_NAMESPACE,
            {
                "apiVersion": CACHE_TIER.api_version,
                "kind": "CacheTier",
                "metadata": {"name": _name(number)},
                "spec": _spec(port),
            },
        )
        for number, port in enumerate(ports)
    ]
    statuses = [_status(number, status) for number in range(TIERS)]
    started = time.monotonic()
    await server.send_all(creations, CONNECTIONS)
    await asyncio.gather(*map(_ask, ports))
    await server.send_all(statuses, CONNECTIONS)
    return time.monotonic() - started


def _status(number: int, status: dict[str, Any]) -> Request:
    return merged(CACHE_TIER.path(BASELINE_NAMESPACE, _name(number), "status"), {"status": status})


async def _ask(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"INFO\r\n")
    length = int((await reader.readline())[1:])
    await reader.readexactly(length)
    writer.close()


@contextlib.contextmanager
def _servers() -> Iterator[list[int]]:
    """Run a redis-server for each tier while the block runs; yield their ports."""
    started: list[RedisProcess] = []
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-redis-") as folder:
        try:
            for _ in range(TIERS):
                started.append(RedisProcess(Path(folder), "--maxmemory", "64mb"))
                started[-1].start()
            yield [server.port for server in started]
        finally:
            for server in started:
                server.kill()


def _spec(port: int) -> dict[str, Any]:
    external = {"endpoints": [f"127.0.0.1:{port}"]}
    return {"medium": "Redis", "capacity": CAPACITY, "encryption": "Disabled", "redis": {"external": external}}


def _is_ready(tier: Any) -> bool:
    conditions = (tier.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _name(number: int) -> str:
    return f"tier-{number:03d}"
