"""The cache container: LMCache's multi-process server with its memory and files, under the operator's policy.

Redis tiers are part of that policy (`contract/policy/tiers.py`): they come and go without another template. Everything
listens on loopback, telemetry is off, and no secret is in arguments or environment, because LMCache prints its
configuration on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.pod_template import PodTemplate
from kvstrata.contract.wire import canonical_json
from kvstrata.objects import paths, sizing
from kvstrata.objects.container import amounts, chosen_amounts, container, environment, exec_probe, mount
from kvstrata.objects.pod import nvme
from kvstrata.objects.quantities import GIB, binary

SHARED_MEMORY_NAME = "kvstrata"
ADAPTER_MODULE = "kvstrata_sidecar.adapter.plugin"
ADAPTER_CLASS = "PolicyAdapter"

EPHEMERAL_STORAGE = "ephemeral-storage"
MEMORY_MODULE = "kvstrata_sidecar.adapter.memory.module"

HEALTH_SCRIPT = (
    "import socket,sys; c=socket.create_connection(('127.0.0.1',int(sys.argv[1])),4); "
    "c.sendall(b'GET /healthcheck HTTP/1.0\\r\\n\\r\\n'); sys.exit(b' 200 ' not in c.recv(64))"
)


def build_container(
    domain_id: str, model: CachedModel, tiers: Sequence[CacheTier], identity: str, nodefs_reserve_percent: int
) -> dict[str, Any]:
    """Return the native sidecar `cache`. `tiers` are the model's, from fast to slow. `nodefs_reserve_percent` of the
    node's file system stay free."""
    chosen = model.spec.engine.pod_template or PodTemplate()
    probe = ("python3", "-S", "-c", HEALTH_SCRIPT, str(paths.CACHE_HTTP_PORT))
    variables = {
        "DO_NOT_TRACK": "1",
        "HOME": paths.TEMPORARY,
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": paths.PLUGIN,
    }
    return container(
        "cache",
        model.spec.cache_image,
        chosen.image_pull_policy,
        restartPolicy="Always",
        command=["python3", "-m", "kvstrata_sidecar.adapter.start"],
        args=arguments(domain_id, model, tiers, identity, nodefs_reserve_percent),
        env=environment(variables),
        startupProbe=exec_probe(probe, period_s=2, timeout_s=5, failures=150),
        livenessProbe=exec_probe(probe, period_s=20, timeout_s=5, failures=3),
        resources=_resources(model, tiers),
        volumeMounts=[
            mount("plugin", paths.PLUGIN, read_only=True),
            mount("policy", paths.POLICY, read_only=True),
            mount("link", paths.LINK),
            mount("shm", paths.SHARED_MEMORY),
            mount("cache-tmp", paths.TEMPORARY),
            *nvme.mounts(tiers),
        ],
    )


def arguments(
    domain_id: str, model: CachedModel, tiers: Sequence[CacheTier], identity: str, nodefs_reserve_percent: int
) -> list[str]:
    memory = memory_config(domain_id, tiers, identity)
    flags = [
        *("--host", "127.0.0.1", "--port", str(paths.CACHE_PORT)),
        *("--http-host", "127.0.0.1", "--http-port", str(paths.CACHE_HTTP_PORT)),
        *("--chunk-size", str(model.spec.cache_server.chunk_size)),
        # LMCache multiplies by 2^30, despite the flag's name.
        *("--l1-size-gb", f"{sizing.l1_bytes(tiers) / GIB:.9g}", "--no-l1-use-lazy"),
        # The server module governs the memory: LMCache's own eviction knows no guarantees.
        *("--eviction-policy", "noop", "--server-module", _json({"module_path": MEMORY_MODULE, "config": memory})),
    ]
    if any(tier.spec.medium is Medium.CPU for tier in tiers):
        # Keep blocks that came from a slower tier. LMCache's default drops it after reading, so a prompt in Redis would
        # cross the network at each use.
        flags += ["--l2-prefetch-policy", "retain"]
    flags += ["--supported-transfer-mode", "engine_driven", "--shm-name", SHARED_MEMORY_NAME]
    for params in adapter_params(domain_id, model.name, tiers, identity, nodefs_reserve_percent):
        plugin = {"module_path": ADAPTER_MODULE, "class_name": ADAPTER_CLASS, "adapter_params": params}
        flags += ["--l2-adapter", _json({"type": "plugin", **plugin})]
    return flags


def adapter_params(
    domain_id: str, model: str, tiers: Sequence[CacheTier], identity: str, nodefs_reserve_percent: int
) -> tuple[dict[str, Any], ...]:
    """Return the parameters of each policy adapter at the server's start, one per NVMe tier, in the model's order.
    Without such a tier there is one without storage, because the adapter acknowledges policies to the gate."""
    behind: list[dict[str, Any] | None] = [
        nvme.params(tier, model, nodefs_reserve_percent) for tier in tiers if tier.spec.medium is Medium.NVME
    ]
    return tuple({"domain": domain_id, "identity": identity, "tier": params} for params in behind or [None])


def memory_config(domain_id: str, tiers: Sequence[CacheTier], identity: str) -> dict[str, Any]:
    """Return the configuration of the module that governs the server's memory, also without a CPU tier."""
    memory = next((tier for tier in tiers if tier.spec.medium is Medium.CPU), None)
    config: dict[str, Any] = {"domain": domain_id, "identity": identity, "tier": memory.name if memory else None}
    if memory is not None:
        config["high_watermark_percent"] = memory.spec.high_watermark_percent
    return config


def _json(value: dict[str, Any]) -> str:
    return canonical_json(value).decode()


def _resources(model: CachedModel, tiers: Sequence[CacheTier]) -> dict[str, Any]:
    """Return the user's resources or the default; ephemeral storage for files is requested in either case."""
    chosen = chosen_amounts(model.spec.cache_server.resources, _default_resources(tiers))
    named = EPHEMERAL_STORAGE in {**chosen.get("requests", {}), **chosen.get("limits", {})}
    if named or not (space := _node_space(tiers)):
        return chosen
    return chosen | {"requests": chosen.get("requests", {}) | space}


def _default_resources(tiers: Sequence[CacheTier]) -> dict[str, Any]:
    size = sizing.l1_bytes(tiers) + nvme.index_bytes(tiers)
    return amounts(
        requests={"cpu": "100m", "memory": binary(size + sizing.CACHE_BASE_REQUEST_BYTES), **_node_space(tiers)},
        limits={"memory": binary(size + sizing.CACHE_BASE_LIMIT_BYTES)},
    )


def _node_space(tiers: Sequence[CacheTier]) -> dict[str, str]:
    size_bytes = nvme.node_bytes(tiers)
    return {EPHEMERAL_STORAGE: binary(size_bytes)} if size_bytes else {}
