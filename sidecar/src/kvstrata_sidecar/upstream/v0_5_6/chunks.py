"""LMCache's (0.5.6) parts of chunks, one for each registered rank and group of layers: names, and loads of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.api import GroupedObjectKeys, ObjectKey, PrefetchLockMode, PrefetchTaskSpec

from kvstrata.contract.messages.engine_identity import UNRESOLVED, fingerprint_in
from kvstrata_sidecar.adapter.memory.warmup import Chunk, ChunkPart
from kvstrata_sidecar.adapter.pool_report import counted_groups


class Chunks:
    """`layouts` is LMCache's live registry, by model name and number of ranks."""

    def __init__(self, layouts: Mapping[tuple[str, int], Any], storage_manager: Any) -> None:
        self._layouts = layouts
        self._storage = storage_manager

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

    def parts(self) -> tuple[ChunkPart, ...]:
        """Return a chunk's parts; empty before an engine registered."""
        for (model, world_size), entry in list(self._layouts.items()):
            counted = counted_groups(entry.attn_desc.num_chunks_in_sw)
            return tuple(
                ChunkPart(model, rank, group, layout, group in counted)
                for rank in _ranks(world_size)
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
        """Start loading chunks, as far as tiers have them, without locks; return the handle for `over`."""
        # No windows: each chunk is loaded regardless of its predecessors.
        rows = [GroupedObjectKeys(self.keys([part], chunks), part.group, part.layout) for part in parts]
        spec = PrefetchTaskSpec(key_groups=rows, fetching_policy="full", lock_mode=PrefetchLockMode.NO_LOCK)
        return self._storage.submit_prefetch_task(spec, external_request_id="kvstrata-warm-up")

    def over(self, handle: Any, timeout_s: float) -> bool:
        """Wait for the end of a load; return whether it ended in time. Repeat until it did: LMCache keeps results."""
        if not self._storage.wait_prefetch_status(handle, timeout_s):
            return False
        self._storage.query_prefetch_status(handle)
        return True


def _ranks(world_size: int) -> list[int]:
    return [
        ObjectKey.ComputeKVRank(world_size=world_size, global_rank=rank, local_world_size=world_size, local_rank=rank)
        for rank in range(world_size)
    ]
