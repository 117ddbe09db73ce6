"""Programs of a pod: an engine, and a cache server as LMCache's documentation has it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.benefit.arms import Settings
from bench.gate.processes import Process
from e2e.cluster.ports import free_port
from e2e.engine import launch as engines

MODEL = "smollm2"
UPSTREAM = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of engines and cache servers: one thread each, nothing of this process's own."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | engines.environment(directory)


def start_engine(
    python: Path,
    model: Path,
    directory: Path,
    settings: Settings,
    *,
    prefix_caching: bool,
    connector: dict[str, Any] | None,
    socket: Path | None,
) -> tuple[Process, int]:
    """Start an engine on a port, which is returned, or on a socket; with the prefix cache and connector of its arm."""
    port = free_port()
    flags = {
        "--model": str(model),
        "--served-model-name": MODEL,
        "--dtype": "float32",
        "--max-model-len": str(settings.max_tokens),
        "--max-num-seqs": "8",
        "--block-size": "32",
        "--num-gpu-blocks-override": str(settings.engine_tokens // 32),
    }
    flags |= {"--uds": str(socket)} if socket else {"--host": "127.0.0.1", "--port": str(port)}
    words = [word for flag in flags.items() for word in flag]
    words += ["--enforce-eager", "--enable-prompt-tokens-details"]
    words += ["--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"]
    if connector is not None:
        words += ["--kv-transfer-config", json.dumps(connector)]
    if socket is not None:
        words += ["--middleware", "kvstrata_sidecar.connector.reset.EngineReset"]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *words]
    return Process(command, core=None, log=directory / "engine.log", environment=environment(directory)), port


def connector(cache_port: int, *, guarded: bool, chunk_tokens: int) -> dict[str, Any]:
    """Return the engine's connection to its cache server: LMCache's own, or with the product's guard."""
    if guarded:
        return engines.guarded(cache_port, chunk_tokens)
    return UPSTREAM | {
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": cache_port}
    }


def start_upstream_cache(
    python: Path, directory: Path, settings: Settings, redis_port: int
) -> tuple[Process, int, int]:
    """Start LMCache's server with its own Redis adapter; returns its ports for engines and for HTTP.

    Shared memory with the engine, which it has only when its memory is not allocated lazily, is as in the product.
    """
    port, http_port = free_port(), free_port()
    flags = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--http-host": "127.0.0.1",
        "--http-port": str(http_port),
        "--chunk-size": str(settings.chunk_tokens),
        "--l1-size-gb": str(settings.memory_gb),
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "engine_driven",
        "--shm-name": f"kvs-bench-{port}",
        "--l2-adapter": json.dumps({"type": "resp", "host": "127.0.0.1", "port": redis_port}),
    }
    words = ["--no-l1-use-lazy", *(word for flag in flags.items() for word in flag)]
    command = [str(python.parent / "lmcache"), "server", *words]
    log = directory / "lmcache.log"
    return Process(command, core=None, log=log, environment=environment(directory)), port, http_port
