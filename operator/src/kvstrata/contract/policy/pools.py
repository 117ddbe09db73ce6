"""Prefix pools in a bundle: which chunks each version of a pool consists of, under which keyspace, and who reads it.

A pool has a shard of its own, in two slots as every shard, because it changes apart from tenants and is larger: a
version names every chunk of its prefixes. At most two versions stand beside each other: while new content is warmed,
readers keep the old. Shards hold data keys and the hashes of what they cache, so they belong into Secrets only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, ClassVar

from kvstrata.contract import ContractError
from kvstrata.contract.policy.budget import TierBudget
from kvstrata.contract.policy.data_key import BundledKey, check_keys
from kvstrata.contract.policy.keyspace import Keyspace, is_keyspace
from kvstrata.contract.policy.shard_slots import Slot, other_slot
from kvstrata.contract.wire import Base64, Form, Items, Range, Wire, decode, digest_bytes, encode

CHUNK_HASH_BYTES = 32
MAX_CHUNKS = 4096
"""Chunks of a version: 1,048,576 tokens in chunks of 256, 128 KiB of hashes."""

MAX_VERSIONS = 2
MAX_POOLS = 32
"""Pools of one model."""

MAX_ENTRY_POOLS = 64
MAX_POOL_SHARD_BYTES = 384 * 1024
"""Two versions of `MAX_CHUNKS` with room for the rest; only a changed digest makes a pod read it."""

PoolName = Annotated[str, Form("(?s).+", "name")]

MAX_POOL_TIERS = 16
MAX_BEFORE_READY_S = 120
"""However long warming may take, a pool never keeps a pod out of service for longer."""


class PoolState(StrEnum):
    """Whether a version may be read."""

    WARMING = "Warming"
    PUBLISHED = "Published"


@dataclass(frozen=True, slots=True)
class PoolVersion:
    """One content of a pool: its chunks and where they are kept.

    `hashes` are the chunks' hashes, 32 bytes each, ascending and without a repetition; `render_id` names what computed
    them. `tiers` are the CacheTiers that hold the chunks. `budgets` and `keys` mean what they mean for tenants.
    `before_ready_s` is how long a new pod waits at most until its own memory holds the chunks, 0 for not at all.
    Raises ContractError for what no version can be.
    """

    WIRE: ClassVar[Wire] = Wire(
        "a pool's version",
        camel=True,
        omit=("keys", "before_ready_s"),
        names={"render_id": "renderID", "before_ready_s": "beforeReadySeconds"},
    )

    keyspace: Keyspace
    render_id: str
    state: PoolState
    hashes: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_CHUNKS, 1)] = field(repr=False)
    tiers: Annotated[tuple[PoolName, ...], Items(most=MAX_POOL_TIERS)] = ()
    budgets: tuple[TierBudget, ...] = ()
    keys: tuple[BundledKey, ...] = ()
    before_ready_s: Annotated[int, Range(0, MAX_BEFORE_READY_S)] = 0

    def __post_init__(self) -> None:
        """Raise ContractError for a version that cannot be one."""
        if not is_keyspace(self.keyspace):
            raise ContractError("a pool's version has a malformed keyspace")
        chunk_hashes(self.hashes)
        check_keys(self.keys)

    @property
    def published(self) -> bool:
        """Whether readers may be given its chunks."""
        return self.state is PoolState.PUBLISHED

    @property
    def chunks(self) -> int:
        """How many chunks it has."""
        return len(self.hashes) // CHUNK_HASH_BYTES

    @property
    def manifest(self) -> str:
        """The digest of its hashes, 64 hexadecimal digits: what a file of them is named by."""
        return _digest_of(self.hashes)


@dataclass(frozen=True, slots=True)
class PoolShard:
    """What a bundle says of one pool. The first version is asked first; two have different keyspaces."""

    WIRE: ClassVar[Wire] = Wire("a pool's shard", versioned=True)

    pool: PoolName
    uid: str
    versions: tuple[PoolVersion, ...]

    def __post_init__(self) -> None:
        """Raise ContractError for too many versions, or two in one keyspace."""
        if len(self.versions) > MAX_VERSIONS:
            raise ContractError(f"a pool has more than {MAX_VERSIONS} versions")
        if len({version.keyspace for version in self.versions}) != len(self.versions):
            raise ContractError("two versions of a pool have one keyspace")

    def encode(self) -> bytes:
        """Return the stored form. Raises ContractError above `MAX_POOL_SHARD_BYTES`, and for what no reader takes."""
        data = encode(self)
        if len(data) > MAX_POOL_SHARD_BYTES:
            raise ContractError(f"the pool {self.pool} exceeds a bundle shard")
        decode(PoolShard, data)
        return data

    @classmethod
    def decode(cls, data: bytes, expected_digest: str) -> PoolShard:
        """Read the stored form. Raises ContractError if the bytes do not hash to `expected_digest`, or are none."""
        if digest_bytes(data) != expected_digest:
            raise ContractError("a pool's shard does not match the digest in its root")
        return decode(cls, data)


@dataclass(frozen=True, slots=True)
class PoolRef:
    """Where a pool's shard is: its index, which the pool keeps for life, its slot, and what it must hash to.

    `since` is the revision in which the shard last changed: it is in force once every live pod acknowledged that one.
    """

    index: Annotated[int, Range(0, MAX_POOLS - 1)]
    slot: Slot
    digest: str
    since: int

    @property
    def other_slot(self) -> str:
        """The slot that a writer may fill while readers use this one."""
        return other_slot(self.slot)


@lru_cache(maxsize=2 * MAX_POOLS * MAX_VERSIONS)
def _digest_of(hashes: bytes) -> str:
    """Return a manifest's digest; it is asked for at each revision, and changes with the content alone."""
    return digest_bytes(hashes)


def shard_name(root_name: str, index: int, slot: str) -> str:
    """Return the name of the Secret that holds a pool's shard."""
    return f"{root_name}-p{index}{slot}"


def pack_hashes(hashes: Iterable[bytes]) -> bytes:
    """Return chunk hashes as a version holds them: ascending, each once. Raises ContractError for what are none."""
    packed = b"".join(sorted(set(hashes)))
    chunk_hashes(packed)
    return packed


def chunk_hashes(packed: bytes) -> tuple[bytes, ...]:
    """Return the hashes of a manifest, 32 bytes each. Raises ContractError unless they are ascending and in bounds."""
    size = CHUNK_HASH_BYTES
    hashes = tuple(packed[start : start + size] for start in range(0, len(packed), size))
    if not 0 < len(hashes) <= MAX_CHUNKS or len(packed) % size:
        raise ContractError(f"a pool's manifest has 1 to {MAX_CHUNKS} hashes of {size} bytes")
    if any(one >= following for one, following in pairwise(hashes)):
        raise ContractError("a pool's manifest is not in order")
    return hashes


def read_manifest(data: bytes, digest: str) -> tuple[bytes, ...]:
    """Return the hashes that a manifest's file holds. Raises ContractError if it is not the one of that digest."""
    if digest_bytes(data) != digest:
        raise ContractError("a pool's manifest does not match its name")
    return chunk_hashes(data)
