"""Faults of a managed cluster. A fault is over when its coroutine returns its description."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from e2e.chaos.operator import Operator
from e2e.chaos.pods import Pods
from kvstrata.model.redis.cluster import Cluster, ServerPod

MEBIBYTE = 1 << 20


@dataclass
class Stage:
    """Where faults happen. `operator` returns the one in office, `succeed` ends it and has another begin."""

    pods: Pods
    operator: Callable[[], Operator]
    succeed: Callable[[], Awaitable[None]]
    random: random.Random

    @property
    def timeout_s(self) -> float:
        """The servers' node time-out."""
        return self.pods.goal.node_timeout_ms / 1000

    def some(self, primaries: bool | None = None, count: int = 1) -> list[ServerPod]:
        """Some of the pods, or some whose servers were primaries, or replicas, when last looked at."""
        seen = self.operator().seen
        servers = seen.cluster.servers if seen is not None else {}
        found = [
            pod
            for uid, pod in self.pods.pods.items()
            if primaries is None or (uid in servers and bool(servers[uid].itself.slots) == primaries)
        ]
        found.sort(key=lambda pod: (pod.shard, pod.ordinal))
        return self.random.sample(found, min(count, len(found)))

    async def last(self, least: float, most: float) -> None:
        """Let it last for so many node time-outs."""
        await asyncio.sleep(self.timeout_s * self.random.uniform(least, most))


Fault = Callable[[Stage], Awaitable[str]]


async def killed(stage: Stage) -> str:
    """A server is killed; its next start waits as its pod's start script does."""
    pods = stage.some(stage.random.choice([True, True, False]))
    for pod in pods:
        stage.pods.kill(pod.uid, back_after_s=2 * stage.timeout_s)
    return f"killed {_names(pods)}"


async def killed_and_back_at_once(stage: Stage) -> str:
    """A server is killed and another answers in its place before the others notice."""
    pods = stage.some(True)
    for pod in pods:
        stage.pods.kill(pod.uid)
    return f"killed, and back at once: {_names(pods)}"


async def pod_deleted(stage: Stage) -> str:
    """A pod is deleted; the next has another address."""
    pods = stage.some(stage.random.choice([True, False]))
    for pod in pods:
        stage.pods.delete(pod.uid)
    return f"deleted {_names(pods)}"


async def shard_lost(stage: Stage) -> str:
    """All pods of a shard are deleted at once: their blocks are lost."""
    (chosen,) = stage.some()
    pods = [pod for pod in stage.pods.pods.values() if pod.shard == chosen.shard]
    for pod in pods:
        stage.pods.delete(pod.uid)
    return f"deleted {_names(pods)}"


async def primaries_killed(stage: Stage) -> str:
    """Most primaries are killed at once."""
    pods = stage.some(True, 2)
    for pod in pods:
        stage.pods.kill(pod.uid, back_after_s=2 * stage.timeout_s)
    return f"killed {_names(pods)}"


async def frozen(stage: Stage) -> str:
    """Servers stop and continue later, some after the time that it takes to replace them."""
    pods = stage.some(stage.random.choice([True, True, None]), stage.random.choice([1, 1, 2]))
    for pod in pods:
        stage.pods.freeze(pod.uid)
    await stage.last(0.3, 3.0)
    stage.pods.thaw()
    return f"froze {_names(pods)}"


async def unplugged(stage: Stage) -> str:
    """One pod is cut off from all others, in both directions."""
    pods = stage.some(stage.random.choice([True, True, False]))
    for pod in pods:
        stage.pods.network.unplug(stage.pods.sandbox(pod.uid))
    await stage.last(0.5, 3.0)
    stage.pods.network.heal()
    return f"unplugged {_names(pods)}"


async def minority_apart(stage: Stage) -> str:
    """A primary and some replicas, and all others: two sides without a connection."""
    return await _two_sides(stage, with_operator=True)


async def minority_kept(stage: Stage) -> str:
    """The same, but the operator and the clients are with the fewer."""
    return await _two_sides(stage, with_operator=False)


async def asymmetric(stage: Stage) -> str:
    """One pod receives packets of all others, and some of them receive none of its."""
    (muted,) = stage.some(True) or stage.some()
    others = [pod for pod in stage.pods.pods.values() if pod is not muted]
    deaf = stage.random.sample(others, stage.random.randint(1, len(others)))
    for pod in deaf:
        stage.pods.network.cut(stage.pods.sandbox(muted.uid), str(pod.ip))
    await stage.last(0.5, 3.0)
    stage.pods.network.heal()
    return f"{muted.name} did not reach {_names(deaf)}"


async def clients_apart(stage: Stage) -> str:
    """The operator and the clients do not reach some pods, which reach each other."""
    pods = stage.some(None, 2)
    for pod in pods:
        stage.pods.network.cut(None, str(pod.ip))
    await stage.last(0.5, 2.0)
    stage.pods.network.heal()
    return f"operator and clients were cut off from {_names(pods)}"


async def operator_killed(stage: Stage) -> str:
    """The operator dies while it repairs, and another begins."""
    pods = stage.some(True)
    for pod in pods:
        stage.pods.delete(pod.uid)
    await asyncio.sleep(stage.random.uniform(0.05, 1.0))
    await stage.succeed()
    return f"deleted {_names(pods)}, and killed the operator"


async def rolled(stage: Stage) -> str:
    """The pods' template changes."""
    revision = f"{stage.random.random():.6f}"
    stage.pods.want(revisions=dict.fromkeys(stage.pods.goal.revisions, revision))
    return "rolled"


async def scaled(stage: Stage) -> str:
    """There are to be four shards, or three again."""
    shards = 4 if stage.pods.goal.shards == 3 else 3
    revision = next(iter(stage.pods.goal.revisions.values()))
    stage.pods.want(shards=shards, revisions=dict.fromkeys(range(shards), revision))
    return f"scaled to {shards} shards"


async def replicas_changed(stage: Stage) -> str:
    """Each shard is to have no replica, or one again."""
    replicas = 1 - stage.pods.goal.replicas
    stage.pods.want(replicas=replicas)
    return f"{replicas} replicas each"


async def resized(stage: Stage) -> str:
    """The capacity changes."""
    stage.pods.want(max_bytes_each=stage.random.randint(40, 64) * MEBIBYTE)
    return f"{stage.pods.goal.max_bytes_each // MEBIBYTE} MiB each"


FAULTS: Mapping[str, Fault] = {
    one.__name__: one
    for one in (
        killed,
        killed_and_back_at_once,
        pod_deleted,
        shard_lost,
        primaries_killed,
        frozen,
        unplugged,
        minority_apart,
        minority_kept,
        asymmetric,
        clients_apart,
        operator_killed,
        rolled,
        scaled,
        replicas_changed,
        resized,
    )
}


async def _two_sides(stage: Stage, *, with_operator: bool) -> str:
    pods, network = stage.pods, stage.pods.network
    fewer = [*stage.some(True), *stage.some(False, stage.random.randint(0, 1))]
    apart = {pod.uid for pod in fewer}
    others = [pod for pod in pods.pods.values() if pod.uid not in apart]
    for one in fewer:
        for other in others:
            network.cut(pods.sandbox(one.uid), str(other.ip))
            network.cut(pods.sandbox(other.uid), str(one.ip))
    for pod in fewer if with_operator else others:
        network.cut(None, str(pod.ip))
    await stage.last(0.5, 3.0)
    network.heal()
    return f"{_names(fewer)} apart from the rest, the operator with {'the rest' if with_operator else 'them'}"


def _names(pods: list[ServerPod]) -> str:
    return " and ".join(pod.name for pod in pods) or "nothing"


def described(cluster: Cluster) -> str:
    """A look, for people."""
    lines = [f"{pod.name} {pod.uid} {pod.ip} ready={pod.ready}" for pod in cluster.pods.values()]
    lines += [f"silent: {cluster.pods[uid].name}: {why}" for uid, why in cluster.silent.items()]
    for uid, server in cluster.servers.items():
        lines.append(f"{cluster.pods[uid].name} reports (ok={server.cluster_ok}, epoch {server.current_epoch}):")
        lines += [f"    {peer}" for peer in server.peers]
    return "\n".join(lines)
