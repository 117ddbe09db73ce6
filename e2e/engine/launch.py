"""Settings that every engine here is started with: on one processor, offline, with a cache server or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.cluster.settings import REPOSITORY
from e2e.engine.models import MADE


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of an engine whose home is `directory`."""
    return {
        "PYTHONPATH": f"{REPOSITORY}/operator/src:{REPOSITORY}/sidecar/src",
        "PYTHONHASHSEED": "0",
        "HOME": str(directory),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # A rank in a process of its own, vLLM's default on CPUs, spins for a second after each step.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        # vLLM examines the model's class at its first start only, which takes a third of a start.
        "VLLM_CACHE_ROOT": str(MADE / "vllm-cache"),
    }


def guarded(cache_port: int, chunk_tokens: int, extra: dict[str, object] | None = None) -> dict[str, Any]:
    """Return the connection to a cache server as `objects/pod/engine.py` has it, its timing included."""
    return {
        "kv_connector": "GuardedConnector",
        "kv_connector_module_path": "kvstrata_sidecar.connector.guard",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": cache_port,
            "lmcache.mp.mq_timeout": 3.0,
            "lmcache.mp.heartbeat_interval": 1.0,
            "kvstrata.chunk_tokens": chunk_tokens,
            **(extra or {}),
        },
    }
