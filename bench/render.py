"""`render`: 300 CachedModels applied at once, until the last object that the operator makes of them exists.

Then nothing may be written any more; then the operator is replaced, and its successor may write nothing either. The
baseline is the same objects, created in the same API server by a client that does nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from bench.apiserver import NAMESPACE, ApiServer, Request, created, running_api_server
from bench.enforce import API_KEYS, model_spec, own
from bench.machine import Busyness
from bench.operator_under_test import OperatorUnderTest, running_operator
from bench.result import OTHER_LOAD, Figure, Result
from bench.same_objects import MADE, creates_per_second
from bench.watching import Watch
from bench.writes import writes_so_far
from e2e.cluster.progress import Progress
from kvstrata.clients.resources import SECRET
from kvstrata.objects import labels

NAME = "render"
MODELS = 300
CONNECTIONS = 16
CHILDREN_OF_A_MODEL = 10
"""Deployment, Service, ServiceAccount, PodDisruptionBudget, NetworkPolicy, Role, RoleBinding and three Secrets: the
gate's certificate, the bundle's root and its first shard. Measured as found; fewer is an error."""

CHILDREN_TIMEOUT_S = 300.0
QUIET_S = 3.0
REST_S = 10.0


async def measure() -> Result:
    """Apply the models, wait for rest, replace the operator, and write the same objects without one."""
    progress = Progress()
    async with AsyncExitStack() as stack:
        server = stack.enter_context(running_api_server(progress))
        with progress.step("install the CRDs"):
            await server.prepare()
        watches = [await stack.enter_async_context(Watch(server, made, NAMESPACE, metadata_only=True)) for made in MADE]
        first = await _first_operator(server, watches, progress)
        with progress.step(f"replace the operator over {MODELS} models"):
            before = await writes_so_far(server)
            async with running_operator(server, "operator-b") as successor:
                with Busyness(successor.process.pid, *server.pids()) as busyness:
                    synced_s = await successor.wait_until_synced()
                    settled_s = await successor.wait_until_settled(QUIET_S, CHILDREN_TIMEOUT_S)
                successor_cpu_s, successor_memory_mb = successor.cpu_s(), successor.memory_mb("VmHWM")
            restart_writes = await writes_so_far(server) - before
        with progress.step("create the same objects without an operator"):
            raw_per_s = await creates_per_second(server, labels.MODEL, CONNECTIONS)
    return Result(
        name=NAME,
        figures={
            **first.figures,
            "restart_until_synced": Figure(synced_s, "s"),
            "restart_until_at_rest": Figure(settled_s, "s"),
            "restart_writes": Figure(restart_writes, "1"),
            "restart_cpu": Figure(successor_cpu_s, "s"),
            "restart_memory_peak": Figure(successor_memory_mb, "MB"),
        },
        baseline={"raw_creates_per_second": Figure(raw_per_s, "1/s")},
        ratio=first.children_per_s / raw_per_s,
        reproduce="make bench BENCH=render",
        conditions={
            "models": MODELS,
            "children": first.children,
            "connections": CONNECTIONS,
            OTHER_LOAD: round(max(first.others_percent, busyness.others_percent)),
        },
    )


class _First:
    """Figures of the operator that ran when the models were applied."""

    def __init__(self, children: int, elapsed_s: float, others_percent: float, figures: Mapping[str, Figure]) -> None:
        self.children, self.children_per_s = children, children / elapsed_s
        self.others_percent, self.figures = others_percent, figures


async def _first_operator(server: ApiServer, watches: Sequence[Watch], progress: Progress) -> _First:
    async with running_operator(server, "operator-a") as operator:
        with progress.step("start the operator"):
            await server.send_all(_tiers(), 2)
            await operator.wait_until_synced()
            await operator.wait_until_settled(QUIET_S, CHILDREN_TIMEOUT_S)
        idle_memory_mb = operator.memory_mb()
        writes_before, cpu_before = await writes_so_far(server), operator.cpu_s()
        with progress.step(f"apply {MODELS} models"), Busyness(operator.process.pid, *server.pids()) as busyness:
            started = time.monotonic()
            await server.send_all([own("CachedModel", _name(n), model_spec()) for n in range(MODELS)], CONNECTIONS)
            applied_s = time.monotonic() - started
            await _all_made(operator, watches)
        children = [
            at for watch in watches for name, at in watch.added_at.items() if name in watch.objects and at >= started
        ]
        elapsed_s = max(children) - started
        with progress.step("wait for rest"):
            await operator.wait_until_settled(QUIET_S, CHILDREN_TIMEOUT_S)
        cpu_s = operator.cpu_s() - cpu_before
        writes = await writes_so_far(server) - writes_before - MODELS
        with progress.step(f"watch for writes during {REST_S:.0f} s of rest"):
            before, cpu_before = await writes_so_far(server), operator.cpu_s()
            await asyncio.sleep(REST_S)
            rest_writes, rest_cpu_s = await writes_so_far(server) - before, operator.cpu_s() - cpu_before
        figures = {
            "children_per_second": Figure(len(children) / elapsed_s, "1/s"),
            "first_apply_to_last_child": Figure(elapsed_s, "s"),
            "applying_took": Figure(applied_s, "s"),
            "operator_cpu_per_model": Figure(1000 * cpu_s / MODELS, "ms"),
            "operator_cpu_per_child": Figure(1000 * cpu_s / len(children), "ms"),
            "operator_writes_per_model": Figure(writes / MODELS, "1"),
            "operator_memory_before": Figure(idle_memory_mb, "MB"),
            "operator_memory": Figure(operator.memory_mb(), "MB"),
            "writes_at_rest": Figure(rest_writes, "1"),
            "cpu_at_rest": Figure(1000 * rest_cpu_s / REST_S, "ms/s"),
        }
        return _First(len(children), elapsed_s, busyness.others_percent, figures)


async def _all_made(operator: OperatorUnderTest, watches: Sequence[Watch]) -> None:
    """Wait until every model has all of its objects."""
    async with asyncio.timeout(CHILDREN_TIMEOUT_S):
        while sum(_of_models(watch) for watch in watches) < MODELS * CHILDREN_OF_A_MODEL:
            operator.check()
            await asyncio.sleep(0.05)


def _of_models(watch: Watch) -> int:
    return sum(1 for found in watch.objects.values() if labels.MODEL in (found["metadata"].get("labels") or {}))


def _tiers() -> list[Request]:
    tiers = (("cpu", {"medium": "CPU", "capacityPerPod": "8Gi"}),)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": API_KEYS}, "stringData": {"keys.json": "{}"}}
    return [created(SECRET, NAMESPACE, secret), *(own("CacheTier", name, spec) for name, spec in tiers)]


def _name(number: int) -> str:
    return f"model-{number:03d}"
