"""LMCache's (0.5.6) way of loading blocks into its memory for nobody in particular: they stay, and are not locked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.api import GroupedObjectKeys, ObjectKey, PrefetchLockMode, PrefetchTaskSpec

from kvstrata_sidecar.adapter.memory.lmcache_keys import ranks_of
from kvstrata_sidecar.adapter.memory.warmup import Chunk, ChunkPart
from kvstrata_sidecar.adapter.pool_report import counted_groups


class Prefetch:
    """Loads chunks through `storage_manager`. `layouts` is what LMCache's registry knows, kept up by LMCache."""

    def __init__(self, storage_manager: Any, layouts: Mapping[tuple[str, int], Any]) -> None:
        self._storage = storage_manager
        self._layouts = layouts

    def parts(self) -> tuple[ChunkPart, ...]:
        """Return the parts that a chunk has; none before an engine registered how its blocks look."""
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
        """Return LMCache's keys of all parts of chunks, chunk by chunk."""
        return [
            ObjectKey(chunk.chunk_hash, part.model, part.rank, part.group, chunk.keyspace)
            for chunk in chunks
            for part in parts
        ]

    def begin(self, parts: Sequence[ChunkPart], chunks: Sequence[Chunk]) -> Any:
        """Begin to load chunks, as far as tiers have them; return what `over` is asked about."""
        # No windows: a chunk stands for itself here, whatever came before it.
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
        """Wait until a load is over; whether that came true in time. To be asked until it is: LMCache keeps results."""
        if not self._storage.wait_prefetch_status(handle, timeout_s):
            return False
        self._storage.query_prefetch_status(handle)
        return True
