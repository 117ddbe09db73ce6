"""Messages between gate and policy adapter over the pod's unix socket: one JSON object a line, answered in order.

A request is `{"op":<name>,…}` with the fields of its class (`REQUESTS`). An answer has its fields under a name of its
own, or is `{"error":<why>}`; an unknown request has such an answer.

`apply` comes after the gate wrote policy.json. The adapter answers once it refuses every keyspace outside of that
revision and I/O that was under way on them has ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from kvstrata.contract import MALFORMED, ContractError
from kvstrata.contract.messages.engine_identity import Fingerprint
from kvstrata.contract.messages.erase import AdapterErased, AdapterVerified, EraseRequest, VerifyRequest
from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion
from kvstrata.contract.messages.probe import ForgetRequest, Forgotten
from kvstrata.contract.policy.keyspace import AnyScope
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata.contract.wire import Base64, Count, Positive, Range, ShortText, encode_line, from_wire, to_wire, wired

SOCKET_NAME = "adapter.sock"
MAX_LINE_BYTES = 1 << 20
TOKEN_BYTES = 4
"""A token id is an unsigned little-endian integer of 32 bits."""

MAX_HASHED_TOKENS = 131_072

MAX_TIER_USAGE_ROWS = 2048
"""Scopes in shared tiers in a state, those with most bytes first."""

MAX_USAGE_ROWS = 4096
"""Pairs of scope and tier in a state, those with most bytes first: an answer has to fit into one line."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    """Enforce this revision, which is in policy.json. Answered with `AdapterAck`."""

    revision: int
    term: int


@wired("a cost of prefill", row=True)
class PrefillCost:
    """Duration of the engine's prefill for each token of prompts of up to `tokens`, as the gate measured it."""

    tokens: Positive
    ns_per_token: Positive


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Answered with `AdapterState`. `prefill` has the lengths that were measured."""

    prefill: tuple[PrefillCost, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricsRequest:
    """Answered with `MetricsPage`, in Prometheus' text format."""


@dataclass(frozen=True, slots=True)
class HashRequest:
    """Return the hashes of the whole chunks of these tokens, `TOKEN_BYTES` each, as the cache server names them."""

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


@wired("the adapter's answer", names={"revision": "ack"})
class AdapterAck:
    """The adapter enforces `revision` of `term`; `boot` is random for each start of the cache server."""

    revision: int
    term: int
    boot: str


@wired("the adapter's answer", names={"page": "metrics"})
class MetricsPage:
    page: str


@wired("the adapter's answer", camel=True)
class ChunkHashes:
    """`hashes` are the cache server's names of the whole chunks, one after the other."""

    boot: str
    chunk_tokens: Annotated[int, Range(1, MAX_HASHED_TOKENS)]
    hashes: Annotated[bytes, Base64(CHUNK_HASH_BYTES, MAX_HASHED_TOKENS)]


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Loads of a tier's hits against their prefill, since the start of the cache server.

    `restored` counts loads, `declined` lookups whose hits were not loaded because that takes longer than prefill, or
    only in part, to measure the tier again, `given_up` loads that took too long. `saved_ms` is the prefill of loaded
    hits, less the duration of their loads; `avoided_ms` the estimated loads of declined hits, less their prefill;
    `lost_ms` the duration of loads beyond the prefill that they saved. Speeds are the last estimates, for as many
    tokens as the last load had; `prefill_tokens_per_s` is 0 while it is unknown.
    """

    restored: Count
    declined: Count
    given_up: Count
    saved_ms: Count
    avoided_ms: Count
    lost_ms: Count
    bytes_per_s: Count
    tokens_per_s: Count
    prefill_tokens_per_s: Count


@wired("a tier's state")
class TierState:
    """One tier as the adapter sees it.

    `breaker` is closed, open or half-open; `full`: the tier refused the newest block for want of memory. `keyless`
    counts keyspaces of the policy for which the tier is not used because they have no key. In a cluster `nodes` counts
    servers with slots and `nodes_away` those that are not used now; the breaker is open when all are away.
    `capacity_bytes` bounds the blocks of all scopes there together, 0 for no bound. `settling` counts scopes whose
    changed limit or retention is not applied yet. For a tier of files `used_bytes` is its use of the disk,
    `recovering`: files are still being counted, `floor_reached`: the file system has too little free space for the
    capacity. `restore` is None until a load was measured; `declining`: most hits of late were declined.
    """

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
    restore: RestoreState | None = None
    declining: bool = False


@wired("the use of a tier", row=True)
class ScopeUsage:
    """Usage of one scope in one tier of this pod; None where the policy sets no bound. `scope` is the keyspace's
    first `SCOPE_DIGITS` digits, empty for all keyspaces outside of the policy."""

    scope: AnyScope
    tier: ShortText
    used_bytes: Count
    blocks: Count
    limit_bytes: Count | None = None
    guaranteed_bytes: Count | None = None


@wired("the adapter's answer", camel=True)
class AdapterState:
    """The adapter's present state. `revision` 0: it has no policy and answers every lookup with a miss.

    `usage` lists scopes in the server's own memory, largest first; `usage_left_out` counts those that did not fit.
    `tier_usage` lists scopes in shared tiers, as this pod's sweeps last saw them: pods share the sweeps, so each
    reports some scopes, and several may report the same. `ungoverned`: why LMCache's version cannot be governed, so
    that none runs; empty if it can. `fingerprints` are those of the engines that have registered with the server.
    """

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
    ungoverned: str = ""
    fingerprints: tuple[Fingerprint, ...] = ()


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
"""The key that holds an answer's fields; answers without one have their fields at the top."""

_NAMES = {kind: name for name, kind in REQUESTS.items()}


def encode_request(request: Request) -> bytes:
    return encode_line({"op": _NAMES[type(request)], **to_wire(request)})


def decode_request(line: bytes) -> Request:
    """Raises ContractError for anything but a request."""
    raw = _object(line)
    kind = REQUESTS.get(str(raw.get("op")))
    if kind is None:
        raise ContractError("the adapter was asked something that it does not know")
    return from_wire(kind, raw)


def encode_answer(answer: Answer) -> bytes:
    name = _UNDER.get(type(answer))
    return encode_line({name: to_wire(answer)} if name is not None else to_wire(answer))


def decode_answer(kind: type[T], line: bytes) -> T:
    """Raises ContractError for a refusal and for anything but an answer of this kind."""
    raw = _object(line)
    if "error" in raw:
        raise ContractError(f"the adapter refused: {raw['error']}")
    name = _UNDER.get(kind)
    return from_wire(kind, raw if name is None else raw.get(name), "the adapter's answer")


def error_answer(message: str) -> bytes:
    return encode_line({"error": message})


def _object(line: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except MALFORMED as error:
        raise ContractError("a line between gate and adapter is not JSON") from error
    if not isinstance(raw, dict):
        raise ContractError("a line between gate and adapter is not an object")
    return raw
