"""LMCache's (0.5.6) names of a chunk's parts: one for each rank and group of layers that the engine registered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.api import ObjectKey

from kvstrata_sidecar.adapter.pool_report import counted_groups


class Chunks:
    """`layouts` is LMCache's registry, by model name and number of ranks."""

    def __init__(self, layouts: Mapping[tuple[str, int], Any]) -> None:
        self._layouts = layouts

    def keys(self, keyspace: str, chunk_hashes: Sequence[bytes]) -> list[list[Any]] | None:
        """Return the keys of each chunk's parts, None before an engine registered its layout."""
        registered = list(self._layouts.items())
        if not registered:
            return None
        parts = [
            (model, rank, group)
            for (model, world_size), entry in registered
            for rank in ranks_of(world_size)
            for group in counted_groups(entry.attn_desc.num_chunks_in_sw)
        ]
        return [
            [ObjectKey(chunk_hash, model, rank, group, keyspace) for model, rank, group in parts]
            for chunk_hash in chunk_hashes
        ]


def ranks_of(world_size: int) -> list[int]:
    return [
        ObjectKey.ComputeKVRank(world_size=world_size, global_rank=rank, local_world_size=world_size, local_rank=rank)
        for rank in range(world_size)
    ]
