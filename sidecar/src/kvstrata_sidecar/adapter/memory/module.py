"""The module that governs the server's memory: the factory for `--server-module`, and the listener."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from kvstrata_sidecar.adapter.memory.tier import MemoryTier
from kvstrata_sidecar.adapter.params import MemoryParams
from kvstrata_sidecar.adapter.pool_report import Hasher
from kvstrata_sidecar.adapter.runtime import acquire, release
from kvstrata_sidecar.upstream import versions
from kvstrata_sidecar.upstream.pool import Pool
from kvstrata_sidecar.upstream.server_checks import IncompatibleServerError

logger = logging.getLogger(__name__)
lmcache = versions.load(versions.SERVER)
ListenerBase: Any = lmcache.ListenerBase

ADAPTER = ("kvstrata_sidecar.adapter.plugin", "PolicyAdapter")
"""Module and class of the adapter that LMCache makes for each tier."""

PICKLED = "engine and cache exchange blocks without shared memory: copies stay in the cache server's heap"


def build_server_modules(context: Any) -> MemoryModule:
    """Return the module that governs the server's memory. Raises IncompatibleServerError for an unsupported LMCache or
    server, and ValueError for malformed parameters: either stops the server at its start."""
    return MemoryModule(context)


class MemoryModule:
    def __init__(self, build_context: Any) -> None:
        params = MemoryParams.from_json(build_context.config)
        self.context = build_context.server_context
        manager = lmcache.manager(self.context)
        chunks = lmcache.Chunks(self.context)
        hasher = Hasher(*lmcache.hasher(self.context))
        store_again = lmcache.store_again(manager)
        lmcache.remove_salts()
        self._runtime = runtime = acquire(params.pod)
        if runtime.memory is not None:
            release(runtime)
            raise IncompatibleServerError("this server module was named twice")
        self._pool: Pool = lmcache.pool(manager, runtime.spans)
        self._memory = memory = _GovernedMemory(
            self._pool,
            runtime.enforcement,
            name=params.tier,
            high_watermark_percent=params.high_watermark_percent,
            residue=PICKLED if lmcache.copies_elsewhere(build_context) else "",
            gone=runtime.enforcement.ages.forget,
            passes_on=lambda key: runtime.passes_on(key.cache_salt),
            store_again=store_again,
        )
        self._pool.guard()
        memory.lend(entry_of=lmcache.entry_of(manager), missing=lmcache.MISSING)
        self._pool.listen(memory)
        runtime.enforcement.loaded_from = memory.borrowed.loaded
        memory.start()
        runtime.enforcement.fingerprints = chunks.fingerprints
        runtime.govern(memory, chunks.names, hasher)
        runtime.policy_tiers.join = partial(lmcache.join, self.context, *ADAPTER)
        logger.info("LMCache's memory is under the policy of %s", params.tier or "no CPU tier")

    def report_status(self) -> dict[str, Any]:
        """Return this module's part of LMCache's `/status`; without an enforced policy the server is unhealthy."""
        healthy = self._memory.healthy
        status: dict[str, Any] = {"kvstrata_memory": {"is_healthy": healthy, "counters": self._memory.counters()}}
        return status if healthy else status | {"is_healthy": False}

    def close(self) -> None:
        """Stop governing; LMCache frees the rest itself."""
        self._runtime.policy_tiers.join = None
        self._runtime.govern(None)
        self._runtime.enforcement.loaded_from = None
        self._runtime.enforcement.fingerprints = tuple
        self._memory.close()
        self._pool.close()
        release(self._runtime)


class _GovernedMemory(MemoryTier, ListenerBase):  # type: ignore[misc]
    """LMCache's base class refuses a listener that lacks a callback."""
