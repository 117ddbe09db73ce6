"""Memory of volumes and containers.

Pages of a memory-backed volume are charged to the container that touches them first, and both engine and cache server
write blocks: so the CPU tier's memory counts in the limits of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.api.cachedmodel import DEFAULT_BODY_BYTES, DEFAULT_CONNECTIONS, CachedModel
from kvstrata.api.cachetier import LEAST_CAPACITY, CacheTier, CacheTierSpec, Medium
from kvstrata.api.scalars import Quantity
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, MAX_CHUNKS, MAX_POOLS, MAX_VERSIONS

from .quantities import GIB, MIB, round_up

DEFAULT_TIER_BYTES, DEFAULT_TIER_DIVISOR = GIB, 4

STAGING_BYTES = 512 * MIB
"""Memory of the cache server without a CPU tier: blocks pass through it to slower tiers."""

SHARED_MEMORY_MARGIN_BYTES = 512 * MIB
SHARED_MEMORY_PER_RANK_BYTES = GIB
"""With several ranks, NCCL and the engine's message queues use /dev/shm too."""

CACHE_BASE_REQUEST_BYTES = 512 * MIB
CACHE_BASE_LIMIT_BYTES = 1536 * MIB
POLICY_VOLUME_BYTES = 64 * MIB
POLICY_VOLUME_STEP = 4
KEYS_OF_A_SHARD_BYTES = MIB
"""Data key files of a full bundle shard: some 220, one page of memory each."""

MANIFESTS_BYTES = 2 * MAX_POOLS * MAX_VERSIONS * MAX_CHUNKS * CHUNK_HASH_BYTES
"""Manifests of all possible pools of a model, and of those that they replace."""

GATE_REQUEST_BYTES = 96 * MIB
GATE_LIMIT_BYTES = 448 * MIB
PARSED_BODY_FACTOR, CONNECTION_BYTES = 28, 64 * 1024
"""Memory of the gate for a byte of its largest body, which two processes parse at a time, and for a connection."""

REDIS_MARGIN_BYTES = 64 * MIB
REDIS_MARGIN_DIVISOR = 4

BACKLOG_DIVISOR, MIN_BACKLOG_BYTES, MAX_BACKLOG_BYTES = 32, MIB, 256 * MIB
BUFFER_DIVISOR, MIN_BUFFER_BYTES = 8, 64 * MIB


def policy_volume_bytes(shard_count: int) -> int:
    """Return the size limit of the volume with policy, pool manifests and data key files (one per scope once a tier
    encrypts).

    Another limit restarts pods, so it follows the number of the bundle's shards, which never shrinks, in steps of four,
    with room for twice the keys at each step; not the tiers, which come and go.
    """
    size = POLICY_VOLUME_BYTES
    while size < (shard_count + 1) * KEYS_OF_A_SHARD_BYTES + MANIFESTS_BYTES:
        size *= POLICY_VOLUME_STEP
    return size


def gate_limit_bytes(model: CachedModel, shard_count: int) -> int:
    """Return the gate's memory limit: its writes to the policy volume are charged to it."""
    limits = model.spec.gate.limits
    bodies = PARSED_BODY_FACTOR * max(0, limits.max_body_bytes - DEFAULT_BODY_BYTES)
    connections = CONNECTION_BYTES * max(0, limits.max_connections - DEFAULT_CONNECTIONS)
    return round_up(GATE_LIMIT_BYTES + bodies + connections) + policy_volume_bytes(shard_count) - POLICY_VOLUME_BYTES


def l1_bytes(tiers: Sequence[CacheTier]) -> int:
    return sum(tier.spec.capacity_bytes for tier in tiers if tier.spec.medium is Medium.CPU) or STAGING_BYTES


def default_tier_bytes(model: CachedModel) -> int:
    """Return the size of the CPU tier of a model that names none; it comes on top of the engine's limit."""
    chosen = model.spec.engine.resources
    limit = chosen.limits.get("memory") if chosen is not None else None
    if limit is None:
        return DEFAULT_TIER_BYTES
    return max(limit.in_bytes // DEFAULT_TIER_DIVISOR // MIB * MIB, Quantity(LEAST_CAPACITY).in_bytes)


def stored_bytes(spec: CacheTierSpec) -> int:
    """Return the bytes that all blocks of a tier may take, per pod or in all of Redis. Guarantees add up to this at
    most."""
    return spec.capacity_bytes * spec.high_watermark_percent // 100


def shared_memory_bytes(model: CachedModel, tiers: Sequence[CacheTier]) -> int:
    ranks = model.spec.engine.tensor_parallel_size
    size = SHARED_MEMORY_MARGIN_BYTES + (ranks * SHARED_MEMORY_PER_RANK_BYTES if ranks > 1 else 0)
    return round_up(size + l1_bytes(tiers))


def shard_bytes(spec: CacheTierSpec) -> int:
    """Return the capacity of one shard of a managed Redis tier."""
    return -(-spec.capacity_bytes // (spec.managed.shards if spec.managed is not None else 1))


def replication_backlog_bytes(part_bytes: int) -> int:
    """Return the size of the backlog that a primary keeps for briefly disconnected replicas."""
    return min(max(part_bytes // BACKLOG_DIVISOR, MIN_BACKLOG_BYTES), MAX_BACKLOG_BYTES)


def replication_buffer_bytes(part_bytes: int) -> int:
    """Return the output buffer of a slow or loading replica; beyond it, the replica reloads."""
    return max(part_bytes // BUFFER_DIVISOR, MIN_BUFFER_BYTES)


def redis_maxmemory_bytes(spec: CacheTierSpec) -> int:
    """Return `maxmemory` of each managed Redis server. Beside others it includes the replication backlog, which Redis
    counts and a lone primary does not have; replicas' buffers are not counted."""
    part_bytes = shard_bytes(spec)
    return part_bytes + replication_backlog_bytes(part_bytes) if spec.has_several_primaries else part_bytes


def redis_memory_limit_bytes(spec: CacheTierSpec) -> int:
    """Return the memory limit of a managed Redis server: `maxmemory` plus a quarter for fragmentation and clients, and
    beside other primaries the replicas' buffers."""
    maxmemory_bytes = redis_maxmemory_bytes(spec)
    buffer_bytes = replication_buffer_bytes(shard_bytes(spec)) if spec.has_several_primaries else 0
    return round_up(maxmemory_bytes + maxmemory_bytes // REDIS_MARGIN_DIVISOR + REDIS_MARGIN_BYTES + buffer_bytes)
