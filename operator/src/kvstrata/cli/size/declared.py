"""A CachedModel of a cluster: its configuration out of a pod, its tiers, and the sizes that its pods measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvstrata.cli.kubectl import Cluster, KubectlError
from kvstrata.cli.pages import Page
from kvstrata.cli.size.architecture import ConfigError
from kvstrata.cli.size.estimate import Tier
from kvstrata.objects import paths
from kvstrata.quantity import quantity_bytes

CHUNK_TOKENS = 256
_CONFIG_SCRIPT = (
    "import glob, os, sys; found = glob.glob(sys.argv[1]); "
    "sys.stdout.write(open(max(found, key=os.path.getmtime)).read() if found else '')"
)
MAX_CONFIG_BYTES = 1 << 22
_WATERMARK_PERCENT, _REDIS_WATERMARK_PERCENT, _CLUSTER_WATERMARK_PERCENT = 90, 80, 65


def config_of(cluster: Cluster, model: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> str:
    """Return `config.json` of the weights that a pod of the model has. Raises ConfigError, KubectlError."""
    name = model["metadata"]["name"]
    pod = next((pod["metadata"]["name"] for pod in pods), None)
    if pod is None:
        raise ConfigError(f"CachedModel {name} has no running pod to read config.json from: give it by --config FILE")
    command = ("python3", "-S", "-c", _CONFIG_SCRIPT, _config_path(model["spec"]["model"]["source"]))
    try:
        text = cluster.run("exec", pod, "--container=engine", "--", *command).decode(errors="replace")
    except KubectlError as error:
        raise KubectlError(f"config.json cannot be read in pod {pod}, give it by --config FILE: {error}") from None
    if not text:
        raise ConfigError(f"pod {pod} has no config.json beside its weights: give it by --config FILE")
    return text


def _config_path(source: Mapping[str, Any]) -> str:
    if hub := source.get("hub"):
        folder = "models--" + str(hub["repository"]).replace("/", "--")
        return f"{paths.HUB_CACHE}/hub/{folder}/snapshots/*/config.json"
    return f"{source.get('path') or paths.WEIGHTS}/config.json"


def tier_of(tier: Mapping[str, Any], replicas: int) -> Tier:
    """Return a CacheTier's bytes for blocks: its capacity below the high watermark."""
    spec, name = tier["spec"], tier["metadata"]["name"]
    medium = spec["medium"]
    percent = (spec.get("eviction") or {}).get("highWatermarkPercent") or _default_percent(spec)
    capacity = quantity_bytes(str(spec["capacity" if medium == "Redis" else "capacityPerPod"]))
    return Tier(name, medium, capacity * percent // 100, 0 if medium == "Redis" else replicas)


def _default_percent(spec: Mapping[str, Any]) -> int:
    if spec["medium"] != "Redis":
        return _WATERMARK_PERCENT
    managed, external = ((spec.get("redis") or {}).get(kind) for kind in ("managed", "external"))
    several = (managed or {}).get("shards", 1) > 1 if managed is not None else bool((external or {}).get("cluster"))
    return _CLUSTER_WATERMARK_PERCENT if several else _REDIS_WATERMARK_PERCENT


def measured_token_bytes(pages: Iterable[Page], blocks_of_chunk: int, chunk_tokens: int) -> float | None:
    """Return the mean bytes of a token of the blocks that pods stored in tiers; None if they stored none."""
    sums = dict.fromkeys(("kvstrata_cache_bytes_total", "kvstrata_cache_blocks_total"), 0.0)
    for page in pages:
        for name in sums:
            samples = page.samples.get(name, ())
            sums[name] += sum(one.value for one in samples if one.labels.get("operation") == "stored")
    stored_bytes, blocks = sums.values()
    return stored_bytes / blocks * blocks_of_chunk / chunk_tokens if blocks else None
