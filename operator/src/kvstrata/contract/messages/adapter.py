"""Messages between gate and policy adapter over the pod's unix socket: one JSON object a line, answered in order.

Gate: `{"op":"apply","revision":R,"term":T}` after it wrote policy.json; the adapter answers once it refuses every
keyspace outside of that revision at each socket operation and the I/O that was under way on them has ended.
Gate: `{"op":"state"}`; the adapter answers with what it holds.
Gate: `{"op":"metrics"}`; the adapter answers with a page in Prometheus' text format.
Gate: `{"op":"hash","tokens":"<base64>"}`; the adapter answers with the hashes that the cache server gives the whole
chunks of these tokens, and with the size of its chunks.
Gate: `{"op":"pool",…}`, see `holding`.
Gate: `{"op":"purge","keyspaces":[…]}`; the adapter deletes all blocks of these keyspaces from the cache server's own
memory and from its files, overwrites their bytes (not those of encrypted files), and answers with what is done and what
readers and writers still hold. It goes on with the rest by itself; asked again it tells the sum.
Gate: `{"op":"erase",…}` and `{"op":"verify",…}`, see `erasing`, and `{"op":"forget",…}`, see `probe`. An adapter that
does not know what it is asked answers with `UNKNOWN_QUESTION`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.contract import MALFORMED, ContractError, contract_errors
from kvstrata.contract.messages.erase_2 import EraseQuestion, VerifyQuestion
from kvstrata.contract.messages.holding import PoolQuestion
from kvstrata.contract.messages.probe import ForgetQuestion
from kvstrata.contract.policy.keyspace import is_keyspace
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES

SOCKET_NAME = "adapter.sock"
MAX_LINE_BYTES = 1 << 20
UNKNOWN_QUESTION = "the adapter was asked something that it does not know"
"""The error by which an adapter of an earlier version is known."""

TOKEN_BYTES = 4
"""A token id is an unsigned little-endian integer of 32 bits."""

MAX_HASHED_TOKENS = 131_072
"""How many tokens one question may have: 699 KiB of a line in base64."""

MAX_PURGED_KEYSPACES = 4096
"""How many keyspaces one purge may name."""

MAX_TIER_USAGE_ROWS = 2048
"""How many scopes in shared tiers a state shows, those with most bytes first."""

MAX_USAGE_ROWS = 4096
"""How many scopes and tiers a state shows, those with most bytes first: an answer has to fit into one line."""

SCOPE_DIGITS = 12
"""How much of a keyspace a state shows: enough to tell scopes apart for whoever knows them, too little to use one."""


def apply_request(revision: int, term: int) -> bytes:
    """Return the line that asks the adapter to enforce a revision."""
    return _line({"op": "apply", "revision": revision, "term": term})


def state_request() -> bytes:
    """Return the line that asks the adapter for its state."""
    return _line({"op": "state"})


def metrics_request() -> bytes:
    """Return the line that asks the adapter for its metrics."""
    return _line({"op": "metrics"})


def metrics_answer(page: str) -> bytes:
    """Return the line that holds a page of metrics; one that does not fit is left out."""
    line = _line({"metrics": page})
    return line if len(line) <= MAX_LINE_BYTES else _line({"metrics": ""})


def decode_metrics_answer(line: bytes) -> str:
    """Read a page of metrics. Raises ContractError for an error answer or anything malformed."""
    page = _object(line).get("metrics")
    if not isinstance(page, str):
        raise ContractError("the adapter told no metrics")
    return page


def hash_request(tokens: bytes) -> bytes:
    """Return the line that asks for the hashes of tokens, given as `TOKEN_BYTES` each, `MAX_HASHED_TOKENS` at most."""
    return _line({"op": "hash", "tokens": base64.b64encode(tokens).decode()})


@dataclass(frozen=True, slots=True)
class ChunkHashes:
    """How the cache server `boot` names chunks: `hashes` are its names of the whole ones, one after the other."""

    boot: str
    chunk_tokens: int
    hashes: bytes

    def encode(self) -> bytes:
        """Return the line."""
        hashes = base64.b64encode(self.hashes).decode()
        return _line({"hash": {"boot": self.boot, "chunkTokens": self.chunk_tokens, "hashes": hashes}})

    @classmethod
    def decode(cls, line: bytes) -> ChunkHashes:
        """Read the line. Raises ContractError for an error answer or anything malformed."""
        raw = _object(line)
        if "error" in raw:
            raise ContractError(f"the adapter refused: {raw['error']}")
        with contract_errors("the adapter's answer"):
            told = raw["hash"]
            chunk_tokens = int(told["chunkTokens"])
            hashes = base64.b64decode(told["hashes"], validate=True)
            if chunk_tokens < 1 or len(hashes) % CHUNK_HASH_BYTES:
                raise ContractError("the adapter told hashes that are none")
            return cls(str(told["boot"]), chunk_tokens, hashes)


def purge_request(keyspaces: Iterable[str]) -> bytes:
    """Return the line that asks the adapter to purge keyspaces, `MAX_PURGED_KEYSPACES` at most."""
    return _line({"op": "purge", "keyspaces": sorted(keyspaces)})


@dataclass(frozen=True, slots=True)
class AdapterAck:
    """The adapter enforces `revision` of `term`; `boot` is random for each start of the cache server."""

    revision: int
    term: int
    boot: str

    def encode(self) -> bytes:
        """Return the line."""
        return _line({"ack": self.revision, "term": self.term, "boot": self.boot})


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

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TierState:
        """Read the wire form. What a later version adds is left out, what an earlier one does not tell is 0."""
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__ if name in raw})


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    """What one scope holds in one tier of this pod, and may hold there; None where the policy sets no bound.

    `scope` is the keyspace's first `SCOPE_DIGITS` digits; an empty one stands for all keyspaces outside of the policy.
    """

    scope: str
    tier: str
    used_bytes: int
    blocks: int
    limit_bytes: int | None = None
    guaranteed_bytes: int | None = None

    def to_json(self) -> list[str | int | None]:
        """Return the wire form, short because there are many."""
        return [self.scope, self.tier, self.used_bytes, self.blocks, self.limit_bytes, self.guaranteed_bytes]

    @classmethod
    def from_json(cls, raw: Any) -> ScopeUsage:
        """Read the wire form. What a later version adds at its end is left out."""
        scope, tier, used_bytes, blocks, limit_bytes, guaranteed_bytes, *_ = raw
        return cls(
            str(scope),
            str(tier),
            int(used_bytes),
            int(blocks),
            None if limit_bytes is None else int(limit_bytes),
            None if guaranteed_bytes is None else int(guaranteed_bytes),
        )


@dataclass(frozen=True, slots=True)
class PurgeAnswer:
    """What became of a purge in the server that `boot` names.

    `purged` was deleted since these keyspaces left the policy or were first asked for, and its bytes in memory and in
    plain files overwritten;
    `locked` is still held by readers or writers and goes when they let go. `residue` is empty, or says why copies may
    be left that the adapter cannot reach.
    """

    boot: str
    purged_bytes: int
    purged_blocks: int
    locked_bytes: int
    locked_blocks: int
    residue: str = ""

    def encode(self) -> bytes:
        """Return the line."""
        return _line({"purge": {name: getattr(self, name) for name in PurgeAnswer.__dataclass_fields__}})


@dataclass(frozen=True, slots=True)
class AdapterState:
    """What the adapter holds now. `revision` 0 means that it has no policy and answers every lookup with a miss.

    `usage` names the scopes that hold something in the server's own memory, largest first; `usage_left_out` is how many
    did not fit. `tier_usage` is what scopes hold in shared tiers, as this pod's sweeps last saw it: pods share the
    sweeps, so each pod tells of some scopes, and several may tell of the same. `warming` is whether a server that
    started still loads what was used last, and is better not asked yet.
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
    warming: bool = False

    def encode(self) -> bytes:
        """Return the line."""
        return _line(
            {
                "state": {
                    "boot": self.boot,
                    "revision": self.revision,
                    "term": self.term,
                    "fresh": self.fresh,
                    "keyspaces": self.keyspaces,
                    "tiers": [
                        {name: getattr(tier, name) for name in TierState.__dataclass_fields__} for tier in self.tiers
                    ],
                    "counters": dict(self.counters),
                    "usage": [row.to_json() for row in self.usage],
                    "usageLeftOut": self.usage_left_out,
                    "tierUsage": [row.to_json() for row in self.tier_usage],
                    "warming": self.warming,
                }
            }
        )


def decode_request(line: bytes) -> dict[str, Any]:
    """Read a gate's line. Raises ContractError unless it is an object with a known `op`."""
    raw = _object(line)
    if raw.get("op") == "apply" and isinstance(raw.get("revision"), int) and isinstance(raw.get("term"), int):
        return raw
    if raw.get("op") in ("state", "metrics"):
        return raw
    if raw.get("op") == "hash":
        return {"op": "hash", "tokens": _tokens(raw.get("tokens"))}
    if raw.get("op") == "pool":
        return {"op": "pool", "question": PoolQuestion.from_json(raw)}
    if raw.get("op") == "purge":
        return {"op": "purge", "keyspaces": _keyspaces(raw.get("keyspaces"))}
    if raw.get("op") == "erase":
        return {"op": "erase", "question": EraseQuestion.from_json(raw)}
    if raw.get("op") == "verify":
        return {"op": "verify", "question": VerifyQuestion.from_json(raw)}
    if raw.get("op") == "forget":
        return {"op": "forget", "question": ForgetQuestion.from_json(raw)}
    raise ContractError(UNKNOWN_QUESTION)


def decode_answer(line: bytes) -> AdapterAck | AdapterState:
    """Read an adapter's line. Raises ContractError for an error answer or anything malformed."""
    raw = _object(line)
    try:
        if "error" in raw:
            raise ContractError(f"the adapter refused: {raw['error']}")
        if "ack" in raw:
            return AdapterAck(int(raw["ack"]), int(raw["term"]), str(raw["boot"]))
        state = raw["state"]
        return AdapterState(
            boot=state["boot"],
            revision=int(state["revision"]),
            term=int(state["term"]),
            fresh=bool(state["fresh"]),
            keyspaces=int(state["keyspaces"]),
            tiers=tuple(TierState.from_json(tier) for tier in state["tiers"]),
            counters=dict(state["counters"]),
            # An adapter of the version before tells no usage.
            usage=tuple(ScopeUsage.from_json(row) for row in state.get("usage", ())),
            usage_left_out=int(state.get("usageLeftOut", 0)),
            tier_usage=tuple(ScopeUsage.from_json(row) for row in state.get("tierUsage", ())),
            warming=state.get("warming") is True,
        )
    except MALFORMED as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"the adapter's answer is malformed: {error!r}") from error


def decode_purge_answer(line: bytes) -> PurgeAnswer:
    """Read an adapter's answer to a purge. Raises ContractError for an error answer or anything malformed."""
    raw = _object(line)
    try:
        if "error" in raw:
            raise ContractError(f"the adapter refused: {raw['error']}")
        told = raw["purge"]
        return PurgeAnswer(
            boot=str(told["boot"]),
            purged_bytes=int(told["purged_bytes"]),
            purged_blocks=int(told["purged_blocks"]),
            locked_bytes=int(told["locked_bytes"]),
            locked_blocks=int(told["locked_blocks"]),
            residue=str(told["residue"]),
        )
    except MALFORMED as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"the adapter's answer is malformed: {error!r}") from error


def error_answer(message: str) -> bytes:
    """Return the line that refuses a request."""
    return _line({"error": message})


def _tokens(raw: Any) -> bytes:
    with contract_errors("a question about tokens"):
        tokens = base64.b64decode(raw, validate=True)
    if len(tokens) % TOKEN_BYTES or len(tokens) > MAX_HASHED_TOKENS * TOKEN_BYTES:
        raise ContractError(f"a question about tokens has {MAX_HASHED_TOKENS} at most")
    return tokens


def _keyspaces(raw: Any) -> list[str]:
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_PURGED_KEYSPACES:
        raise ContractError(f"a purge names between one and {MAX_PURGED_KEYSPACES} keyspaces")
    if not all(isinstance(keyspace, str) and is_keyspace(keyspace) for keyspace in raw):
        raise ContractError("a purge names a malformed keyspace")
    return raw


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _object(line: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except MALFORMED as error:
        raise ContractError("a line between gate and adapter is not JSON") from error
    if not isinstance(raw, dict):
        raise ContractError("a line between gate and adapter is not an object")
    return raw
