"""Messages about prefix pools between operator, gates and cache servers.

`POST /v1/render` tokenizes a prefix and names its chunks, by the engine and the cache server of that pod. `POST
/v1/warm` has the engine compute a prefix under the keyspace of a pool's version, which the gate takes from its own
bundle. `GET /v1/pool?uid=<uid>` returns the pod's holdings of a pool (from `PoolQuestion`).

No answer holds text, tokens or a keyspace; hashes of chunks confirm a guess of their text, so they go to the operator
only. Every answer carries the header `Kvstrata-Ack-Token`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from kvstrata.contract import ContractError, Meaningful
from kvstrata.contract.messages.engine_identity import Fingerprint
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.keyspace import Keyspace, ScopeDigits
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, MAX_CHUNKS, split_hashes
from kvstrata.contract.wire import Base64, Boot, Count, HexDigest, Message, ShortText, canonical_json, to_wire, wired

RENDER_PATH = "/v1/render"
WARM_PATH = "/v1/warm"
POOL_PATH = "/v1/pool"
MAX_REQUEST_BYTES = 2 * 1024 * 1024
MAX_ANSWER_BYTES = 512 * 1024
MAX_SOURCE_BYTES = MAX_REQUEST_BYTES - 4096
"""Bytes of a prefix in its wire form; the rest of a request needs the remainder."""

MAX_PREFIX_TOKENS = 131_072
"""Tokens of one prefix: its chunk hashes fit into an answer, and its tokens into a line to the cache server."""

MAX_MISSING = 64


class RenderRefusal(Meaningful):
    """Why no pod can tokenize a prefix, however often it is asked."""

    SOURCE_REFUSED = "SourceRefused", "The gate or the engine refuses it, as for a caller's request."
    DATED = "Dated", "The template inserts today's date."
    CHANGING = "Changing", "Two renderings differ."


@wired("a request to render", versioned=True)
class RenderRequest(Message):
    prefix: PrefixSource

    def encode(self) -> bytes:
        """Raises ContractError for a prefix above `MAX_SOURCE_BYTES`."""
        return _with_prefix(self, self.prefix)


@wired("a rendering", versioned=True, complete=True)
class Rendered(Message):
    """Rendering of a prefix.

    `tokens` counts those that no continuation changes, `total` all tokens of the prefix alone. `hashes` names the whole
    chunks of `chunk_tokens` within `tokens`, 32 bytes each, in order; empty for a prefix that is too long. With
    `refused` nothing else is set. `render_id` identifies the arguments of the processes.
    """

    gate_boot: Boot
    cache_boot: Boot
    render_id: Boot
    tokens: Count = 0
    total: Count = 0
    chunk_tokens: Count = 0
    max_model_tokens: Count = 0
    hashes: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_PREFIX_TOKENS)] = field(default=b"", repr=False)
    refused: RenderRefusal | None = None

    def __post_init__(self) -> None:
        whole = self.tokens // max(1, self.chunk_tokens) * CHUNK_HASH_BYTES
        if self.hashes and (self.refused or not self.chunk_tokens or len(self.hashes) != whole):
            raise ContractError("a rendering has other chunks than tokens")

    @property
    def chunks(self) -> int:
        return len(self.hashes) // CHUNK_HASH_BYTES

    @property
    def too_long(self) -> bool:
        """Whether the engine cannot answer a request that begins with it, or it exceeds the bound of pools."""
        return self.total >= self.max_model_tokens or self.total > MAX_PREFIX_TOKENS


def manifest_hashes(renderings: Sequence[Rendered]) -> bytes:
    """Return the hashes of all prefixes in a version's form: ascending, each once."""
    return b"".join(sorted({chunk for one in renderings for chunk in split_hashes(one.hashes)}))


class WarmOutcome(Meaningful):
    STORED = "Stored", "Every tier holds every chunk of the prefix."
    INCOMPLETE = "Incomplete", "The engine computed it, and some tier lacks a chunk."
    DISAGREE = "Disagree", "This pod's chunks of the prefix are not in the version's manifest."
    MISMATCH = "Mismatch", "A real request begins with other tokens than the rendered prefix."
    NO_VERSION = "NoVersion", "The gate's bundle does not have the version."
    STALE = "Stale", "The pod's policy is stale, or its engine's fingerprint is unresolved, so it uses no keyspace."
    ABORTED = "Aborted", "The version left the policy meanwhile, or the pod drains."
    ENGINE = "Engine", "The engine failed, or refused the request."
    REFUSED = "Refused", "The prefix cannot be rendered any more."


@wired("a request to warm", versioned=True, names={"pool_uid": "pool"})
class WarmRequest(Message):
    """Compute one prefix of a pool's version, which `manifest` and `scope` (its keyspace's first digits) identify. The
    same content may be computed again while readers keep it, so two versions may have one manifest."""

    pool_uid: str
    scope: ScopeDigits
    manifest: str
    prefix: PrefixSource

    def encode(self) -> bytes:
        """Raises ContractError for a prefix above `MAX_SOURCE_BYTES`."""
        return _with_prefix(self, self.prefix)


@wired("the end of a warm-up", versioned=True)
class Warmed(Message):
    gate_boot: str
    cache_boot: str
    outcome: WarmOutcome


@wired("a tier's holdings of a pool", row=True)
class PoolTierState:
    name: ShortText
    stored: Count
    expected: Count
    bytes: Count

    def __post_init__(self) -> None:
        if self.stored > self.expected:
            raise ContractError("a tier holds more chunks of a pool than there are")


@wired("a question about a pool", omit=("hashes", "fingerprint"))
class PoolQuestion:
    """Which of these chunks do tiers hold under a pool's keyspace? `hashes` None means all of the version's. Blocks of
    engines with `fingerprint` count; if it is empty, a chunk counts with those of every registered engine."""

    keyspace: Keyspace
    hashes: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_CHUNKS)] | None = field(default=None, repr=False)
    fingerprint: Fingerprint = ""


@wired("a pod's holdings of a pool")
class PoolHolding:
    """Holdings of the requested chunks in the tiers of the cache server `boot`. `known` is False until such an engine
    has reported the number of parts of a chunk. `missing` are hashes of chunks that a tier lacks, at most
    `MAX_MISSING`."""

    boot: str
    known: bool
    tiers: tuple[PoolTierState, ...] = ()
    missing: tuple[HexDigest, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "missing", self.missing[:MAX_MISSING])

    @property
    def complete(self) -> bool:
        return self.known and bool(self.tiers) and all(0 < tier.expected == tier.stored for tier in self.tiers)


@dataclass(frozen=True, slots=True)
class PoolVersionState:
    """A pod's holdings of a pool's version; fields as in `PoolHolding`."""

    scope: ScopeDigits
    manifest: str
    known: bool
    tiers: tuple[PoolTierState, ...] = ()
    missing: tuple[HexDigest, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "missing", self.missing[:MAX_MISSING])


@wired("a pool's state", versioned=True)
class PoolReport(Message):
    """A pod's report on a pool; no versions if its bundle does not have the pool. It is about blocks with the engine's
    `fingerprint`."""

    gate_boot: str
    cache_boot: str
    versions: tuple[PoolVersionState, ...] = ()
    fingerprint: Fingerprint = ""


def _with_prefix(request: RenderRequest | WarmRequest, prefix: PrefixSource) -> bytes:
    """Write the prefix with its keys in their order, which templates see. Raises ContractError if it is too large."""
    encoded = prefix.encode()
    if len(encoded) > MAX_SOURCE_BYTES:
        raise ContractError(f"a prefix has {len(encoded)} bytes, and no more than {MAX_SOURCE_BYTES} are rendered")
    head = canonical_json({name: value for name, value in to_wire(request).items() if name != "prefix"})
    return b'%s,"prefix":%s}' % (head[:-1], encoded)
