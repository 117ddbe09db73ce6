"""A model of one pod whose cache has all three kinds of tiers: memory, files of the pod, and a Redis of its own.

The engine's own memory holds one prompt, and is emptied before each request by a prompt of a tenant without a policy,
so that all blocks that a request finds come from the tiers. The tiers' counters show which of them it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstrata.contract.messages.adapter import AdapterState, StateRequest, decode_answer, encode_request
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.store.block_file import ROOT

from .chapters import MODEL as DEMO_MODEL
from .chapters import _is_ready, _object, _wait_enforced, keyspace_of
from .direct import HEALTH_PORT, DirectReplica, container_pid, direct_replica, scrape
from .faults import Victim
from .install import DEMO_NAMESPACE
from .kubectl import CommandError, Kubectl, wait_until
from .prompts import CHUNK_TOKENS, fresh_prompt

MODEL = "layered"
MEMORY, DISK, REDIS = "layered-cpu", "layered-nvme", "layered-redis"
TIERS = (MEMORY, DISK, REDIS)
PODS = f"kvstrata.io/model={MODEL}"
KEYS = "layered-api-keys"
STRANGER = "stranger"
"""A tenant with a key and without a policy: nothing that it asks for is kept in a tier."""

CONTEXT_TOKENS = 288
ENGINE_BLOCKS = CONTEXT_TOKENS // 32 + 1
"""One request of full length, and the block that vLLM keeps for itself."""

FILLER_TOKENS = 280
"""So many that they take every block of the engine, and leave room for an answer."""

UP_WITHIN_S = 600.0
DISK_DIRECTORY = f"run/kvstrata/nvme/{DISK}"
LINK = "run/kvstrata/link/adapter.sock"


@dataclass(frozen=True, slots=True)
class Found:
    """How many chunks of a prompt came from which tier, and the engine's answer."""

    memory: int
    disk: int
    redis: int
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the model: its API key and the keyspace of its blocks."""

    name: str
    key: str
    keyspace: str


class Layered:
    """The model while it is there. `meet` has to be called when its pod was replaced."""

    def __init__(self, kubectl: Kubectl, report: Callable[[str], None]) -> None:
        self.kubectl, self.report = kubectl, report
        self.pod, self._gate = "", 0
        self._replica: DirectReplica | None = None

    def meet(self) -> None:
        """Wait until the pod is ready, and find its processes."""
        self.pod = wait_until("the layered model's pod is ready", self._ready_pod, UP_WITHIN_S)
        self._found()

    def ask(self, tenant: Tenant, prompt: str) -> Found:
        """Ask for a completion; return the chunks of the prompt that were found, by tier."""
        replica = self._replica
        assert replica is not None, "its pod was never met"
        assert replica.complete(f"{STRANGER}-key", _filler()).status == 200
        before, hits = self.counters(), replica.hits()
        answer = replica.complete(tenant.key, prompt)
        assert answer.status == 200, f"{self.pod} answered {answer.status}: {answer.body}"
        after, found = self.counters(), replica.placed(answer.cached_tokens, hits)
        assert found.local == 0, f"the engine's own memory was not empty: {found}"
        disk, redis = (after.get(f"{tier}.loaded", 0) - before.get(f"{tier}.loaded", 0) for tier in (DISK, REDIS))
        return Found(found.external // CHUNK_TOKENS - disk - redis, disk, redis, answer.text)

    def finds(self, tenant: Tenant, prompts: Sequence[str], where: Found) -> tuple[str, Found]:
        """Return the first of the prompts whose blocks are all found there: a lookup that is late is a miss."""
        found = []
        for prompt in prompts:
            found.append(self.ask(tenant, prompt))
            if found[-1] == where:
                return prompt, found[-1]
        raise AssertionError(f"none of {tenant.name}'s prompts was {where}: {found}")

    def state(self) -> AdapterState:
        """Return the cache server's state, asked as the gate asks for it. Raises OSError while it is away."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(60)
            line.connect(f"/proc/{self._gate}/root/{LINK}")
            line.sendall(encode_request(StateRequest()))
            with line.makefile("rb") as lines:
                return decode_answer(AdapterState, lines.readline())

    def counters(self) -> Mapping[str, int]:
        """Return the counters of tiers and memory since the cache server started."""
        return self.state().counters

    def held(self, tenant: Tenant, tier: str) -> int:
        """Return how many blocks a tenant has in memory or files, by the cache server's report."""
        rows = self.state().usage
        return sum(row.blocks for row in rows if (row.scope, row.tier) == (tenant.keyspace[:SCOPE_DIGITS], tier))

    def files(self, keyspace: str = "") -> list[Path]:
        """Return the files on the disk, or those of a keyspace that are whole: seen from outside of the container.
        Directories may go meanwhile."""
        cache = container_pid(self.kubectl, DEMO_NAMESPACE, self.pod, "cache")
        below = Path(f"/proc/{cache}/root/{DISK_DIRECTORY}/{ROOT}/{keyspace}")
        found = (Path(folder, name) for folder, _, names in os.walk(below) for name in names)
        return sorted(path for path in found if not (keyspace and path.name[0] == "."))

    def metrics(self) -> str:
        """Return the gate's page of metrics, which repeats the cache server's state of at most 15 s ago."""
        return scrape(self._gate, HEALTH_PORT)

    def condition(self, kind: str, name: str, condition: str) -> tuple[str, str]:
        """Return status and reason of a condition."""
        found = self.kubectl.condition(kind, name, DEMO_NAMESPACE, condition)
        return str(found.get("status", "")), str(found.get("reason", ""))

    def kill_cache_server(self) -> None:
        """Kill it with SIGKILL, and return when the next one runs and has read its index of the disk."""
        cache = Victim(self.kubectl, DEMO_NAMESPACE, self.pod, "cache")
        boot = self.state().boot
        os.kill(cache.first_pid(), signal.SIGKILL)
        wait_until("another cache server is at work", lambda: self._recovered(boot), UP_WITHIN_S)
        wait_until("kubelet reports that it runs", cache.running, UP_WITHIN_S)

    def _found(self) -> bool:
        try:
            self._gate = container_pid(self.kubectl, DEMO_NAMESPACE, self.pod, "gate")
            self._replica = direct_replica(self.kubectl, DEMO_NAMESPACE, MODEL, self.pod)
        except CommandError:
            return False
        return True

    def _ready_pod(self) -> str:
        pods = self.kubectl.list("pod", DEMO_NAMESPACE, PODS)
        ready = [
            pod["metadata"]["name"] for pod in pods if _is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
        ]
        return str(ready[0]) if len(ready) == len(pods) == 1 else ""

    def _recovered(self, boot: str) -> bool:
        try:
            state = self.state()
        except OSError:
            return False
        well = all(tier.breaker == "closed" and not tier.recovering for tier in state.tiers)
        return state.boot != boot and state.revision > 0 and well


@contextmanager
def open_layered(
    kubectl: Kubectl, report: Callable[[str], None], *tenants: str, redis: Mapping[str, Any] | None = None
) -> Iterator[Layered]:
    """Let the model be there while the block runs. `tenants` have keys; the caller creates their policies.

    `redis` is `managed` of its Redis tier, one shard by default.
    """
    try:
        kubectl.apply(_keys(*tenants, STRANGER), *_tiers(redis or {}), _model(kubectl))
        layered = Layered(kubectl, report)
        layered.meet()
        wait_until("the model is ready", lambda: _well(layered), UP_WITHIN_S)
        room = layered.condition("cachetier", DISK, "HasRoom")
        assert room[0] == "True", f"files cannot be kept on this machine's disk: {room[1]}"
        yield layered
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "cachedmodel", MODEL, "--ignore-not-found")
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "cachetier", *TIERS, "--ignore-not-found")
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "secret", KEYS, "--ignore-not-found")
        wait_until("nothing of it is left", lambda: not _left(kubectl), UP_WITHIN_S)


@contextmanager
def tenant(layered: Layered, name: str, *budgets: Mapping[str, str], **spec: Any) -> Iterator[Tenant]:
    """Let a tenant of the model have a policy while the block runs; `spec` has all but its budgets."""
    try:
        set_policy(layered, name, *budgets, **spec)
        yield Tenant(name, f"{name}-key", keyspace_of(layered.kubectl, name, MODEL))
    finally:
        layered.kubectl.run("-n", DEMO_NAMESPACE, "delete", "tenantcachepolicy", name, "--ignore-not-found")


def set_policy(layered: Layered, name: str, *budgets: Mapping[str, str], **spec: Any) -> None:
    """Give a tenant its policy, or another one, and wait until it is enforced."""
    fields = {
        "tenant": name,
        "isolation": "Isolated",
        "models": {"names": [MODEL]},
        "deletionPolicy": "Abandon",
        **spec,
    }
    layered.kubectl.apply(_object("TenantCachePolicy", name, fields | ({"budgets": list(budgets)} if budgets else {})))
    _wait_enforced(layered.kubectl, name)


def nothing_on(*tiers: str) -> list[dict[str, str]]:
    """Return budgets that keep a tenant off tiers."""
    return [{"tier": name, "limit": "0"} for name in tiers]


@contextmanager
def only_for(layered: Layered, *classifications: str) -> Iterator[None]:
    """Let files and Redis take data of these classifications alone while the block runs."""
    try:
        _admit(layered.kubectl, list(classifications))
        yield
    finally:
        _admit(layered.kubectl, None)


def _admit(kubectl: Kubectl, classifications: list[str] | None) -> None:
    patch = json.dumps({"spec": {"allowedClassifications": classifications}})
    for name in (DISK, REDIS):
        kubectl.run("-n", DEMO_NAMESPACE, "patch", "cachetier", name, "--type", "merge", "-p", patch)


def _filler() -> str:
    return fresh_prompt(FILLER_TOKENS)


def _well(layered: Layered) -> bool:
    model = layered.condition("cachedmodel", MODEL, "Ready")[0] == "True"
    return model and all(layered.condition("cachetier", name, "Ready")[0] == "True" for name in TIERS)


def _left(kubectl: Kubectl) -> list[str]:
    pods = kubectl.list("pod", DEMO_NAMESPACE, "app.kubernetes.io/managed-by=kvstrata")
    names = [str(pod["metadata"]["name"]) for pod in pods]
    return [name for name in names if name.startswith(f"kvs-{MODEL}")]


def _keys(*tenants: str) -> dict[str, Any]:
    keys = [{"tenant": name, "sha256": hashlib.sha256(f"{name}-key".encode()).hexdigest()} for name in tenants]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": KEYS, "namespace": DEMO_NAMESPACE},
        "stringData": {"keys.json": json.dumps({"keys": keys})},
    }


def _tiers(redis: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        _object("CacheTier", MEMORY, {"medium": "CPU", "capacityPerPod": "80Mi"}),
        _object("CacheTier", DISK, {"medium": "NVMe", "capacityPerPod": "160Mi", "nvme": {"emptyDir": {}}}),
        _object("CacheTier", REDIS, {"medium": "Redis", "capacity": "192Mi", "redis": {"managed": redis}}),
    ]


def _model(kubectl: Kubectl) -> dict[str, Any]:
    """Return the demo's model with one pod, these tiers, and an engine that remembers one prompt."""
    spec = kubectl.get("cachedmodel", DEMO_MODEL, DEMO_NAMESPACE)["spec"]
    arguments = [*spec["engine"]["args"], "--num-gpu-blocks-override", str(ENGINE_BLOCKS)]
    return _object(
        "CachedModel",
        MODEL,
        spec
        | {
            "model": spec["model"] | {"name": MODEL, "maxModelLen": CONTEXT_TOKENS},
            "engine": spec["engine"] | {"replicas": 1, "args": arguments},
            "tiers": [{"name": name} for name in TIERS],
            "gate": {"authentication": {"apiKeys": {"secretRef": {"name": KEYS}}}},
        },
    )
