"""What operator, gates and cache servers say to one another about prefix pools.

`POST /v1/render` makes tokens of one prefix and names its chunks, by the engine and the cache server of that pod.
`POST /v1/warm` has the engine compute one prefix under the keyspace of a pool's version, which the gate takes from its
own bundle. `GET /v1/pool?uid=<uid>` tells what the pod's tiers hold of a pool; the gate asks its cache server for that
(`PoolQuestion`).

Bodies are JSON. No answer holds text, tokens or a keyspace; hashes of chunks confirm a guess of their text, so they go
to the operator only. Every answer carries the header `Kvstrata-Ack-Token`, as states do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from kvstrata.contract import ContractError
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.keyspace import Keyspace, ScopeDigits
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, MAX_CHUNKS
from kvstrata.contract.wire import (
    Base64,
    Count,
    HexDigest,
    Message,
    Printable,
    ShortText,
    Wire,
    canonical_json,
    to_wire,
)

RENDER_PATH = "/v1/render"
WARM_PATH = "/v1/warm"
POOL_PATH = "/v1/pool"
MAX_REQUEST_BYTES = 2 * 1024 * 1024
MAX_ANSWER_BYTES = 512 * 1024
MAX_SOURCE_BYTES = MAX_REQUEST_BYTES - 4096
"""How large a prefix may be in its wire form: what is left of a request for everything else."""

MAX_PREFIX_TOKENS = 131_072
"""Tokens of one prefix: its chunks' names still fit into an answer, and its tokens into a line to the cache server."""

MAX_MISSING = 64
"""How many missing chunks an answer names."""

_Boot = Annotated[str, Printable(128)]


class RenderRefusal(StrEnum):
    """Why a pod makes no tokens of a prefix, whoever asks again."""

    SOURCE_REFUSED = "SourceRefused"
    """The gate or the engine refuses it, as they would refuse a caller's."""

    DATED = "Dated"
    """The template writes today's date into it."""

    CHANGING = "Changing"
    """Rendered twice it is two."""


@dataclass(frozen=True, slots=True)
class RenderRequest(Message):
    """Name the chunks of a prefix."""

    WIRE: ClassVar[Wire] = Wire("a request to render", versioned=True)

    prefix: PrefixSource

    def encode(self) -> bytes:
        """Return the body. Raises ContractError for a prefix above `MAX_SOURCE_BYTES`."""
        return _with_prefix(self, self.prefix)


@dataclass(frozen=True, slots=True)
class Rendered(Message):
    """What a pod made of a prefix.

    `tokens` are those that no continuation changes, `total` all that the prefix comes to by itself. A chunk has
    `chunk_tokens`; `hashes` are those of the whole ones within `tokens`, 32 bytes each, in the prefix's order: none of
    a prefix that is too long. The engine takes requests of `max_model_tokens`. With `refused` there is nothing else.
    `gate_boot` and `cache_boot` name the processes that say so, `render_id` what they were started with.
    """

    WIRE: ClassVar[Wire] = Wire("a rendering", versioned=True, complete=True)

    gate_boot: _Boot
    cache_boot: _Boot
    render_id: _Boot
    tokens: Count = 0
    total: Count = 0
    chunk_tokens: Count = 0
    max_model_tokens: Count = 0
    hashes: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_PREFIX_TOKENS)] = field(default=b"", repr=False)
    refused: RenderRefusal | None = None

    def __post_init__(self) -> None:
        """Raise ContractError for other chunks than tokens."""
        whole = self.tokens // max(1, self.chunk_tokens) * CHUNK_HASH_BYTES
        if self.hashes and (self.refused or not self.chunk_tokens or len(self.hashes) != whole):
            raise ContractError("a rendering has other chunks than tokens")

    @property
    def chunks(self) -> int:
        """How many whole chunks there are."""
        return len(self.hashes) // CHUNK_HASH_BYTES

    @property
    def too_long(self) -> bool:
        """Whether the engine could not answer a request that begins so, or the prefix exceeds any pool's."""
        return self.total >= self.max_model_tokens or self.total > MAX_PREFIX_TOKENS


def manifest_hashes(renderings: Sequence[Rendered]) -> bytes:
    """Return the hashes of all prefixes as a version holds them: ascending, each once."""
    size = CHUNK_HASH_BYTES
    found = {one.hashes[at : at + size] for one in renderings for at in range(0, len(one.hashes), size)}
    return b"".join(sorted(found))


class WarmOutcome(StrEnum):
    """What became of a request to warm."""

    STORED = "Stored"
    """Every tier holds every chunk of the prefix."""

    INCOMPLETE = "Incomplete"
    """The engine computed it, and some tier does not hold all of it."""

    DISAGREE = "Disagree"
    """This pod's chunks of the prefix are not in the version's manifest."""

    MISMATCH = "Mismatch"
    """A real request begins with other tokens than the prefix came to."""

    NO_VERSION = "NoVersion"
    """The pod's bundle has no such version."""

    STALE = "Stale"
    """The pod's policy is stale, so it uses no keyspace."""

    ABORTED = "Aborted"
    """The version left the policy meanwhile, or the pod drains."""

    ENGINE = "Engine"
    """The engine failed, or refused the request."""

    REFUSED = "Refused"
    """The prefix cannot be rendered any more."""


@dataclass(frozen=True, slots=True)
class WarmRequest(Message):
    """Compute one prefix of the version of a pool that has this manifest, and whose keyspace begins with `scope`.

    The same content may be computed anew while readers keep it, so two versions may have one manifest.
    """

    WIRE: ClassVar[Wire] = Wire("a request to warm", versioned=True, names={"pool_uid": "pool"})

    pool_uid: str
    scope: ScopeDigits
    manifest: str
    prefix: PrefixSource

    def encode(self) -> bytes:
        """Return the body. Raises ContractError for a prefix above `MAX_SOURCE_BYTES`."""
        return _with_prefix(self, self.prefix)


@dataclass(frozen=True, slots=True)
class Warmed(Message):
    """What became of a request to warm, in the processes that these boots name."""

    WIRE: ClassVar[Wire] = Wire("the end of a warm-up", versioned=True)

    gate_boot: str
    cache_boot: str
    outcome: WarmOutcome


@dataclass(frozen=True, slots=True)
class PoolTierState:
    """How much of a pool's version one tier of a pod holds: chunks and their bytes."""

    WIRE: ClassVar[Wire] = Wire("what a tier holds of a pool", row=True)

    name: ShortText
    stored: Count
    expected: Count
    bytes: Count

    def __post_init__(self) -> None:
        """Raise ContractError for more chunks than there are."""
        if self.stored > self.expected:
            raise ContractError("a tier holds more chunks of a pool than there are")


@dataclass(frozen=True, slots=True)
class PoolQuestion:
    """Which of these chunks do tiers hold under a pool's keyspace? `hashes` None asks for all of the version's."""

    WIRE: ClassVar[Wire] = Wire("a question about a pool", omit=("hashes",))

    keyspace: Keyspace
    hashes: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_CHUNKS)] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class PoolHolding:
    """What the tiers behind the cache server `boot` hold of what was asked for.

    `known` is whether that can be told: not before an engine said of how many parts a chunk is made. `missing` are
    chunks that a tier lacks, `MAX_MISSING` at most, as hexadecimal hashes.
    """

    WIRE: ClassVar[Wire] = Wire("what a pod holds of a pool")

    boot: str
    known: bool
    tiers: tuple[PoolTierState, ...] = ()
    missing: tuple[HexDigest, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Name no more missing chunks than an answer has room for."""
        object.__setattr__(self, "missing", self.missing[:MAX_MISSING])

    @property
    def complete(self) -> bool:
        """Whether every tier holds every chunk. Of chunks that the cache server does not know, none is there."""
        return self.known and bool(self.tiers) and all(0 < tier.expected == tier.stored for tier in self.tiers)


@dataclass(frozen=True, slots=True)
class PoolVersionState:
    """What a pod's tiers hold of the version of a pool with this manifest, whose keyspace begins with `scope`.

    `known` is whether the cache server can tell: it cannot before an engine told it how its blocks look. `missing` are
    chunks that a tier lacks, `MAX_MISSING` at most, as hexadecimal hashes.
    """

    scope: ScopeDigits
    manifest: str
    known: bool
    tiers: tuple[PoolTierState, ...] = ()
    missing: tuple[HexDigest, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Name no more missing chunks than an answer has room for."""
        object.__setattr__(self, "missing", self.missing[:MAX_MISSING])


@dataclass(frozen=True, slots=True)
class PoolReport(Message):
    """What a pod says of a pool, version by version; none of a pool that its bundle does not have."""

    WIRE: ClassVar[Wire] = Wire("a pool's state", versioned=True)

    gate_boot: str
    cache_boot: str
    versions: tuple[PoolVersionState, ...] = ()


def _with_prefix(request: RenderRequest | WarmRequest, prefix: PrefixSource) -> bytes:
    """Return a body in which the prefix has the order of keys that a template sees. Raises ContractError if it is too
    large."""
    encoded = prefix.encode()
    if len(encoded) > MAX_SOURCE_BYTES:
        raise ContractError(f"a prefix has {len(encoded)} bytes, and no more than {MAX_SOURCE_BYTES} are rendered")
    head = canonical_json({name: value for name, value in to_wire(request).items() if name != "prefix"})
    return b'%s,"prefix":%s}' % (head[:-1], encoded)
