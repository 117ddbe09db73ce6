"""Prefix pools in a bundle: the chunks of each version, its keyspace and its readers.

A pool has a shard of its own, in two slots, because it changes apart from tenants and is larger: a version names every
chunk of its prefixes. There are at most two versions: while new content is warmed, readers keep the old. Shards hold
data keys and hashes of cached content, so they are stored in Secrets only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

from kvstrata.contract import ContractError
from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.data_key import BundledKey, check_keys
from kvstrata.contract.policy.keyspace import Keyspace, is_keyspace
from kvstrata.contract.policy.shard_slots import Slot, other_slot
from kvstrata.contract.wire import Base64, Form, Items, Range, decode, digest_bytes, encode, wired

CHUNK_HASH_BYTES = 32
MAX_CHUNKS = 4096
"""Chunks of a version: 1,048,576 tokens in chunks of 256, 128 KiB of hashes."""

MAX_VERSIONS = 2
MAX_POOLS = 32
MAX_ENTRY_POOLS = 64
MAX_POOL_SHARD_BYTES = 384 * 1024
"""Two versions of `MAX_CHUNKS` with room for the rest; only a changed digest makes a pod read it."""

PoolName = Annotated[str, Form("(?s).+", "name")]

MAX_POOL_TIERS = 16
MAX_BEFORE_READY_S = 120
"""Upper bound of the time that a pool keeps a new pod out of service."""


class PoolState(StrEnum):
    WARMING = "Warming"
    PUBLISHED = "Published"


@wired(
    "a pool's version",
    camel=True,
    omit=("keys", "before_ready_s"),
    names={"render_id": "renderID", "before_ready_s": "beforeReadySeconds"},
)
class PoolVersion:
    """One content of a pool: its chunks and where they are kept.

    `hashes` are 32 bytes each, ascending and distinct; `render_id` identifies the arguments of the processes that
    computed them. `tiers` are the CacheTiers that hold the chunks. `before_ready_s` is how long a new pod waits at most
    until its own memory holds the chunks, 0 for not at all. Raises ContractError for an invalid version.
    """

    keyspace: Keyspace
    render_id: str
    state: PoolState
    hashes: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_CHUNKS, 1)] = field(repr=False)
    tiers: Annotated[tuple[PoolName, ...], Items(most=MAX_POOL_TIERS)] = ()
    budgets: tuple[EnforcedBudget, ...] = ()
    keys: tuple[BundledKey, ...] = ()
    before_ready_s: Annotated[int, Range(0, MAX_BEFORE_READY_S)] = 0

    def __post_init__(self) -> None:
        if not is_keyspace(self.keyspace):
            raise ContractError("a pool's version has a malformed keyspace")
        chunk_hashes(self.hashes)
        check_keys(self.keys)

    @property
    def published(self) -> bool:
        return self.state is PoolState.PUBLISHED

    @property
    def chunks(self) -> int:
        return len(self.hashes) // CHUNK_HASH_BYTES

    @property
    def manifest(self) -> str:
        """The digest of its hashes, 64 hexadecimal digits, which names their file."""
        return _digest_of(self.hashes)


@wired("a pool's shard", versioned=True)
class PoolShard:
    pool: PoolName
    uid: str
    versions: tuple[PoolVersion, ...]

    def __post_init__(self) -> None:
        if len(self.versions) > MAX_VERSIONS:
            raise ContractError(f"a pool has more than {MAX_VERSIONS} versions")
        if len({version.keyspace for version in self.versions}) != len(self.versions):
            raise ContractError("two versions of a pool have one keyspace")

    def encode(self) -> bytes:
        """Raises ContractError above `MAX_POOL_SHARD_BYTES`, and for a shard that readers refuse."""
        data = encode(self)
        if len(data) > MAX_POOL_SHARD_BYTES:
            raise ContractError(f"the pool {self.pool} exceeds a bundle shard")
        decode(PoolShard, data)
        return data

    @classmethod
    def decode(cls, data: bytes, expected_digest: str) -> PoolShard:
        """Raises ContractError if the bytes are malformed or do not hash to `expected_digest`."""
        if digest_bytes(data) != expected_digest:
            raise ContractError("a pool's shard does not match the digest in its root")
        return decode(cls, data)


@dataclass(frozen=True, slots=True)
class PoolRef:
    """Where a pool's shard is: its index, which the pool keeps for life, and its slot. `since` is the revision of the
    shard's last change: it is in force once every live pod has acknowledged that revision."""

    index: Annotated[int, Range(0, MAX_POOLS - 1)]
    slot: Slot
    digest: str
    since: int

    @property
    def other_slot(self) -> str:
        return other_slot(self.slot)


@lru_cache(maxsize=2 * MAX_POOLS * MAX_VERSIONS)
def _digest_of(hashes: bytes) -> str:
    """Cached: requested at each revision, and changes only with the content."""
    return digest_bytes(hashes)


def shard_name(root_name: str, index: int, slot: str) -> str:
    return f"{root_name}-p{index}{slot}"


def pack_hashes(hashes: Iterable[bytes]) -> bytes:
    """Return chunk hashes in a version's form: ascending, each once. Raises ContractError for malformed ones."""
    packed = b"".join(sorted(set(hashes)))
    chunk_hashes(packed)
    return packed


def split_hashes(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + CHUNK_HASH_BYTES] for at in range(0, len(packed), CHUNK_HASH_BYTES))


def chunk_hashes(packed: bytes) -> tuple[bytes, ...]:
    """Return the hashes of a manifest, 32 bytes each. Raises ContractError unless they are ascending and in bounds."""
    hashes = split_hashes(packed)
    if not 0 < len(hashes) <= MAX_CHUNKS or len(packed) % CHUNK_HASH_BYTES:
        raise ContractError(f"a pool's manifest has 1 to {MAX_CHUNKS} hashes of {CHUNK_HASH_BYTES} bytes")
    if any(one >= following for one, following in pairwise(hashes)):
        raise ContractError("a pool's manifest is not in order")
    return hashes


def read_manifest(data: bytes, digest: str) -> tuple[bytes, ...]:
    """Raises ContractError if the file does not have that digest."""
    if digest_bytes(data) != digest:
        raise ContractError("a pool's manifest does not match its name")
    return chunk_hashes(data)
