"""`enforce`: from an edit of a TenantCachePolicy to the moment at which its status says that every pod enforces it.

Runs against the installed product with real pods. The baseline is what the API server alone takes in the same run: a
write of a ConfigMap until a watch shows it; three such steps are the least that any operator needs (the edit's event,
the bundle's event at the pods, the status).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from bench.result import Figure, Result, percentile
from bench.watching import LastSeen, connect
from e2e.cluster.settings import Paths
from e2e.product.install import DEMO_NAMESPACE
from kvstrata.adapters.kube import Kube
from kvstrata.adapters.resources import OWN_RESOURCES, Resource

NAME = "enforce"
POLICIES = 200
EDITS = 200
SETTLE_TIMEOUT_S = 120.0
EDIT_TIMEOUT_S = 30.0

POLICY = next(resource for resource in OWN_RESOURCES if resource.kind == "TenantCachePolicy")
CONFIG_MAP = Resource("v1", "ConfigMap", "configmaps")


async def measure() -> Result:
    """Make 200 policies, edit them one after another, and time each edit until it is enforced."""
    kubeconfig = Paths().kubeconfig
    kube = await connect(kubeconfig)
    policies, config_maps = (LastSeen(kubeconfig, kind, DEMO_NAMESPACE) for kind in (POLICY, CONFIG_MAP))
    followers = [asyncio.create_task(seen.follow()) for seen in (policies, config_maps)]
    names = [f"bench-{number}" for number in range(POLICIES)]
    try:
        await asyncio.gather(*(_create(kube, name) for name in names))
        for name in names:
            await policies.wait(name, _enforced, SETTLE_TIMEOUT_S)
        edits = [await _edit(kube, policies, names[turn % POLICIES], turn) for turn in range(EDITS)]
        writes = [await _write(kube, config_maps, turn) for turn in range(EDITS)]
        pods = [pod async for pod in kube.list(Resource("v1", "Pod", "pods"), DEMO_NAMESPACE, "kvstrata.io/model")]
    finally:
        for task in followers:
            task.cancel()
        await asyncio.gather(*(_delete(kube, POLICY, name) for name in names))
        await _delete(kube, CONFIG_MAP, "bench")
        await kube.close()
    return Result(
        name=NAME,
        figures={
            "edit_to_enforced_p50": Figure(percentile(edits, 50), "s"),
            "edit_to_enforced_p99": Figure(percentile(edits, 99), "s"),
            "edit_to_enforced_max": Figure(max(edits), "s"),
        },
        baseline={
            "write_to_watch_p50": Figure(percentile(writes, 50), "s"),
            "write_to_watch_p99": Figure(percentile(writes, 99), "s"),
        },
        ratio=percentile(edits, 50) / percentile(writes, 50),
        reproduce="make demo && make bench BENCH=enforce",
        conditions={"policies": POLICIES, "edits": EDITS, "pods": len(pods)},
    )


async def _create(kube: Kube, name: str) -> None:
    body = {
        "apiVersion": POLICY.api_version,
        "kind": POLICY.kind,
        "metadata": {"name": name},
        "spec": {"tenant": name, "isolation": "Isolated", "deletionPolicy": "Abandon"},
    }
    await kube.create(POLICY, DEMO_NAMESPACE, body)


async def _edit(kube: Kube, policies: LastSeen, name: str, turn: int) -> float:
    """Change a policy's retention; the bundle's entry changes with it, so every pod must acknowledge."""
    patch = {"spec": {"tiers": [{"name": "shared", "retention": f"{3600 + turn}s"}]}}
    started = time.monotonic()
    edited = await kube.request(
        "PATCH", POLICY.path(DEMO_NAMESPACE, name), body=patch, content_type="application/merge-patch+json"
    )
    generation = edited["metadata"]["generation"]

    def enforced(item: Mapping[str, Any]) -> bool:
        return _enforced(item) and bool(item["status"].get("enforcedGeneration") == generation)

    await policies.wait(name, enforced, EDIT_TIMEOUT_S)
    return time.monotonic() - started


async def _write(kube: Kube, config_maps: LastSeen, turn: int) -> float:
    started = time.monotonic()
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "bench"},
        "data": {"turn": str(turn)},
    }
    await kube.apply(CONFIG_MAP, DEMO_NAMESPACE, body, "bench")
    await config_maps.wait("bench", lambda item: item["data"].get("turn") == str(turn), EDIT_TIMEOUT_S)
    return time.monotonic() - started


async def _delete(kube: Kube, resource: Resource, name: str) -> None:
    found = await kube.get(resource, DEMO_NAMESPACE, name)
    if found is not None:
        await kube.delete(resource, DEMO_NAMESPACE, name, found["metadata"]["uid"])


def _enforced(item: Mapping[str, Any]) -> bool:
    conditions = (item.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Enforced" and c["status"] == "True" for c in conditions)
