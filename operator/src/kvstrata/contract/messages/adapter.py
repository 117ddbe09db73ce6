"""Messages between gate and policy adapter over the pod's unix socket: one JSON object a line, answered in order.

A request is `{"op":<name>,…}` with the fields of its class (`REQUESTS`). An answer has its fields under a name of its
own, or is `{"error":<why>}`. An adapter that does not know what it is asked answers with `UNKNOWN_QUESTION`.

`apply` comes after the gate wrote policy.json; the adapter answers once it refuses every keyspace outside of that
revision at each socket operation and the I/O that was under way on them has ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from kvstrata.contract import MALFORMED, ContractError
from kvstrata.contract.messages.erase import AdapterErased, AdapterVerified, EraseRequest, VerifyRequest
from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion
from kvstrata.contract.messages.probe import ForgetRequest, Forgotten
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata.contract.wire import Base64, Count, Form, Range, ShortText, Wire, encode_line, from_wire, to_wire

SOCKET_NAME = "adapter.sock"
MAX_LINE_BYTES = 1 << 20
UNKNOWN_QUESTION = "the adapter was asked something that it does not know"
"""The error by which an adapter of an earlier version is known."""

TOKEN_BYTES = 4
"""A token id is an unsigned little-endian integer of 32 bits."""

MAX_HASHED_TOKENS = 131_072
"""How many tokens one question may have: 699 KiB of a line in base64."""

MAX_TIER_USAGE_ROWS = 2048
"""How many scopes in shared tiers a state shows, those with most bytes first."""

MAX_USAGE_ROWS = 4096
"""How many scopes and tiers a state shows, those with most bytes first: an answer has to fit into one line."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    """Enforce this revision, which policy.json holds."""

    revision: int
    term: int


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Say what you hold (`AdapterState`)."""


@dataclass(frozen=True, slots=True)
class MetricsRequest:
    """Give a page in Prometheus' text format (`MetricsPage`)."""


@dataclass(frozen=True, slots=True)
class HashRequest:
    """Name the whole chunks of these tokens, `TOKEN_BYTES` each, as the cache server does (`ChunkHashes`)."""

    tokens: Annotated[bytes, Base64(TOKEN_BYTES, MAX_HASHED_TOKENS)]


Request = (
    ApplyRequest
    | StateRequest
    | MetricsRequest
    | HashRequest
    | PoolQuestion
    | EraseRequest
    | VerifyRequest
    | ForgetRequest
)
REQUESTS: Mapping[str, type[Request]] = {
    "apply": ApplyRequest,
    "state": StateRequest,
    "metrics": MetricsRequest,
    "hash": HashRequest,
    "pool": PoolQuestion,
    "erase": EraseRequest,
    "verify": VerifyRequest,
    "forget": ForgetRequest,
}


@dataclass(frozen=True, slots=True)
class AdapterAck:
    """The adapter enforces `revision` of `term`; `boot` is random for each start of the cache server."""

    WIRE: ClassVar[Wire] = Wire("the adapter's answer", names={"revision": "ack"})

    revision: int
    term: int
    boot: str


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A page of metrics."""

    WIRE: ClassVar[Wire] = Wire("the adapter's answer", names={"page": "metrics"})

    page: str


@dataclass(frozen=True, slots=True)
class ChunkHashes:
    """How the cache server `boot` names chunks: `hashes` are its names of the whole ones, one after the other."""

    WIRE: ClassVar[Wire] = Wire("the adapter's answer", camel=True)

    boot: str
    chunk_tokens: Annotated[int, Range(1, MAX_HASHED_TOKENS)]
    hashes: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_HASHED_TOKENS)]


@dataclass(frozen=True, slots=True)
class TierState:
    """One tier as the adapter sees it.

    `breaker` is closed, open or half-open; `full` is whether the tier refused the newest block for want of memory.
    `encrypted` is whether blocks are encrypted there, and `keyless` how many of the policy's keyspaces it is not used
    for because they have no key. In a cluster `nodes` is how many servers have slots and `nodes_away` how many of them
    are not used now; the breaker is open when all are away. `capacity_bytes` is what all scopes may store there
    together, so that guarantees hold; 0 where nobody bounds it. `settling` is for how many scopes a limit or retention
    that the policy changed is not put through yet. Of a tier of files `used_bytes` is what they take on the disk,
    `recovering` whether they are still being counted, `read_only` whether the file system takes none, and
    `floor_reached` whether they may take less than the capacity because the file system has too little free.
    """

    WIRE: ClassVar[Wire] = Wire("a tier's state")

    name: str
    medium: str
    breaker: str
    detail: str = ""
    stored: int = 0
    loaded: int = 0
    refused: int = 0
    errors: int = 0
    full: bool = False
    encrypted: bool = False
    keyless: int = 0
    nodes: int = 1
    nodes_away: int = 0
    capacity_bytes: int = 0
    settling: int = 0
    used_bytes: int = 0
    read_only: bool = False
    recovering: bool = False
    floor_reached: bool = False


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    """What one scope holds in one tier of this pod, and may hold there; None where the policy sets no bound.

    `scope` is the keyspace's first `SCOPE_DIGITS` digits; an empty one stands for all keyspaces outside of the policy.
    """

    WIRE: ClassVar[Wire] = Wire("the use of a tier", row=True)

    scope: Annotated[str, Form(f"[0-9a-f]{{0,{SCOPE_DIGITS}}}", "scope")]
    tier: ShortText
    used_bytes: Count
    blocks: Count
    limit_bytes: Count | None = None
    guaranteed_bytes: Count | None = None


@dataclass(frozen=True, slots=True)
class AdapterState:
    """What the adapter holds now. `revision` 0 means that it has no policy and answers every lookup with a miss.

    `usage` names the scopes that hold something in the server's own memory, largest first; `usage_left_out` is how many
    did not fit. `tier_usage` is what scopes hold in shared tiers, as this pod's sweeps last saw it: pods share the
    sweeps, so each pod tells of some scopes, and several may tell of the same. `warming` is whether a server that
    started still loads what was used last, and is better not asked yet.
    """

    WIRE: ClassVar[Wire] = Wire("the adapter's answer", camel=True)

    boot: str
    revision: int
    term: int
    fresh: bool
    keyspaces: int
    tiers: tuple[TierState, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    usage: tuple[ScopeUsage, ...] = ()
    usage_left_out: int = 0
    tier_usage: tuple[ScopeUsage, ...] = ()
    warming: bool = False


Answer = (
    AdapterAck | AdapterState | MetricsPage | ChunkHashes | PoolHolding | AdapterErased | AdapterVerified | Forgotten
)
_UNDER: Mapping[type[Any], str] = {
    AdapterState: "state",
    ChunkHashes: "hash",
    PoolHolding: "pool",
    AdapterErased: "erase",
    AdapterVerified: "verify",
    Forgotten: "forgotten",
}
"""The name under which an answer's fields are; without one they are the line's."""

_NAMES = {kind: name for name, kind in REQUESTS.items()}


def encode_request(request: Request) -> bytes:
    """Return the line of a request."""
    return encode_line({"op": _NAMES[type(request)], **to_wire(request)})


def decode_request(line: bytes) -> Request:
    """Read a gate's line. Raises ContractError for anything else than a request."""
    raw = _object(line)
    name = raw.get("op")
    kind = REQUESTS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ContractError(UNKNOWN_QUESTION)
    return from_wire(kind, raw)


def encode_answer(answer: Answer) -> bytes:
    """Return the line of an answer."""
    name = _UNDER.get(type(answer))
    return encode_line({name: to_wire(answer)} if name is not None else to_wire(answer))


def decode_answer(kind: type[T], line: bytes) -> T:
    """Read an adapter's line. Raises ContractError for a refusal, and for anything else than an answer of this kind."""
    raw = _object(line)
    if "error" in raw:
        raise ContractError(f"the adapter refused: {raw['error']}")
    name = _UNDER.get(kind)
    return from_wire(kind, raw if name is None else raw.get(name), "the adapter's answer")


def error_answer(message: str) -> bytes:
    """Return the line that refuses a request."""
    return encode_line({"error": message})


def _object(line: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except MALFORMED as error:
        raise ContractError("a line between gate and adapter is not JSON") from error
    if not isinstance(raw, dict):
        raise ContractError("a line between gate and adapter is not an object")
    return raw
