"""What the operator asks gates about prefix pools, at the port on which they tell their state.

`POST /v1/render` makes tokens of one prefix and names its chunks, by the engine and the cache server of that pod.
`POST /v1/warm` has the engine compute one prefix under the keyspace of a pool's version, which the gate takes from its
own bundle. `GET /v1/pool?uid=<uid>` tells what the pod's tiers hold of a pool.

Bodies are JSON. No answer holds text, tokens or a keyspace; hashes of chunks confirm a guess of their text, so they go
to the operator only. Every answer carries the header `Kvstrata-Ack-Token`, as states do.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvstrata.contract import CONTRACT_VERSION, ContractError, contract_errors, require_version
from kvstrata.contract.messages.adapter import SCOPE_DIGITS
from kvstrata.contract.messages.holding import MAX_MISSING as MAX_MISSING
from kvstrata.contract.messages.holding import PoolTierState as PoolTierState
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata.contract.wire import canonical_json

RENDER_PATH = "/v1/render"
WARM_PATH = "/v1/warm"
POOL_PATH = "/v1/pool"
MAX_REQUEST_BYTES = 2 * 1024 * 1024
MAX_ANSWER_BYTES = 512 * 1024
MAX_SOURCE_BYTES = MAX_REQUEST_BYTES - 4096
"""How large a prefix may be in its wire form: what is left of a request for everything else."""

MAX_PREFIX_TOKENS = 131_072
"""Tokens of one prefix: its chunks' names still fit into an answer, and its tokens into a line to the cache server."""

_MOST = 1 << 62
_SCOPE = re.compile(rf"[0-9a-f]{{{SCOPE_DIGITS}}}")


class RenderRefusal(StrEnum):
    """Why a pod makes no tokens of a prefix, whoever asks again."""

    SOURCE_REFUSED = "SourceRefused"
    """The gate or the engine refuses it, as they would refuse a caller's."""

    DATED = "Dated"
    """The template writes today's date into it."""

    CHANGING = "Changing"
    """Rendered twice it is two."""


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """Name the chunks of a prefix."""

    prefix: PrefixSource

    def encode(self) -> bytes:
        """Return the body. Raises ContractError for a prefix above `MAX_SOURCE_BYTES`."""
        return b'{"contract":%d,"prefix":%s}' % (CONTRACT_VERSION, _bounded(self.prefix))

    @classmethod
    def decode(cls, data: bytes) -> RenderRequest:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("a request to render"):
            raw = json.loads(data)
            require_version(raw, "a request to render")
            return cls(PrefixSource.from_json(raw["prefix"]))


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a pod made of a prefix.

    `tokens` are those that no continuation changes, `total` all that the prefix comes to by itself. A chunk has
    `chunk_tokens`; `hashes` are those of the whole ones within `tokens`, 32 bytes each, in the prefix's order: none of
    a prefix that is too long. The engine takes requests of `max_model_tokens`. With `refused` there is nothing else.
    `gate_boot` and `cache_boot` name the processes that say so, `render_id` what they were started with.
    """

    gate_boot: str
    cache_boot: str
    render_id: str
    tokens: int = 0
    total: int = 0
    chunk_tokens: int = 0
    max_model_tokens: int = 0
    hashes: bytes = field(default=b"", repr=False)
    refused: RenderRefusal | None = None

    @property
    def chunks(self) -> int:
        """How many whole chunks there are."""
        return len(self.hashes) // CHUNK_HASH_BYTES

    @property
    def too_long(self) -> bool:
        """Whether the engine could not answer a request that begins so, or the prefix exceeds any pool's."""
        return self.total >= self.max_model_tokens or self.total > MAX_PREFIX_TOKENS

    def encode(self) -> bytes:
        """Return the body."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        hashes = base64.b64encode(self.hashes).decode()
        return canonical_json({"contract": CONTRACT_VERSION, **fields, "hashes": hashes})

    @classmethod
    def decode(cls, data: bytes) -> Rendered:
        """Read the body. Raises ContractError for anything malformed, of an unknown version, or without sense."""
        with contract_errors("a rendering"):
            raw = json.loads(data)
            require_version(raw, "a rendering")
            texts = {name: raw[name] for name in ("gate_boot", "cache_boot", "render_id")}
            figures = {name: raw[name] for name in ("tokens", "total", "chunk_tokens", "max_model_tokens")}
            if not all(isinstance(text, str) and len(text) <= 128 and text.isprintable() for text in texts.values()):
                raise ContractError("a rendering does not say whose it is")
            if not all(type(figure) is int and 0 <= figure <= _MOST for figure in figures.values()):
                raise ContractError("a rendering has a figure that is none")
            hashes = base64.b64decode(raw["hashes"], validate=True)
            refused = RenderRefusal(raw["refused"]) if raw["refused"] is not None else None
            said = cls(**texts, **figures, hashes=hashes, refused=refused)
            whole = said.tokens // max(1, said.chunk_tokens) * CHUNK_HASH_BYTES
            if hashes and (refused or not said.chunk_tokens or len(hashes) != whole):
                raise ContractError("a rendering has other chunks than tokens")
            return said


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
class WarmRequest:
    """Compute one prefix of the version of a pool that has this manifest, and whose keyspace begins with `scope`.

    The same content may be computed anew while readers keep it, so two versions may have one manifest.
    """

    pool_uid: str
    scope: str
    manifest: str
    prefix: PrefixSource

    def encode(self) -> bytes:
        """Return the body. Raises ContractError for a prefix above `MAX_SOURCE_BYTES`."""
        names = {"pool": self.pool_uid, "scope": self.scope, "manifest": self.manifest}
        head = canonical_json({"contract": CONTRACT_VERSION, **names})
        return b'%s,"prefix":%s}' % (head[:-1], _bounded(self.prefix))

    @classmethod
    def decode(cls, data: bytes) -> WarmRequest:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("a request to warm"):
            raw = json.loads(data)
            require_version(raw, "a request to warm")
            if not (isinstance(raw["pool"], str) and isinstance(raw["manifest"], str)):
                raise ContractError("a request to warm names no pool")
            return cls(raw["pool"], _scope(raw["scope"]), raw["manifest"], PrefixSource.from_json(raw["prefix"]))


@dataclass(frozen=True, slots=True)
class Warmed:
    """What became of a request to warm, in the processes that these boots name."""

    gate_boot: str
    cache_boot: str
    outcome: WarmOutcome

    def encode(self) -> bytes:
        """Return the body."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return canonical_json({"contract": CONTRACT_VERSION, **fields})

    @classmethod
    def decode(cls, data: bytes) -> Warmed:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("the end of a warm-up"):
            raw = json.loads(data)
            require_version(raw, "the end of a warm-up")
            return cls(str(raw["gate_boot"]), str(raw["cache_boot"]), WarmOutcome(raw["outcome"]))


@dataclass(frozen=True, slots=True)
class PoolVersionState:
    """What a pod's tiers hold of the version of a pool with this manifest, whose keyspace begins with `scope`.

    `known` is whether the cache server can tell: it cannot before an engine told it how its blocks look. `missing` are
    chunks that a tier lacks, `MAX_MISSING` at most, as hexadecimal hashes.
    """

    scope: str
    manifest: str
    known: bool
    tiers: tuple[PoolTierState, ...] = ()
    missing: tuple[str, ...] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form."""
        return {
            "scope": self.scope,
            "manifest": self.manifest,
            "known": self.known,
            "tiers": [tier.to_json() for tier in self.tiers],
            "missing": list(self.missing[:MAX_MISSING]),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PoolVersionState:
        """Read the wire form. Raises ContractError for anything malformed."""
        with contract_errors("a pool's state"):
            missing = tuple(raw["missing"])[:MAX_MISSING]
            if not isinstance(raw["manifest"], str) or type(raw["known"]) is not bool:
                raise ContractError("a pool's state does not say of which version it is")
            if not all(len(bytes.fromhex(one)) == CHUNK_HASH_BYTES for one in missing):
                raise ContractError("a pool's state names chunks that are none")
            tiers = tuple(PoolTierState.from_json(tier) for tier in raw["tiers"])
            return cls(_scope(raw["scope"]), raw["manifest"], raw["known"], tiers, missing)


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What a pod says of a pool, version by version; none of a pool that its bundle does not have."""

    gate_boot: str
    cache_boot: str
    versions: tuple[PoolVersionState, ...] = ()

    def encode(self) -> bytes:
        """Return the body."""
        versions = [version.to_json() for version in self.versions]
        boots = {"gate_boot": self.gate_boot, "cache_boot": self.cache_boot}
        return canonical_json({"contract": CONTRACT_VERSION, **boots, "versions": versions})

    @classmethod
    def decode(cls, data: bytes) -> PoolReport:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("a pool's state"):
            raw = json.loads(data)
            require_version(raw, "a pool's state")
            versions = tuple(PoolVersionState.from_json(version) for version in raw["versions"])
            return cls(str(raw["gate_boot"]), str(raw["cache_boot"]), versions)


def _scope(raw: Any) -> str:
    if not isinstance(raw, str) or _SCOPE.fullmatch(raw) is None:
        raise ContractError("a pool's version is named by something else than the digits of its scope")
    return raw


def _bounded(prefix: PrefixSource) -> bytes:
    encoded = prefix.encode()
    if len(encoded) > MAX_SOURCE_BYTES:
        raise ContractError(f"a prefix has {len(encoded)} bytes, and no more than {MAX_SOURCE_BYTES} are rendered")
    return encoded
