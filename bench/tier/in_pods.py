"""A managed cluster of 3 shards with a replica each, in pods of the local cluster: formed, a primary's pod deleted, a
primary killed.

Needs a local cluster with the product, as `make demo` leaves it: its pods are processes of this machine, so a caller
can use the cluster from within the network of a pod. Times are those at which a watch shows something.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.apiserver import ApiAccess, RefusedError, Request, created
from bench.machine import Busyness
from bench.result import Figure
from bench.tier.part import Part
from bench.watching import Watch, condition_is_true
from e2e.cluster.progress import Progress
from e2e.cluster.settings import Paths
from e2e.product.cluster_caller import cluster_caller
from e2e.product.direct import pods_run_here
from e2e.product.faults import Victim
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl
from kvstrata.clients.resources import BY_KIND, POD
from kvstrata.objects import labels, paths
from kvstrata.objects.redis.cluster import NODE_TIMEOUT_MS

TIER = "bench-cluster"
SHARDS, REPLICAS = 3, 1
FORMATIONS = 2
TIMEOUT_S = 240.0
POLL_S = 0.01
WARM_REQUESTS = 100
CALLER_PAUSE_S = 0.01
"""So short that a former primary is asked, and redirects, before its pod is gone: an address that is gone costs a
caller its own time-out."""

REST_S = 3.0
CACHE_TIER = BY_KIND["CacheTier"]

PEER_FORMED_S, PEER_WRITES_STOPPED_S, PEER_READY_AGAIN_S = 20.0, 0.85, 15.5
"""Baselines: valkey-operator with 3 x (1+1) on a node of the same kind, built and measured once: Ready 19 to 21 s after
apply, writes stopped for 0.6 to 1.1 s when a primary's pod was deleted, Ready again after 14 to 17 s."""

NOT_MEASURED = "pods_"


@dataclass(frozen=True, slots=True)
class _Formed:
    after_apply_s: float
    after_last_pod_s: float


@dataclass(frozen=True, slots=True)
class _Outage:
    stopped_s: float
    ready_again_s: float
    failed: int


async def measure(progress: Progress) -> Part:
    """Form the cluster some times, then delete the pod of each shard's primary, one after the other."""
    async with AsyncExitStack() as stack:
        api = await _local_cluster()
        if isinstance(api, str):
            return Part({}, {}, 0.0, {}, 0.0, not_measured={NOT_MEASURED: api})
        kubectl = Kubectl()
        tiers = await stack.enter_async_context(Watch(api, CACHE_TIER, DEMO_NAMESPACE))
        pods = await stack.enter_async_context(Watch(api, POD, DEMO_NAMESPACE))
        world = _World(tiers, pods)
        formed: list[_Formed] = []
        replaced: list[_Outage] = []
        killed: list[_Outage] = []
        # While it works, the cluster's own programs, which are not this one's children, would count as others.
        with progress.step("see how busy the machine is"), Busyness() as busyness:
            await asyncio.sleep(REST_S)
        for number in range(FORMATIONS):
            with progress.step(f"form a cluster in pods, {number + 1} of {FORMATIONS}"):
                formed.append(await _form(api, world))
            if number == FORMATIONS - 1:
                for shard in range(SHARDS):
                    with progress.step(f"delete the pod of the primary of shard {shard}"):
                        replaced.append(await _replace(api, kubectl, world, shard))
                for shard in range(SHARDS):
                    with progress.step(f"kill the primary of shard {shard}"):
                        killed.append(await _kill(kubectl, world, shard))
            with progress.step("delete it"):
                await _delete(api, world)
    return Part(
        figures={
            "pods_apply_to_ready": Figure(max(one.after_apply_s for one in formed), "s", baseline=PEER_FORMED_S),
            "pods_last_pod_to_ready": Figure(max(one.after_last_pod_s for one in formed), "s"),
            "pods_deleted_writes_stopped": Figure(
                max(one.stopped_s for one in replaced), "s", baseline=PEER_WRITES_STOPPED_S
            ),
            "pods_deleted_writes_stopped_p50": Figure(median(one.stopped_s for one in replaced), "s"),
            "pods_deleted_until_ready": Figure(
                max(one.ready_again_s for one in replaced), "s", baseline=PEER_READY_AGAIN_S
            ),
            "pods_deleted_requests_failed": Figure(sum(one.failed for one in replaced), "1"),
            "pods_killed_until_served": Figure(
                max(one.stopped_s for one in killed), "s", baseline=NODE_TIMEOUT_MS / 1000
            ),
            "pods_killed_until_served_p50": Figure(median(one.stopped_s for one in killed), "s"),
            "pods_killed_until_ready": Figure(max(one.ready_again_s for one in killed), "s"),
            "pods_killed_requests_failed": Figure(sum(one.failed for one in killed), "1"),
        },
        baseline={
            "pods_valkey_operator_apply_to_ready": Figure(PEER_FORMED_S, "s"),
            "pods_valkey_operator_deleted_writes_stopped": Figure(PEER_WRITES_STOPPED_S, "s"),
            "pods_valkey_operator_deleted_until_ready": Figure(PEER_READY_AGAIN_S, "s"),
        },
        ratio=0.0,
        conditions={
            "pods_formed": FORMATIONS,
            "pods_deleted": SHARDS,
            "pods_killed": SHARDS,
            "pods_node_timeout_s": NODE_TIMEOUT_MS / 1000,
            "pods_valkey_operator": "measured once, elsewhere",
        },
        others_percent=busyness.others_percent,
    )


class _World:
    """The cluster as watches show it."""

    def __init__(self, tiers: Watch, pods: Watch) -> None:
        self._tiers, self._pods = tiers, pods

    def pods(self) -> dict[str, Any]:
        """The tier's pods by name."""
        found = self._pods.objects.items()
        return {name: pod for name, pod in found if (pod["metadata"].get("labels") or {}).get(labels.TIER) == TIER}

    def restarts(self, name: str) -> int:
        """How often a pod's containers were restarted."""
        found = (self.pods()[name].get("status") or {}).get("containerStatuses") or ()
        return sum(int(one["restartCount"]) for one in found)

    def uids(self) -> set[str]:
        """The identities of the tier's pods."""
        return {pod["metadata"]["uid"] for pod in self.pods().values()}

    def pods_are_ready(self) -> bool:
        """Whether all pods are there and ready."""
        found = self.pods().values()
        whole = len(found) == SHARDS * (1 + REPLICAS) and not any("deletionTimestamp" in p["metadata"] for p in found)
        return whole and all(condition_is_true(pod, "Ready") for pod in found)

    def tier_is_ready(self) -> bool:
        """Whether the tier reports so, with nothing left to do."""
        tier = self._tiers.objects.get(TIER)
        status = (tier or {}).get("status") or {}
        return tier is not None and condition_is_true(tier, "Ready") and not status.get("progress")

    async def until(self, what: str, holds: Callable[[], bool]) -> float:
        """Return when a condition was first seen to hold. Raises TimeoutError that names the condition."""
        give_up_at_s = time.monotonic() + TIMEOUT_S
        while not holds():
            if time.monotonic() > give_up_at_s:
                status = json.dumps((self._tiers.objects.get(TIER) or {}).get("status"))[:2000]
                raise TimeoutError(f"{what}: not after {TIMEOUT_S:g} s; the tier's status is {status}")
            await asyncio.sleep(POLL_S)
        return time.monotonic()


async def _form(api: ApiAccess, world: _World) -> _Formed:
    body = {
        "apiVersion": CACHE_TIER.api_version,
        "kind": "CacheTier",
        "metadata": {"name": TIER, "namespace": DEMO_NAMESPACE},
        "spec": {
            "medium": "Redis",
            "capacity": "96Mi",
            "redis": {
                "managed": {
                    "shards": SHARDS,
                    "replicasPerShard": REPLICAS,
                    "resources": {"requests": {"cpu": "20m", "memory": "96Mi"}},
                }
            },
        },
    }
    applied_s = time.monotonic()
    await api.send_all([created(CACHE_TIER, DEMO_NAMESPACE, body)], 1)
    pods_s = await world.until("its pods are ready", world.pods_are_ready)
    ready_s = await world.until("the tier is ready", world.tier_is_ready)
    return _Formed(ready_s - applied_s, ready_s - pods_s)


async def _replace(api: ApiAccess, kubectl: Kubectl, world: _World, shard: int) -> _Outage:
    """Delete the pod of a shard's primary while a caller writes and reads."""
    name = await asyncio.to_thread(_primary, kubectl, world, shard)
    uid = world.pods()[name]["metadata"]["uid"]
    async with _caller(kubectl) as requests:
        await world.until("requests are served", lambda: requests.hits > WARM_REQUESTS)
        requests.longest_s = 0.0
        deleted_s = time.monotonic()
        async with api.connected() as connection:
            await connection.exchange(Request("DELETE", POD.path(DEMO_NAMESPACE, name)))
        await world.until("another pod has its place", lambda: uid not in world.uids() and world.pods_are_ready())
        ready_s = await world.until("the tier is ready again", world.tier_is_ready)
        hits = requests.hits
        await world.until("requests are served", lambda: requests.hits > hits + WARM_REQUESTS)
        return _Outage(requests.longest_s, ready_s - deleted_s, requests.failed)


async def _kill(kubectl: Kubectl, world: _World, shard: int) -> _Outage:
    """Kill the server of a shard's primary (SIGKILL) while a caller writes and reads; the pod stays."""
    name = await asyncio.to_thread(_primary, kubectl, world, shard)
    victim = Victim(kubectl, DEMO_NAMESPACE, name, "redis")
    restarts = world.restarts(name)
    async with _caller(kubectl) as requests:
        await world.until("requests are served", lambda: requests.hits > WARM_REQUESTS)
        requests.longest_s = 0.0
        server = await asyncio.to_thread(victim.first_pid)
        killed_s = time.monotonic()
        os.kill(server, signal.SIGKILL)
        await world.until("the pod restarts it", lambda: world.restarts(name) > restarts and world.pods_are_ready())
        ready_s = await world.until("the tier is ready again", world.tier_is_ready)
        hits = requests.hits
        await world.until("requests are served", lambda: requests.hits > hits + WARM_REQUESTS)
        return _Outage(requests.longest_s, ready_s - killed_s, requests.failed)


@asynccontextmanager
async def _caller(kubectl: Kubectl) -> AsyncIterator[Any]:
    """A caller that writes and reads; threads start and end it, because they wait for other programs."""
    caller = cluster_caller(kubectl, TIER, deadline_s=TIMEOUT_S, pause_s=CALLER_PAUSE_S)
    requests = await asyncio.to_thread(caller.__enter__)
    try:
        yield requests
    finally:
        await asyncio.to_thread(caller.__exit__, None, None, None)


async def _delete(api: ApiAccess, world: _World) -> None:
    async with api.connected() as connection:
        await connection.exchange(Request("DELETE", CACHE_TIER.path(DEMO_NAMESPACE, TIER)))
    await world.until("its pods go", lambda: not world.pods())


def _primary(kubectl: Kubectl, world: _World, shard: int) -> str:
    """Return the pod of a shard whose server reports that it leads. Raises LookupError if none does."""
    ask = (
        f"REDISCLI_AUTH=$(cat {paths.REDIS_AUTH}/admin-password) redis-cli -h 127.0.0.1 --tls "
        f"--cacert {paths.REDIS_TLS}/ca.crt --user admin role"
    )
    for name in sorted(world.pods()):
        of_shard = name.startswith(f"kvs-{TIER}-redis-{shard}-")
        if of_shard and kubectl.exec(name, DEMO_NAMESPACE, "redis", "sh", "-c", ask).startswith("master"):
            return name
    raise LookupError(f"shard {shard} has no primary")


async def _local_cluster() -> ApiAccess | str:
    """Return access to the local cluster with the product, or why there is none."""
    kubeconfig = Paths().kubeconfig
    if not pods_run_here() or not kubeconfig.exists():
        return "there is no local cluster: `make demo` brings one up with the product"
    api = ApiAccess(kubeconfig)
    try:
        async with asyncio.timeout(10), api.connected() as connection:
            found = await connection.send(Request("GET", CACHE_TIER.path(DEMO_NAMESPACE)))
    except (OSError, RefusedError) as error:
        return f"the local cluster does not have the product: {error}"
    if any(tier["metadata"]["name"] == TIER for tier in found["items"]):
        return f"the local cluster has a CacheTier {TIER} already: delete it"
    return api
