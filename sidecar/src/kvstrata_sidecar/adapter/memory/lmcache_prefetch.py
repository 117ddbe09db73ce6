"""LMCache's (0.5.6) loads without a request: the blocks stay, and are not locked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.api import GroupedObjectKeys, ObjectKey, PrefetchLockMode, PrefetchTaskSpec

from kvstrata_sidecar.adapter.memory.lmcache_keys import ranks_of
from kvstrata_sidecar.adapter.memory.warmup import Chunk, ChunkPart
from kvstrata_sidecar.adapter.pool_report import counted_groups


class Prefetch:
    """Loads chunks through `storage_manager`. `layouts` is LMCache's live registry."""

    def __init__(self, storage_manager: Any, layouts: Mapping[tuple[str, int], Any]) -> None:
        self._storage = storage_manager
        self._layouts = layouts

    def parts(self) -> tuple[ChunkPart, ...]:
        for (model, world_size), entry in list(self._layouts.items()):
            counted = counted_groups(entry.attn_desc.num_chunks_in_sw)
            return tuple(
                ChunkPart(model, rank, group, layout, group in counted)
                for rank in ranks_of(world_size)
                for group, layout in sorted(entry.group_layout_descs.items())
            )
        return ()

    @staticmethod
    def keys(parts: Sequence[ChunkPart], chunks: Sequence[Chunk]) -> list[Any]:
        return [
            ObjectKey(chunk.chunk_hash, part.model, part.rank, part.group, chunk.keyspace)
            for chunk in chunks
            for part in parts
        ]

    def begin(self, parts: Sequence[ChunkPart], chunks: Sequence[Chunk]) -> Any:
        """Start loading chunks, as far as tiers have them; return the handle for `over`."""
        # No windows: each chunk is loaded regardless of its predecessors.
        rows = [
            GroupedObjectKeys(
                [ObjectKey(one.chunk_hash, part.model, part.rank, part.group, one.keyspace) for one in chunks],
                part.group,
                part.layout,
            )
            for part in parts
        ]
        spec = PrefetchTaskSpec(key_groups=rows, fetching_policy="full", lock_mode=PrefetchLockMode.NO_LOCK)
        return self._storage.submit_prefetch_task(spec, external_request_id="kvstrata-warm-up")

    def over(self, handle: Any, timeout_s: float) -> bool:
        """Wait for the end of a load; return whether it ended in time. Repeat until it did: LMCache keeps results."""
        if not self._storage.wait_prefetch_status(handle, timeout_s):
            return False
        self._storage.query_prefetch_status(handle)
        return True
