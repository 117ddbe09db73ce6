"""Messages between gate and policy adapter over the pod's unix socket: one JSON object a line, answered in order.

Gate: `{"op":"apply","revision":R,"term":T}` after it wrote policy.json; the adapter answers once it refuses every
keyspace outside of that revision at each socket operation and the I/O that was under way on them has ended.
Gate: `{"op":"state"}`; the adapter answers with what it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import MALFORMED, ContractError

SOCKET_NAME = "adapter.sock"
MAX_LINE_BYTES = 1 << 20


def apply_request(revision: int, term: int) -> bytes:
    """Return the line that asks the adapter to enforce a revision."""
    return _line({"op": "apply", "revision": revision, "term": term})


def state_request() -> bytes:
    """Return the line that asks the adapter for its state."""
    return _line({"op": "state"})


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


@dataclass(frozen=True, slots=True)
class AdapterState:
    """What the adapter holds now. `revision` 0 means that it has no policy and answers every lookup with a miss."""

    boot: str
    revision: int
    term: int
    fresh: bool
    keyspaces: int
    tiers: tuple[TierState, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)

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
                }
            }
        )


def decode_request(line: bytes) -> dict[str, Any]:
    """Read a gate's line. Raises ContractError unless it is an object with a known `op`."""
    raw = _object(line)
    if raw.get("op") == "apply" and isinstance(raw.get("revision"), int) and isinstance(raw.get("term"), int):
        return raw
    if raw.get("op") == "state":
        return raw
    raise ContractError("the adapter was asked something that it does not know")


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
            tiers=tuple(TierState(**tier) for tier in state["tiers"]),
            counters=dict(state["counters"]),
        )
    except MALFORMED as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"the adapter's answer is malformed: {error!r}") from error


def error_answer(message: str) -> bytes:
    """Return the line that refuses a request."""
    return _line({"error": message})


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
