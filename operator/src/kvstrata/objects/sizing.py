"""How much memory volumes and containers get.

Pages of a memory-backed volume are charged to the container that first touches them, and blocks are written by the
engine as well as by the cache server: so the memory of the CPU tier counts in the limits of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.api.cachedmodel import CachedModel, Transfer
from kvstrata.api.cachetier import CacheTier, CacheTierSpec, Medium
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, MAX_CHUNKS, MAX_POOLS, MAX_VERSIONS

from .quantities import GIB, MIB, round_up

STAGING_BYTES = 512 * MIB
"""Memory of the cache server when no tier of medium CPU is listed: blocks pass through it to slower tiers."""

SHARED_MEMORY_MARGIN_BYTES = 512 * MIB
SHARED_MEMORY_PER_RANK_BYTES = GIB
"""NCCL and the engine's own message queues live in /dev/shm too, once there is more than one rank."""

CACHE_BASE_REQUEST_BYTES = 512 * MIB
CACHE_BASE_LIMIT_BYTES = 1536 * MIB
POLICY_VOLUME_BYTES = 64 * MIB
POLICY_VOLUME_STEP = 4
KEYS_OF_A_SHARD_BYTES = MIB
"""What the data keys of a full bundle shard take as files: some 220 of them, a page of memory each."""

MANIFESTS_BYTES = 2 * MAX_POOLS * MAX_VERSIONS * MAX_CHUNKS * CHUNK_HASH_BYTES
"""What the manifests of all pools take that a model can have, and those that they replace until these are removed."""

GATE_REQUEST_BYTES = 96 * MIB
GATE_LIMIT_BYTES = 384 * MIB

REDIS_STORED_PERCENT = 80
"""How much of a Redis tier's capacity blocks may take: the rest is for their index and the allocator's rounding."""

CLUSTER_STORED_PERCENT = 65
"""The same in a cluster, where a scope's sixteen buckets fall on servers by chance: some hold more than their share."""

REDIS_MARGIN_BYTES = 64 * MIB
REDIS_MARGIN_DIVISOR = 4

BACKLOG_DIVISOR, MIN_BACKLOG_BYTES, MAX_BACKLOG_BYTES = 32, MIB, 256 * MIB
BUFFER_DIVISOR, MIN_BUFFER_BYTES = 8, 64 * MIB


def policy_volume_bytes(tiers: Sequence[CacheTier], shard_count: int) -> int:
    """Return the size limit of the volume with the policy, pools' manifests and, for pods that encrypt, data keys.

    Each scope's key is a file. Another limit restarts pods, so it follows the number of the bundle's shards, which
    never shrinks, in steps of four, and leaves room for twice as many keys as there can be when a step is taken.
    """
    size = POLICY_VOLUME_BYTES
    if any(tier.spec.encryption_required for tier in tiers):
        while size < (shard_count + 1) * KEYS_OF_A_SHARD_BYTES + MANIFESTS_BYTES:
            size *= POLICY_VOLUME_STEP
    return size


def gate_limit_bytes(tiers: Sequence[CacheTier], shard_count: int) -> int:
    """Return the gate's memory limit: what it writes to the policy volume is charged to it."""
    return GATE_LIMIT_BYTES + policy_volume_bytes(tiers, shard_count) - POLICY_VOLUME_BYTES


def l1_bytes(tiers: Sequence[CacheTier]) -> int:
    """Return the size of the cache server's memory: the CPU tier's, or a staging area without one."""
    sizes = [tier.spec.capacity_bytes or 0 for tier in tiers if tier.spec.medium is Medium.CPU]
    return sum(sizes) or STAGING_BYTES


def stored_bytes(spec: CacheTierSpec) -> int | None:
    """Return how much of a tier all blocks together may take: in each pod, or in all of a Redis tier.

    None for a medium without a capacity. It is what can be guaranteed, too.
    """
    if spec.capacity_bytes is None:
        return None
    percent = spec.high_watermark_percent
    if spec.medium is Medium.REDIS:
        percent = min(percent, CLUSTER_STORED_PERCENT if spec.is_cluster else REDIS_STORED_PERCENT)
    return spec.capacity_bytes * percent // 100


def shared_memory_bytes(model: CachedModel, tiers: Sequence[CacheTier]) -> int:
    """Return the size limit of /dev/shm, in whole MiB."""
    ranks = model.spec.engine.effective_tensor_parallel_size
    size = SHARED_MEMORY_MARGIN_BYTES + (ranks * SHARED_MEMORY_PER_RANK_BYTES if ranks > 1 else 0)
    if model.spec.cache_server.effective_transfer is Transfer.ENGINE_DRIVEN:
        size += l1_bytes(tiers)
    return round_up(size)


def shard_bytes(spec: CacheTierSpec) -> int:
    """Return a shard's part of a managed Redis tier's capacity; all of it for a single server."""
    managed = spec.redis.managed if spec.redis is not None else None
    return -(-(spec.capacity_bytes or 0) // (managed.effective_shards if managed is not None else 1))


def replication_backlog_bytes(part_bytes: int) -> int:
    """Return how much of what was written a primary keeps for replicas that were away for a moment."""
    return min(max(part_bytes // BACKLOG_DIVISOR, MIN_BACKLOG_BYTES), MAX_BACKLOG_BYTES)


def replication_buffer_bytes(part_bytes: int) -> int:
    """Return how much may wait for a replica that reads slowly or loads; beyond it, it has to load anew."""
    return max(part_bytes // BUFFER_DIVISOR, MIN_BUFFER_BYTES)


def redis_maxmemory_bytes(spec: CacheTierSpec) -> int:
    """Return `maxmemory` of each managed Redis server: its part of the capacity.

    In a cluster the replication backlog comes on top, because it counts; replicas' buffers do not.
    """
    part_bytes = shard_bytes(spec)
    return part_bytes + replication_backlog_bytes(part_bytes) if spec.is_cluster else part_bytes


def redis_memory_limit_bytes(spec: CacheTierSpec) -> int:
    """Return the memory limit of each managed Redis server: a quarter above `maxmemory` for fragmentation and clients,
    and in a cluster what may wait for replicas."""
    maxmemory_bytes = redis_maxmemory_bytes(spec)
    buffer_bytes = replication_buffer_bytes(shard_bytes(spec)) if spec.is_cluster else 0
    return round_up(maxmemory_bytes + maxmemory_bytes // REDIS_MARGIN_DIVISOR + REDIS_MARGIN_BYTES + buffer_bytes)
