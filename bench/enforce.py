"""`enforce`: from an edit of a TenantCachePolicy to the moment at which its status reports that every pod enforces it.

1,000 policies, one model, 20 pods whose gates are real programs (`stand_in_gates`). Edits are made one after another;
then as many at once; then tenants are invalidated, one after another. Three moments of each edit are seen by watches:
the first Secret that the operator writes for it, and the policy's status. The baseline is the time of the API server
alone in the same run, between the same edits: a write of a ConfigMap until a watch shows it. Three such steps are the
least that any operator needs (the edit's event, the bundle's event at the pods, the status).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.apiserver import NAMESPACE, ApiServer, Connection, Request, created, merged, running_api_server
from bench.machine import Busyness
from bench.operator_under_test import OperatorUnderTest, RunningProcess, running_operator, supervised
from bench.pods import live_pods
from bench.result import OTHER_LOAD, Figure, Result, percentile
from bench.watching import Seen, Watch, condition_is_true
from bench.writes import writes_so_far
from e2e.cluster.progress import Progress
from kvstrata.clients.resources import BY_KIND, SECRET, Resource

NAME = "enforce"
MODEL = "served"
API_KEYS = "api-keys"
POLICIES = 1000
PODS = 20
EDITS = 200
INVALIDATIONS = 100
PAUSE_S = (0.15, 0.25)
"""Between two paced edits, drawn each time: longer than the operator gathers edits for one commit."""

CONNECTIONS = 16
SETTLE_TIMEOUT_S = 300.0
EDIT_TIMEOUT_S = 60.0

POLICY, CONFIG_MAP = BY_KIND["TenantCachePolicy"], Resource("v1", "ConfigMap", "configmaps")
INVALIDATION = BY_KIND["CacheInvalidation"]


@dataclass(slots=True)
class _Paced:
    enforced_s: list[float] = field(default_factory=list)
    first_write_s: list[float] = field(default_factory=list)
    baseline_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Bench:
    """State shared by the phases of one run."""

    server: ApiServer
    operator: OperatorUnderTest
    gates: RunningProcess
    policies: Watch
    secrets: Watch
    config_maps: Watch
    invalidations: Watch
    connection: Connection
    edits: int = 0

    def next_edit(self) -> tuple[str, Request]:
        """Return a policy that has not been edited for longest, and a change of it that changes its bundle entry."""
        number = self.edits
        self.edits += 1
        name = policy_name(number % POLICIES)
        retention = {"spec": {"budgets": [{**_budget(), "retention": f"{7200 + number}s"}]}}
        return name, merged(POLICY.path(NAMESPACE, name), retention)


async def measure() -> Result:
    """Make the policies and the pods, edit policies one after another and all at once."""
    progress = Progress()
    async with AsyncExitStack() as stack:
        server = stack.enter_context(running_api_server(progress))
        with progress.step("install the CRDs"):
            await server.prepare()
        with progress.step(f"make {POLICIES} policies and a model"):
            await server.send_all(_world(), CONNECTIONS)
            await _first_operator(server)
        # The pods are there before the next operator is, so that each policy needs one write to be enforced.
        with progress.step(f"start {PODS} gates"):
            gates = await stack.enter_async_context(live_pods(server, MODEL, PODS, API_KEYS))
        watch = stack.enter_async_context
        policies = await watch(Watch(server, POLICY, NAMESPACE))
        secrets = await watch(Watch(server, SECRET, NAMESPACE, metadata_only=True))
        config_maps = await watch(Watch(server, CONFIG_MAP, NAMESPACE))
        invalidations = await watch(Watch(server, INVALIDATION, NAMESPACE))
        with progress.step("start the operator and wait until every policy is enforced"):
            operator = await stack.enter_async_context(running_operator(server))
            await operator.wait_until_synced()
            for number in range(POLICIES):
                await policies.seen(policy_name(number), _is_enforced, SETTLE_TIMEOUT_S)
            await operator.wait_until_settled(3.0, SETTLE_TIMEOUT_S)
        await stack.enter_async_context(supervised(operator, gates))
        connection = await stack.enter_async_context(server.connected())
        bench = _Bench(server, operator, gates, policies, secrets, config_maps, invalidations, connection)
        return await _measure(bench, progress)


async def _first_operator(server: ApiServer) -> None:
    """Let an operator draw every epoch and make the model's objects."""
    async with running_operator(server, "operator-before") as operator:
        await operator.wait_until_synced()
        async with Watch(server, POLICY, NAMESPACE) as policies:
            for number in range(POLICIES):
                await policies.seen(policy_name(number), _has_no_live_pods, SETTLE_TIMEOUT_S)
        await operator.wait_until_settled(2.0, SETTLE_TIMEOUT_S)


async def _measure(bench: _Bench, progress: Progress) -> Result:
    processes = (bench.operator, bench.gates)
    await bench.connection.send(created(CONFIG_MAP, NAMESPACE, _config_map("-")))
    for _ in range(5):
        await _edit(bench, _Paced())  # first uses load modules and open connections; their times are not measured
    ids = [process.process.pid for process in processes] + bench.server.pids()
    before = [process.cpu_s() for process in processes]
    writes_before = await writes_so_far(bench.server)
    paced = _Paced()
    with progress.step(f"{EDITS} edits, one after another"), Busyness(*ids) as busyness:
        for turn in range(EDITS):
            await asyncio.sleep(random.uniform(*PAUSE_S))
            await _edit(bench, paced)
            await _write(bench, paced, turn)
    cost = [process.cpu_s() - was for process, was in zip(processes, before, strict=True)]
    await bench.operator.wait_until_settled(1.0, SETTLE_TIMEOUT_S)
    writes = await writes_so_far(bench.server) - writes_before - EDITS  # without the edits themselves
    memory_mb = bench.operator.memory_mb()
    with progress.step(f"{EDITS} edits at once"):
        before_burst, writes_before = bench.operator.cpu_s(), await writes_so_far(bench.server)
        burst_s = await _burst(bench)
        burst_cpu_s = bench.operator.cpu_s() - before_burst
    burst_writes = await writes_so_far(bench.server) - writes_before - EDITS
    await bench.operator.wait_until_settled(1.0, SETTLE_TIMEOUT_S)
    with progress.step(f"{INVALIDATIONS} tenants invalidated, one after another"), Busyness(*ids) as then:
        invalid_s = [await _invalidate(bench, number) for number in range(INVALIDATIONS)]
    return Result(
        name=NAME,
        figures={
            "edit_to_enforced_p50": Figure(percentile(paced.enforced_s, 50), "s"),
            "edit_to_enforced_p99": Figure(percentile(paced.enforced_s, 99), "s"),
            "edit_to_enforced_max": Figure(max(paced.enforced_s), "s"),
            "edit_to_first_write_p50": Figure(percentile(paced.first_write_s, 50), "s"),
            "edit_to_first_write_p99": Figure(percentile(paced.first_write_s, 99), "s"),
            "operator_cpu_per_edit": Figure(1000 * cost[0] / EDITS, "ms"),
            "operator_writes_per_edit": Figure(writes / EDITS, "1"),
            "operator_memory": Figure(memory_mb, "MB"),
            "burst_until_all_enforced": Figure(burst_s, "s"),
            "burst_operator_cpu_per_edit": Figure(1000 * burst_cpu_s / EDITS, "ms"),
            "burst_operator_writes_per_edit": Figure(burst_writes / EDITS, "1"),
            "gates_cpu_per_edit": Figure(1000 * cost[1] / EDITS, "ms"),
            "invalidation_acknowledged_p50": Figure(percentile(invalid_s, 50), "s"),
            "invalidation_acknowledged_p99": Figure(percentile(invalid_s, 99), "s"),
        },
        baseline={
            "write_to_watch_p50": Figure(percentile(paced.baseline_s, 50), "s"),
            "write_to_watch_p99": Figure(percentile(paced.baseline_s, 99), "s"),
        },
        ratio=percentile(paced.enforced_s, 50) / percentile(paced.baseline_s, 50),
        reproduce="make bench BENCH=enforce",
        conditions={
            "policies": POLICIES,
            "pods": PODS,
            "edits": EDITS,
            "invalidations": INVALIDATIONS,
            "pods_are": "real gate programs in one process beside the API server, no kubelet, no engine",
            OTHER_LOAD: round(max(busyness.others_percent, then.others_percent)),
        },
    )


async def _edit(bench: _Bench, paced: _Paced) -> None:
    """Edit one policy; take the times until the operator's first write and until it is enforced."""
    name, request = bench.next_edit()
    first_write: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def saw(_: str, at: float) -> None:
        if not first_write.done():
            first_write.set_result(at)

    bench.secrets.on_event = saw
    started = time.monotonic()
    edited = await bench.connection.send(request)
    generation = edited["metadata"]["generation"]
    enforced_at = await bench.policies.seen(name, partial(_enforces, generation), EDIT_TIMEOUT_S)
    bench.secrets.on_event = None
    paced.enforced_s.append(enforced_at - started)
    paced.first_write_s.append(first_write.result() - started)


async def _write(bench: _Bench, paced: _Paced, turn: int) -> None:
    """Take the time from a write to its event, without any operator."""
    path = CONFIG_MAP.path(NAMESPACE, "baseline")
    started = time.monotonic()
    await bench.connection.send(merged(path, {"data": {"turn": str(turn)}}))
    seen_at = await bench.config_maps.seen(
        "baseline", lambda found: bool(found["data"]["turn"] == str(turn)), EDIT_TIMEOUT_S
    )
    paced.baseline_s.append(seen_at - started)


async def _burst(bench: _Bench) -> float:
    """Edit many policies at once; return the seconds until the last of them is enforced."""
    edits = [bench.next_edit() for _ in range(EDITS)]
    wanted = {name: int(bench.policies.objects[name]["metadata"]["generation"]) + 1 for name, _ in edits}
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.server.send_all([request for _, request in edits], CONNECTIONS))
        seen = [
            group.create_task(bench.policies.seen(name, partial(_enforces, generation), EDIT_TIMEOUT_S))
            for name, generation in wanted.items()
        ]
    return max(task.result() for task in seen) - started


async def _invalidate(bench: _Bench, number: int) -> float:
    """Apply a CacheInvalidation of one tenant; return the seconds until its status reports that all gates obey."""
    await asyncio.sleep(random.uniform(*PAUSE_S))
    name = f"invalidation-{number}"
    spec = {"scope": {"tenant": policy_name(number)}, "mode": "Lazy", "reason": "a benchmark"}
    request = own("CacheInvalidation", name, spec)
    started = time.monotonic()
    await bench.connection.send(request)
    return await bench.invalidations.seen(name, _is_logically_invalid, EDIT_TIMEOUT_S) - started


def _enforces(generation: int, found: Seen) -> bool:
    status = found.get("status") or {}
    return condition_is_true(found, "Enforced") and bool(status.get("enforcedGeneration") == generation)


def _is_enforced(found: Seen) -> bool:
    return condition_is_true(found, "Enforced")


def _is_logically_invalid(found: Seen) -> bool:
    return condition_is_true(found, "LogicallyInvalid")


def _has_no_live_pods(found: Seen) -> bool:
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["reason"] == "NoLivePods" for c in conditions)


def policy_name(number: int) -> str:
    """Return the name of a policy, which is its tenant's, too."""
    return f"tenant-{number:04d}"


def _world() -> list[Request]:
    """Return the requests that make tiers, model, API keys and policies."""
    tiers = (("cpu", {"medium": "CPU", "capacityPerPod": "8Gi"}),)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": API_KEYS},
        "stringData": {"keys.json": '{"keys": []}'},
    }
    policies = (
        {"tenant": policy_name(number), "isolation": "Isolated", "budgets": [{**_budget(), "retention": "3600s"}]}
        for number in range(POLICIES)
    )
    return [
        created(SECRET, NAMESPACE, secret),
        *(own("CacheTier", name, spec) for name, spec in tiers),
        own("CachedModel", MODEL, model_spec()),
        *(own("TenantCachePolicy", str(spec["tenant"]), spec) for spec in policies),
    ]


def _budget() -> dict[str, str]:
    return {"tier": "cpu", "guaranteed": "1Mi", "limit": "64Mi"}


def _config_map(turn: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "baseline"}, "data": {"turn": turn}}


def own(kind: str, name: str, spec: Mapping[str, Any]) -> Request:
    """Return the request that creates an object of the product's API."""
    resource = BY_KIND[kind]
    body = {"apiVersion": resource.api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}
    return created(resource, NAMESPACE, body)


def model_spec() -> dict[str, Any]:
    """Return the spec of a CachedModel on the tier `cpu`."""
    return {
        "model": {"name": "tiny", "source": {"path": "/opt/tiny"}, "dtype": "bfloat16", "maxModelLen": 2048},
        "engine": {"image": "localhost/engine:bench", "replicas": 2},
        "tiers": [{"name": "cpu"}],
        "cacheServer": {"image": "localhost/engine:bench", "chunkSize": 64},
        "gate": {"authentication": {"apiKeys": {"secretRef": {"name": API_KEYS}}}},
        # The gates here are stand-ins that cannot.
        "probe": {"mode": "Never"},
    }
