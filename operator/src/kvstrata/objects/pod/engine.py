"""The engine container: vLLM on a unix socket that only the gate mounts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedmodel_source import DType, WeightsSource
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.pod_template import PodTemplate
from kvstrata.api.pod_volumes import EngineMount
from kvstrata.contract.wire import canonical_json
from kvstrata.objects import paths, sizing
from kvstrata.objects.applied import without_empty
from kvstrata.objects.container import amounts, container, empty_dir, environment, exec_probe, mount
from kvstrata.objects.names import AUTHORITY_KEY
from kvstrata.objects.quantities import binary

START_SCRIPT = """rm -f "$0"
trap 'kill "$engine"' TERM
"$@" & engine=$!
while wait "$engine"; code=$?; kill -0 "$engine" 2>/dev/null; do :; done
exit "$code"
"""
"""Removes the socket of an earlier start: vLLM never unlinks it and does not start while it exists. As PID 1 vLLM would
ignore SIGTERM until its weights are loaded, so the shell stays PID 1, forwards the signal and returns the exit code."""

COMMAND = ("sh", "-c", START_SCRIPT, paths.ENGINE_SOCKET, "python3", "-m", "vllm.entrypoints.openai.api_server")
CONNECTOR = "GuardedConnector"
CONNECTOR_MODULE = "kvstrata_sidecar.connector.guard"
MIDDLEWARE = "kvstrata_sidecar.connector.reset.EngineReset"

DRAIN_TIMEOUT_S = 120

DRAIN_SCRIPT = (
    "import os,sys,time; d=sys.argv[1]; end=time.monotonic()+float(sys.argv[2]); open(d+'/draining','w').close()\n"
    "while not os.path.exists(d+'/drained') and time.monotonic()<end: time.sleep(0.1)"
)
"""Reports the coming stop to the gate and waits until the gate has no request left."""

STARTUP_PERIOD_S = 2
GPU = "nvidia.com/gpu"

HEALTH_SCRIPT = (
    "import socket,sys; c=socket.socket(socket.AF_UNIX); c.settimeout(4); c.connect(sys.argv[1]); "
    "c.sendall(b'GET /health HTTP/1.0\\r\\nHost: engine\\r\\n\\r\\n'); sys.exit(b' 200 ' not in c.recv(64))"
)
"""A probe without curl, which engine images lack; `-S` keeps it at 20 ms."""


def build_container(model: CachedModel, tiers: Sequence[CacheTier]) -> dict[str, Any]:
    """`tiers` are the model's, from fast to slow."""
    spec = model.spec.engine
    chosen = spec.pod_template or PodTemplate()
    probe = ("python3", "-S", "-c", HEALTH_SCRIPT, paths.ENGINE_SOCKET)
    drain = ["python3", "-S", "-c", DRAIN_SCRIPT, paths.ENGINE, str(DRAIN_TIMEOUT_S)]
    failures = max(1, -(-spec.startup_timeout.in_seconds // STARTUP_PERIOD_S))
    return container(
        "engine",
        spec.image,
        chosen.image_pull_policy,
        command=list(COMMAND),
        args=arguments(model),
        env=environment(_variables(model), spec.env),
        startupProbe=exec_probe(probe, period_s=STARTUP_PERIOD_S, timeout_s=5, failures=failures),
        livenessProbe=exec_probe(probe, period_s=20, timeout_s=5, failures=3),
        lifecycle={"preStop": {"exec": {"command": drain}}},
        resources=_resources(model, tiers),
        volumeMounts=[
            mount("plugin", paths.PLUGIN, read_only=True),
            mount("engine-socket", paths.ENGINE),
            mount("shm", paths.SHARED_MEMORY),
            mount("engine-tmp", paths.TEMPORARY),
            *(mounted for _, mounted in _weights(model)),
            *(_user_mount(mounted) for mounted in spec.volume_mounts),
        ],
    )


def arguments(model: CachedModel) -> list[str]:
    """Return the operator's arguments, then the user's, which cannot override them."""
    spec, engine = model.spec.model, model.spec.engine
    flags = [
        *("--model", weights(spec.source)),
        *("--served-model-name", spec.name),
        *("--uds", paths.ENGINE_SOCKET),
        *("--prefix-caching-hash-algo", "sha256"),
        "--enable-prompt-tokens-details",
        *("--middleware", MIDDLEWARE),
    ]
    if spec.dtype is not DType.AUTO:
        flags += ["--dtype", str(spec.dtype)]
    if spec.revision is not None and spec.source.hub is not None:
        flags += ["--revision", spec.revision]
    if spec.tokenizer is not None:
        flags += ["--tokenizer", spec.tokenizer]
    if spec.max_model_len is not None:
        flags += ["--max-model-len", str(spec.max_model_len)]
    if engine.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
    if engine.gpu_memory_utilization_percent is not None:
        flags += ["--gpu-memory-utilization", f"{engine.gpu_memory_utilization_percent / 100:g}"]
    if engine.kv_cache_dtype is not None:
        flags += ["--kv-cache-dtype", engine.kv_cache_dtype]
    # Engine-driven transfer refuses several groups of KV, which layers with a sliding window would make. The last of
    # two contrary flags counts.
    return [*flags, "--kv-transfer-config", transfer_config(model), *engine.args, "--disable-hybrid-kv-cache-manager"]


def transfer_config(model: CachedModel) -> str:
    """Return the JSON that connects the engine to its cache server through the connector guard. Short timeouts and
    `recompute`: a slow or dead server must become a miss, never an error or a dead engine."""
    extra: dict[str, Any] = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": paths.CACHE_PORT,
        "lmcache.mp.mq_timeout": 3.0,
        "lmcache.mp.heartbeat_interval": 1.0,
        # With it the engine starts and serves while its cache server is down.
        "kvstrata.chunk_tokens": model.spec.cache_server.chunk_size,
        "kvstrata.identity_directory": paths.ENGINE,
    }
    return canonical_json(
        {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    ).decode()


def weights(source: WeightsSource) -> str:
    if source.hub is not None:
        return source.hub.repository
    return source.path if source.path is not None else paths.WEIGHTS


def requests_gpu(model: CachedModel) -> bool:
    chosen = model.spec.engine.resources
    return chosen is not None and (GPU in chosen.limits or GPU in chosen.requests)


def weight_volumes(model: CachedModel) -> list[dict[str, Any]]:
    return [volume for volume, _ in _weights(model)]


def user_volumes(model: CachedModel) -> list[dict[str, Any]]:
    """Return the user's volumes, under names that none of the operator's has."""
    return [volume.to_kubernetes() | {"name": f"user-{volume.name}"} for volume in model.spec.engine.volumes]


def _user_mount(mounted: EngineMount) -> dict[str, Any]:
    return without_empty(mounted.to_kubernetes() | {"name": f"user-{mounted.name}"})


def _weights(model: CachedModel) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the volumes of the weights' source, each with its mount."""
    source = model.spec.model.source
    if source.pvc is not None:
        claim = {"claimName": source.pvc.claim_name, "readOnly": True}
        # The apiserver rejects an absolute subPath; no subPath means the volume's root.
        mounted = mount("weights", paths.WEIGHTS, read_only=True, sub_path=(source.pvc.path or "").strip("/"))
        return [({"name": "weights", "persistentVolumeClaim": claim}, mounted)]
    if source.hub is None:
        return []
    found = [(empty_dir("weights-cache", source.hub.cache_size), mount("weights-cache", paths.HUB_CACHE))]
    if (token := source.hub.token_secret_ref) is not None:
        items = [{"key": token.key, "path": "token"}]
        secret = {"secretName": token.name, "defaultMode": 0o440, "items": items}
        found.append(({"name": "hub-token", "secret": secret}, mount("hub-token", paths.HUB_TOKEN, read_only=True)))
    if (authority := source.hub.authority_config_map_ref) is not None:
        config = {"name": authority.name, "items": [{"key": authority.key, "path": AUTHORITY_KEY}]}
        mounted = mount("hub-authority", paths.HUB_AUTHORITY, read_only=True)
        found.append(({"name": "hub-authority", "configMap": config}, mounted))
    return found


def _variables(model: CachedModel) -> dict[str, str]:
    variables = {
        "DO_NOT_TRACK": "1",
        "HOME": paths.TEMPORARY,
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": paths.PLUGIN,
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not requests_gpu(model):
        # A CPU engine pins its threads to the first cores, and all such pods of a node compete for these while others
        # idle: answers take tens of seconds. To dedicate cores, set it in `env`.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    source = model.spec.model.source
    if source.hub is None and (model.spec.model.tokenizer or "/").startswith("/"):
        variables["HF_HUB_OFFLINE"] = "1"
    if source.hub is not None:
        variables["HF_HOME"] = paths.HUB_CACHE
        if source.hub.token_secret_ref is not None:
            variables["HF_TOKEN_PATH"] = f"{paths.HUB_TOKEN}/token"
        if source.hub.authority_config_map_ref is not None:
            authority = f"{paths.HUB_AUTHORITY}/{AUTHORITY_KEY}"
            variables |= {"SSL_CERT_FILE": authority, "REQUESTS_CA_BUNDLE": authority}
    return variables


def _resources(model: CachedModel, tiers: Sequence[CacheTier]) -> dict[str, Any]:
    """Return the user's resources, plus the CPU tier's memory and one device per rank."""
    chosen = model.spec.engine.resources
    if chosen is None:
        return {}
    requests, limits = dict[str, str](chosen.requests), dict[str, str](chosen.limits)
    if "memory" in chosen.limits:
        limits["memory"] = binary(chosen.limits["memory"].in_bytes + sizing.l1_bytes(tiers))
    if requests_gpu(model):
        asked = [int(part[GPU].in_units) for part in (chosen.requests, chosen.limits) if GPU in part]
        devices = str(max(model.spec.engine.tensor_parallel_size, *asked))
        # Kubernetes requires equal request and limit for extended resources.
        requests[GPU] = limits[GPU] = devices
    return amounts(requests, limits)
