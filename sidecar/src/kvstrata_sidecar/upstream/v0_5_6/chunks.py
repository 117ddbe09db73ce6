"""LMCache's (0.5.6) parts of chunks, one for each registered rank and group of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.api import ObjectKey

from kvstrata.contract.messages.engine_identity import UNRESOLVED, fingerprint_in
from kvstrata_sidecar.adapter.pool_report import counted_groups


class Chunks:
    """`layouts` is LMCache's live registry, by model name and number of ranks."""

    def __init__(self, layouts: Mapping[tuple[str, int], Any]) -> None:
        self._layouts = layouts

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
