"""File tiers of a pod: volume, size and adapter parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.objects import paths, sizing
from kvstrata.objects.container import mount
from kvstrata.objects.quantities import MIB, binary, round_up

MARGIN_BYTES = 64 * MIB
MARGIN_PERCENT = 2
"""Size of a node volume beyond the capacity: directories, and files under removal."""

BLOCK_BYTES_AT_LEAST = 256 << 10
MOST_BLOCKS = 1 << 20
FEWEST_BLOCKS = 1 << 14
INDEX_BYTES_PER_BLOCK = 640
"""Memory of the cache server's index per block (measured: 530 to 570 bytes)."""


def file_tiers(tiers: Sequence[CacheTier]) -> list[CacheTier]:
    return [tier for tier in tiers if tier.spec.medium is Medium.NVME]


def max_blocks(tier: CacheTier) -> int:
    """Return the capacity of a pod's index of the tier, in blocks."""
    return max(FEWEST_BLOCKS, min(MOST_BLOCKS, tier.spec.capacity_bytes // BLOCK_BYTES_AT_LEAST))


def index_bytes(tiers: Sequence[CacheTier]) -> int:
    """Return the memory of all file tiers' indexes in the cache server, in whole MiB."""
    return sum(round_up(max_blocks(tier) * INDEX_BYTES_PER_BLOCK) for tier in file_tiers(tiers))


def node_bytes(tiers: Sequence[CacheTier]) -> int:
    """Return the space that the tiers take on the node's file system, for the scheduler."""
    places = ((tier.spec.capacity_bytes, tier.spec.nvme) for tier in file_tiers(tiers))
    return sum(size for size, place in places if place is not None and place.empty_dir is not None)


def mounts(tiers: Sequence[CacheTier]) -> list[dict[str, Any]]:
    return [mount(_volume_name(tier), paths.nvme_directory(tier.name)) for tier in file_tiers(tiers)]


def volumes(tiers: Sequence[CacheTier]) -> list[dict[str, Any]]:
    return [_volume(tier) for tier in file_tiers(tiers)]


def params(tier: CacheTier, model: str, nodefs_reserve_percent: int) -> dict[str, Any]:
    spec = tier.spec
    values: dict[str, Any] = {
        "medium": str(Medium.NVME),
        "name": tier.name,
        "directory": paths.nvme_directory(tier.name),
        "capacity_bytes": sizing.stored_bytes(spec),
        "max_blocks": max_blocks(tier),
        "free_floor_percent": nodefs_reserve_percent,
    }
    if spec.nvme is not None and spec.nvme.host_path is not None:
        # All pods of the node share the folder: each uses its own place in it.
        values["place"] = model
    if spec.encryption_required:
        values["encryption"] = "Required"
    if spec.max_retention_s is not None:
        values["default_ttl_s"] = spec.max_retention_s
    return values


def _volume_name(tier: CacheTier) -> str:
    return f"nvme-{tier.name}"


def _volume(tier: CacheTier) -> dict[str, Any]:
    spec, size_bytes = tier.spec.nvme, tier.spec.capacity_bytes
    if spec is not None and spec.host_path is not None:
        return {"name": _volume_name(tier), "hostPath": {"path": spec.host_path.path, "type": "Directory"}}
    # No limit per container: the kubelet would compare their sum with the use of the whole pod.
    limit_bytes = round_up(size_bytes + max(MARGIN_BYTES, size_bytes * MARGIN_PERCENT // 100))
    return {"name": _volume_name(tier), "emptyDir": {"sizeLimit": binary(limit_bytes)}}
