"""LMCache's side (0.5.6) of the memory's policy: the factory that `--server-module` names, and the listener."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
from typing import Any

from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L1ManagerListener
from lmcache.v1.distributed.l1_manager import L1Manager, L1ObjectState
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.memory_management import TensorMemoryObj

from kvstrata_sidecar.adapter.runtime import acquire, release

from . import pin
from .governor import Governor
from .notes import Note
from .params import MemoryParams
from .pool import Pool

logger = logging.getLogger(__name__)

PICKLED = "engine and cache exchange blocks without shared memory: copies stay in the cache server's heap"


def build_server_modules(context: Any) -> MemoryModule:
    """Return the module that governs the server's memory.

    Raises IncompatibleServerError for another LMCache than the pinned one and for a server that cannot be governed, and
    ValueError for malformed parameters: either stops the server at its start.
    """
    return MemoryModule(context)


class MemoryModule:
    """Governs the memory of one server from its start until `close`."""

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
        self._pool = Pool(manager, L1Error.SUCCESS, L1Error.KEY_IS_LOCKED)
        self._governor = Governor(
            self._pool,
            self._runtime.enforcement,
            tier=params.tier,
            high_watermark_percent=params.high_watermark_percent,
            eviction=params.eviction,
            residue=_residue(build_context),
            gone=self._runtime.enforcement.ages.forget,
        )
        self._pool.guard()
        self._pool.listen(_Listener(self._governor))
        self._governor.start()
        self._runtime.memory = self._governor
        logger.info("LMCache's memory is under the policy of %s", params.tier or "no CPU tier")

    @property
    def context(self) -> Any:
        """LMCache's shared context."""
        return self._context

    def report_status(self) -> dict[str, Any]:
        """Return what `/status` shows beside LMCache's own; without an enforced policy the server is unhealthy."""
        healthy = self._governor.healthy
        status: dict[str, Any] = {"kvstrata_memory": {"is_healthy": healthy, "counters": self._governor.counters()}}
        return status if healthy else status | {"is_healthy": False}

    def close(self) -> None:
        """Stop governing; LMCache frees the rest itself."""
        self._runtime.memory = None
        self._governor.close()
        self._pool.close()
        release(self._runtime)


class _Listener(L1ManagerListener):  # type: ignore[misc]
    def __init__(self, governor: Governor) -> None:
        self._note = governor.note

    def on_l1_keys_reserved_read(self, keys: list[Any]) -> None:
        """Do nothing: being read is not yet being useful."""

    def on_l1_keys_read_finished(self, keys: list[Any]) -> None:
        self._note(Note.RELEASED, keys)

    def on_l1_keys_reserved_write(self, keys: list[Any]) -> None:
        self._note(Note.RESERVED, keys)

    def on_l1_keys_write_finished(self, keys: list[Any]) -> None:
        self._note(Note.WRITTEN, keys)

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[Any]) -> None:
        self._note(Note.WRITTEN, keys)

    def on_l1_keys_deleted_by_manager(self, keys: list[Any]) -> None:
        self._note(Note.DELETED, keys)

    def on_l1_keys_accessed(self, keys: list[Any]) -> None:
        self._note(Note.USED, keys)


def _residue(build_context: Any) -> str:
    if build_context.mp_config.supported_transfer_mode == "lmcache_driven":
        return ""
    return "" if build_context.server_context.shm_pool_info["shm_name"] else PICKLED
