"""LMCache's side (0.5.6) of the memory's policy: the factory for `--server-module`, and the listener."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
from typing import Any

from lmcache.lmcache_native import TTLLock
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L1ManagerListener
from lmcache.v1.distributed.l1_manager import L1Manager, L1ObjectState
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.distributed.storage_controllers.store_controller import StoreListener
from lmcache.v1.memory_management import TensorMemoryObj

from kvstrata_sidecar.adapter.memory import lmcache_version as pin
from kvstrata_sidecar.adapter.memory.lmcache_chunks import Chunks
from kvstrata_sidecar.adapter.memory.lmcache_memory import Pool
from kvstrata_sidecar.adapter.memory.params import MemoryParams
from kvstrata_sidecar.adapter.memory.tier import Listener, MemoryTier
from kvstrata_sidecar.adapter.memory.warmup import Warmer
from kvstrata_sidecar.adapter.policy.enforcement import ignore_load
from kvstrata_sidecar.adapter.pool_report import Hasher
from kvstrata_sidecar.adapter.runtime import acquire, release

logger = logging.getLogger(__name__)

PICKLED = "engine and cache exchange blocks without shared memory: copies stay in the cache server's heap"


def build_server_modules(context: Any) -> MemoryModule:
    """Return the module that governs the server's memory. Raises IncompatibleServerError for an unsupported LMCache or
    server, and ValueError for malformed parameters: either stops the server at its start."""
    return MemoryModule(context)


class MemoryModule:
    def __init__(self, build_context: Any) -> None:
        params = MemoryParams.from_json(build_context.config)
        pin.require_version(importlib.metadata.version("lmcache"))
        pin.require_names(
            L1ManagerListener.__abstractmethods__,
            {field.name for field in dataclasses.fields(L1ObjectState)},
            TensorMemoryObj,
        )
        self.context = build_context.server_context
        storage = self.context.storage_manager
        manager = pin.the_manager(storage, L1Manager, L1MemoryManager)
        chunks = Chunks(pin.the_layouts(self.context), storage)
        hasher = Hasher(*pin.the_hasher(self.context))
        store_listener = pin.the_store_listener(manager, StoreListener)
        if params.warmup is not None:
            pin.require_prefetching(storage)
        self._runtime = runtime = acquire(params.pod)
        if runtime.memory is not None:
            release(runtime)
            raise pin.IncompatibleServerError("this server module was named twice")
        self._pool = Pool(manager, L1Error.SUCCESS, L1Error.KEY_IS_LOCKED, runtime.spans)
        self._memory = memory = MemoryTier(
            self._pool,
            runtime.enforcement,
            name=params.tier,
            high_watermark_percent=params.high_watermark_percent,
            residue=_residue(build_context),
            gone=runtime.enforcement.ages.forget,
            passes_on=lambda key: runtime.passes_on(key.cache_salt),
            lower=lambda: runtime.tiers,
            store_again=store_listener.on_l1_keys_write_finished,
        )
        self._pool.guard()
        memory.lend(entry_of=_entry_of(manager._read_ttl_seconds), missing=(L1Error.KEY_NOT_EXIST, None))
        self._pool.listen(_Listener(memory, self._pool))
        runtime.enforcement.loaded_from = memory.borrowed.loaded
        memory.start()
        runtime.govern(memory, chunks.names, hasher)
        if params.warmup is not None:
            memory.warmer = Warmer(params.warmup, memory, runtime.enforcement, lambda: runtime.tiers, chunks)
            memory.warmer.start()
        logger.info("LMCache's memory is under the policy of %s", params.tier or "no CPU tier")

    def report_status(self) -> dict[str, Any]:
        """Return this module's part of LMCache's `/status`; without an enforced policy the server is unhealthy."""
        healthy = self._memory.healthy
        status: dict[str, Any] = {"kvstrata_memory": {"is_healthy": healthy, "counters": self._memory.counters()}}
        return status if healthy else status | {"is_healthy": False}

    def close(self) -> None:
        """Stop governing; LMCache frees the rest itself."""
        self._runtime.govern(None)
        self._runtime.enforcement.loaded_from = ignore_load
        self._memory.close()
        self._pool.close()
        release(self._runtime)


class _Listener(Listener, L1ManagerListener):  # type: ignore[misc]
    """LMCache's base class refuses a listener that lacks a callback."""


def _entry_of(ttl_s: int) -> Any:
    return lambda memory_object: L1ObjectState(
        memory_obj=memory_object, write_lock=TTLLock(ttl_s), read_lock=TTLLock(ttl_s), is_temporary=True
    )


def _residue(build_context: Any) -> str:
    if build_context.mp_config.supported_transfer_mode == "lmcache_driven":
        return ""
    return "" if build_context.server_context.shm_pool_info["shm_name"] else PICKLED
