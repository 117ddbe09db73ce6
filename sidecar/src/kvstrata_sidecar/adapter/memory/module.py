"""LMCache's side (0.5.6) of the memory's policy: the factory for `--server-module`, and the listener."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
from functools import partial
from typing import Any

from lmcache.lmcache_native import TTLLock
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L1ManagerListener
from lmcache.v1.distributed.l1_manager import L1Manager, L1ObjectState
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.distributed.storage_controllers.store_controller import StoreListener
from lmcache.v1.memory_management import TensorMemoryObj

from kvstrata_sidecar.adapter.memory import lmcache_version as pin
from kvstrata_sidecar.adapter.memory.events import MemoryEvent
from kvstrata_sidecar.adapter.memory.evictor import Evictor
from kvstrata_sidecar.adapter.memory.lmcache_keys import Chunks
from kvstrata_sidecar.adapter.memory.lmcache_memory import Pool
from kvstrata_sidecar.adapter.memory.lmcache_prefetch import Prefetch
from kvstrata_sidecar.adapter.memory.loans import Lending, Loans
from kvstrata_sidecar.adapter.memory.params import MemoryParams, Warmup
from kvstrata_sidecar.adapter.memory.warmup import Memory, Warmer
from kvstrata_sidecar.adapter.memory.write_back import Offers
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, nobody_asks
from kvstrata_sidecar.adapter.pool_report import Hasher
from kvstrata_sidecar.adapter.runtime import acquire, no_names, nobody_offers, release

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
        self._context = build_context.server_context
        manager = pin.the_manager(self._context.storage_manager, L1Manager, L1MemoryManager)
        self._runtime = acquire(params.pod)
        if self._runtime.memory is not None:
            release(self._runtime)
            raise pin.IncompatibleServerError("this server module was named twice")
        self._pool = Pool(manager, L1Error.SUCCESS, L1Error.KEY_IS_LOCKED, self._runtime.spans)
        self._evictor = Evictor(
            self._pool,
            self._runtime.enforcement,
            tier=params.tier,
            high_watermark_percent=params.high_watermark_percent,
            residue=_residue(build_context),
            gone=self._runtime.enforcement.ages.forget,
            passes_on=lambda key: self._runtime.passes_on(key.cache_salt),
            lower=lambda: self._runtime.tiers,
        )
        self._pool.guard()
        self._pool.lend(_loans(manager, self._runtime.enforcement, self._evictor))
        self._pool.listen(_Listener(self._evictor, self._pool))
        self._runtime.enforcement.loaded_from = self._evictor.borrowed.loaded
        self._evictor.start()
        self._runtime.memory = self._evictor
        self._runtime.hasher = Hasher(*pin.the_hasher(self._context))
        self._runtime.names = Chunks(pin.the_layouts(self._context)).keys
        store_again = pin.the_store_listener(manager, StoreListener).on_l1_keys_write_finished
        self._runtime.lacking = Offers(store_again, self._evictor.traffic.add).lacking
        self._warmer: Warmer | None = None
        if params.warmup is not None and params.tier is not None:
            self._warmer = self._warm_up(params.warmup, params.tier, params.high_watermark_percent / 100)
        logger.info("LMCache's memory is under the policy of %s", params.tier or "no CPU tier")

    @property
    def context(self) -> Any:
        return self._context

    def report_status(self) -> dict[str, Any]:
        """Return what `/status` shows beside LMCache's own; without an enforced policy the server is unhealthy."""
        healthy = self._evictor.healthy
        status: dict[str, Any] = {"kvstrata_memory": {"is_healthy": healthy, "counters": self._evictor.counters()}}
        return status if healthy else status | {"is_healthy": False}

    def close(self) -> None:
        """Stop governing; LMCache frees the rest itself."""
        self._runtime.warmer = None
        if self._warmer is not None:
            self._warmer.close()
        self._runtime.hasher = None
        self._runtime.names = no_names
        self._runtime.lacking = nobody_offers
        self._runtime.memory = None
        self._runtime.enforcement.loaded_from = nobody_asks
        self._evictor.close()
        self._pool.close()
        release(self._runtime)

    def _warm_up(self, warmup: Warmup, tier: str, high_share: float) -> Warmer:
        pin.require_prefetching(self._context.storage_manager)
        evictor, pool, runtime = self._evictor, self._pool, self._runtime

        def size(key: Any) -> int:
            entry = pool.entry(key)
            return pool.size(entry) if entry is not None else 0

        memory = Memory(size, evictor.held_bytes, pool.usage, partial(evictor.note, MemoryEvent.ORDERED))
        runtime.warmer = warmer = Warmer(
            warmup,
            tier,
            high_share,
            runtime.enforcement,
            lambda: runtime.tiers,
            memory,
            Prefetch(self._context.storage_manager, pin.the_layouts(self._context)),
            evictor.traffic,
        )
        warmer.start()
        return warmer


class _Listener(L1ManagerListener):  # type: ignore[misc]
    def __init__(self, evictor: Evictor, pool: Pool) -> None:
        self._note = evictor.note
        self._pending_write_back = evictor.pending_write_back
        self._loaded = evictor.loaded
        self._pool = pool

    def on_l1_keys_reserved_read(self, keys: list[Any]) -> None:
        """No use of the blocks, but LMCache reads written blocks to store them in other tiers."""
        self._pending_write_back.taken(keys)

    def on_l1_keys_read_finished(self, keys: list[Any]) -> None:
        self._note(MemoryEvent.RELEASED, keys)

    def on_l1_keys_reserved_write(self, keys: list[Any]) -> None:
        self._note(MemoryEvent.RESERVED, keys)

    def on_l1_keys_write_finished(self, keys: list[Any]) -> None:
        self._pending_write_back.came(keys)
        self._note(MemoryEvent.WRITTEN, keys)

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[Any]) -> None:
        self._loaded(keys)

    def on_l1_keys_deleted_by_manager(self, keys: list[Any]) -> None:
        self._note(MemoryEvent.DELETED, keys)

    def on_l1_keys_accessed(self, keys: list[Any]) -> None:
        loans = self._pool.loans
        self._note(MemoryEvent.USED, [loans.lender(key) for key in keys] if loans else keys)


def _loans(manager: Any, enforcement: Enforcement, evictor: Evictor) -> Loans:
    ttl_s = manager._read_ttl_seconds

    def entry_of(memory_object: Any) -> L1ObjectState:
        return L1ObjectState(
            memory_obj=memory_object, write_lock=TTLLock(ttl_s), read_lock=TTLLock(ttl_s), is_temporary=True
        )

    lending = Lending(
        enforcement,
        tier=evictor.tier,
        lendable=evictor.lendable,
        returned=lambda key: evictor.note(MemoryEvent.RELEASED, (key,)),
        counts=evictor.traffic,
    )
    missing = (L1Error.KEY_NOT_EXIST, None)
    return Loans(manager, lending, entry_of=entry_of, missing=missing, lock_ttl_s=ttl_s)


def _residue(build_context: Any) -> str:
    if build_context.mp_config.supported_transfer_mode == "lmcache_driven":
        return ""
    return "" if build_context.server_context.shm_pool_info["shm_name"] else PICKLED
