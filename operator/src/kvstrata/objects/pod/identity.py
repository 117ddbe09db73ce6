"""The declared cache identity: a digest of everything in the spec that changes the bytes of a KV block.

Blocks are stored under it and the engine's fingerprint (`contract/messages/engine_identity.py`), so a model never reads
blocks of other weights, layouts or kernels, and a rollback finds its old blocks again. Engine arguments count unless
listed as neutral: an unknown flag costs a cold cache, never a wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedmodel_source import WeightsSource
from kvstrata.contract.wire import canonical_json, digest

IDENTITY_HEX_DIGITS = 16
CHUNK_HASH_ALGORITHM = "blake3"

KV_NEUTRAL_FLAGS = frozenset({
    # Logging and metrics.
    "--disable-fastapi-docs", "--disable-log-requests", "--disable-log-stats", "--disable-uvicorn-access-log",
    "--enable-log-requests", "--enable-log-outputs", "--enable-request-id-headers", "--enable-server-load-tracking",
    "--log-config-file", "--log-error-stack", "--max-log-len", "--otlp-traces-endpoint", "--collect-detailed-traces",
    "--show-hidden-metrics-for-version", "--uvicorn-log-level", "--disable-access-log-for-endpoints",
    # Parsing of requests and format of answers: other tokens have other hashes.
    "--allowed-headers", "--allowed-local-media-path", "--allowed-methods", "--allowed-origins", "--allow-credentials",
    "--chat-template", "--chat-template-content-format", "--default-chat-template-kwargs", "--enable-auto-tool-choice",
    "--enable-force-include-usage", "--enable-prompt-tokens-details", "--exclude-tools-when-tool-choice-none",
    "--generation-config", "--h11-max-header-count", "--h11-max-incomplete-event-size", "--logprobs-mode",
    "--max-logprobs", "--override-generation-config", "--reasoning-parser", "--response-role",
    "--return-tokens-as-token-ids", "--structured-outputs-config", "--tool-call-parser", "--tool-parser-plugin",
    "--trust-request-chat-template",
    # Scheduling of the computation, not its result.
    "--api-server-count", "--async-scheduling", "--download-dir", "--kv-cache-memory-bytes",
    "--long-prefill-token-threshold", "--max-long-partial-prefills", "--max-num-batched-tokens",
    "--max-num-partial-prefills", "--max-num-seqs", "--max-parallel-loading-workers", "--num-gpu-blocks-override",
    "--scheduling-policy", "--stream-interval", "--swap-space", "--use-tqdm-on-load",
})  # fmt: skip
"""Flags that do not change KV bytes, with dashes and without a leading `no-`."""

KV_NEUTRAL_VARIABLES = frozenset({
    "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_OFFLINE", "HTTPS_PROXY", "HTTP_PROXY",
    "NO_PROXY", "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TZ", "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ENGINE_ITERATION_TIMEOUT_S",
    "VLLM_LOGGING_LEVEL",
})  # fmt: skip

SHORT_FLAGS = {
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}

_FLAG = re.compile(r"-{1,2}[A-Za-z]")


def cache_identity(model: CachedModel) -> str:
    """Return the cache identity, 16 hexadecimal digits."""
    spec = model.spec
    inputs = _inputs(model) | {
        "dtype": str(spec.model.dtype),
        "kvCacheDtype": spec.engine.kv_cache_dtype or "auto",
        "tensorParallelSize": spec.engine.tensor_parallel_size,
        "chunkHash": CHUNK_HASH_ALGORITHM,
        "arguments": kv_relevant_arguments(spec.engine.args),
        "variables": sorted(one for one in _variables(model) if one[0] not in KV_NEUTRAL_VARIABLES),
    }
    if spec.cache_generation:
        inputs["cacheGeneration"] = spec.cache_generation
    return digest(inputs)[:IDENTITY_HEX_DIGITS]


def render_id(model: CachedModel) -> str:
    """Return a digest of everything that maps text to tokens, 16 hexadecimal digits.

    Pods of one identity may differ in it: another chat template makes other tokens, but equal tokens make equal blocks.
    All arguments and variables count, because any may name a template or a tokenizer.
    """
    inputs = _inputs(model) | {"arguments": model.spec.engine.args, "variables": sorted(_variables(model))}
    return digest(inputs)[:IDENTITY_HEX_DIGITS]


def kv_relevant_arguments(arguments: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the engine arguments that may change KV bytes as sorted (flag, values) pairs.

    `--a=b` equals `--a b`, underscores equal dashes, short flags equal long ones. Order between flags does not matter,
    order of values does. Words before the first flag are under an empty flag.
    """
    groups: list[tuple[str, list[str]]] = [("", [])]
    for argument in arguments:
        if _FLAG.match(argument):
            flag, equals, value = argument.partition("=")
            groups.append((_normal(flag), [value] if equals else []))
        else:
            groups[-1][1].append(argument)
    relevant = ((flag, tuple(values)) for flag, values in groups if (flag or values) and not _neutral(flag))
    return tuple(sorted(relevant))


def _inputs(model: CachedModel) -> dict[str, Any]:
    """Return the inputs of both digests."""
    spec = model.spec
    mounted = (*spec.engine.volumes, *spec.engine.volume_mounts)
    return {
        "weights": _weights(spec.model.source),
        "revision": spec.model.revision,
        "tokenizer": spec.model.tokenizer,
        "maxModelLen": spec.model.max_model_len,
        "chunkSize": spec.cache_server.chunk_size,
        "engineImage": spec.engine.image,
        "cacheImage": spec.cache_image,
        # Files of a user's volume may be code of the engine, or a chat template.
        **({"mounts": [one.to_kubernetes() for one in mounted]} if mounted else {}),
    }


def _variables(model: CachedModel) -> list[tuple[str, str]]:
    return [
        (one.name, one.value if one.value_from is None else canonical_json(one.value_from.to_kubernetes()).decode())
        for one in model.spec.engine.env
    ]


def _weights(source: WeightsSource) -> dict[str, Any]:
    if source.hub is not None:
        return {"hub": source.hub.repository}
    if source.pvc is not None:
        return {"claim": source.pvc.claim_name, "path": (source.pvc.path or "/").rstrip("/") or "/"}
    return {"path": source.path}


def _normal(flag: str) -> str:
    name, dot, rest = flag.partition(".")
    name = name.replace("_", "-")
    return f"{SHORT_FLAGS.get(name, name)}{dot}{rest}"


def _neutral(flag: str) -> bool:
    name = flag.partition(".")[0]
    return name in KV_NEUTRAL_FLAGS or f"--{name.removeprefix('--no-')}" in KV_NEUTRAL_FLAGS
