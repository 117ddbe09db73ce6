"""LMCache 0.5.6 in the cache server. Functions raise IncompatibleServerError for a server that they cannot govern."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from lmcache.lmcache_native import Bitmap, TTLLock
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L1ManagerListener, L2StoreResult
from lmcache.v1.distributed.l1_manager import L1Manager, L1ObjectState
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.distributed.storage_controllers.store_controller import StoreListener
from lmcache.v1.distributed.storage_manager import _L1_WRITE_TAG
from opentelemetry import metrics
from opentelemetry.sdk.metrics.view import View

from kvstrata.contract.messages.engine_identity import UNRESOLVED, fingerprint_in
from kvstrata_sidecar.adapter.pool_report import counted_groups
from kvstrata_sidecar.adapter.runtime import Leave
from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.upstream import server_checks as checks
from kvstrata_sidecar.upstream.pool import Pool

logger = logging.getLogger(__name__)

AdapterBase = L2AdapterInterface
ListenerBase = L1ManagerListener
MISSING = (L1Error.KEY_NOT_EXIST, None)
"""The answer of `reserve_read` for an absent key."""

store_result = L2StoreResult
no_usage = partial(AdapterUsage, total_bytes_used=0, total_capacity_bytes=0)
hasher = checks.the_hasher


def bitmap(length: int, hits: Collection[int]) -> Any:
    made = Bitmap(length)
    made.batched_set(list(hits))
    return made


def manager(context: Any) -> Any:
    return checks.the_manager(context.storage_manager, L1Manager, L1MemoryManager)


def pool(manager: Any, spans: Spans) -> Pool:
    return Pool(manager, L1Error.SUCCESS, L1Error.OUT_OF_MEMORY, _L1_WRITE_TAG, spans)


def entry_of(manager: Any) -> Callable[[Any], Any]:
    """Return the function that makes an entry of the manager's table which LMCache frees after its last read."""
    ttl_s = manager._read_ttl_seconds
    return lambda memory_object: L1ObjectState(
        memory_obj=memory_object, write_lock=TTLLock(ttl_s), read_lock=TTLLock(ttl_s), is_temporary=True
    )


def store_again(manager: Any) -> Callable[[list[Any]], object]:
    """Return the function that has LMCache store blocks of its memory in all tiers behind it."""
    notify: Callable[[list[Any]], object] = checks.the_store_listener(manager, StoreListener).on_l1_keys_write_finished
    return notify


class Chunks:
    """Parts of chunks, one for each registered rank and group of layers."""

    def __init__(self, context: Any) -> None:
        self._layouts: Mapping[tuple[str, int], Any] = checks.the_layouts(context)

    def fingerprints(self) -> list[str]:
        """Return the fingerprints of the engines that have registered."""
        return sorted({fingerprint_in(model) for model, _ in list(self._layouts)} - {UNRESOLVED})

    def names(self, keyspace: str, chunk_hashes: Sequence[bytes]) -> list[list[Any]] | None:
        """Return the keys of each chunk's counted parts, None before an engine registered its layout."""
        registered = list(self._layouts.items())
        if not registered:
            return None
        parts = [
            (model, rank, group)
            for (model, world_size), entry in registered
            for rank in _ranks(world_size)
            for group in counted_groups(entry.attn_desc.num_chunks_in_sw)
        ]
        return [
            [ObjectKey(chunk_hash, model, rank, group, keyspace) for model, rank, group in parts]
            for chunk_hash in chunk_hashes
        ]


def _ranks(world_size: int) -> list[int]:
    return [
        ObjectKey.ComputeKVRank(world_size=world_size, global_rank=rank, local_world_size=world_size, local_rank=rank)
        for rank in range(world_size)
    ]


def join(context: Any, module: str, name: str, params: Mapping[str, Any]) -> Leave:
    """Have LMCache make the adapter class `name` of `module` with these parameters, and use it behind those that it
    has; return the function that ends the use and closes the adapter."""
    storage = context.storage_manager
    number = storage.add_l2_adapter(PluginL2AdapterConfig(module, name, dict(params)))
    return partial(storage.delete_l2_adapter, number)


def copies_elsewhere(build_context: Any) -> bool:
    """Whether blocks pass through the server's heap on their way from and to the engine."""
    return not build_context.server_context.shm_pool_info["shm_name"]


class _AllButSalt(frozenset[str]):
    def __contains__(self, label: object) -> bool:
        return label != "cache_salt"


def remove_salts() -> None:
    """Remove the salt from all metrics, before the first request: a metric that has counted keeps its labels.

    LMCache labels lookups, blocks and reuse with it, which gives access to a scope's blocks; and each random salt would
    be a series for as long as the server lives."""
    settings = getattr(metrics.get_meter_provider(), "_sdk_config", None)
    if settings is None:
        logger.warning("LMCache's metrics are off or unknown; the gate leaves out lines with salts")
        return
    settings.views = (*settings.views, View(instrument_name="*", attribute_keys=_AllButSalt()))
