"""What the operator asks gates about copies in their pods, at the port on which they tell their state.

`POST /v1/erase` has the pod erase keyspaces that left the policy from its own memory and files, and answers when
nothing is left or after `wait` seconds. `POST /v1/verify` asks whether blocks that could be read before are still
found. Bodies are JSON; no answer holds a keyspace, a key or a block's name. Every answer carries the header
`Kvstrata-Ack-Token`, as states do. A gate of the version before knows neither path.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from kvstrata.contract import CONTRACT_VERSION, ContractError, contract_errors, require_version
from kvstrata.contract.messages.erase_2 import (
    AdapterErased,
    AdapterVerified,
    ErasedTier,
    EraseOutcome,
    EraseQuestion,
    VerifyQuestion,
    flag,
    text,
    tiers_of,
)
from kvstrata.contract.wire import canonical_json

ERASE_PATH = "/v1/erase"
VERIFY_PATH = "/v1/verify"
MAX_WAIT_S = 120.0
MAX_ERASED_BYTES = 256 * 1024
"""How large an answer may be."""

_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class EraseRequest:
    """Erase keyspaces from the tiers of a pod that are named, or from all that are its own; wait for it so long."""

    keyspaces: tuple[str, ...] = field(repr=False)
    tiers: tuple[str, ...] = ()
    wait_s: float = 0.0

    def encode(self) -> bytes:
        """Return the body. Raises ContractError for what no gate would take."""
        body = canonical_json(
            {
                "contract": CONTRACT_VERSION,
                "keyspaces": list(self.keyspaces),
                "tiers": list(self.tiers),
                "wait_ms": round(self.wait_s * 1000),
            }
        )
        EraseRequest.decode(body)
        return body

    @classmethod
    def decode(cls, data: bytes) -> EraseRequest:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("a request to erase"):
            raw = json.loads(data)
            require_version(raw, "a request to erase")
            question = EraseQuestion.from_json(raw)
            wait_ms = _figure(raw["wait_ms"])
            if wait_ms > MAX_WAIT_S * 1000:
                raise ContractError(f"a request to erase waits {MAX_WAIT_S:g} s at most")
            return cls(question.keyspaces, question.tiers, wait_ms / 1000)


@dataclass(frozen=True, slots=True)
class LeftKeys:
    """Data keys of the keyspaces that are still there: in the policy that the gate holds and in its list of files, as
    files in the pod's memory volume, in the cache server's memory. Each was counted when the answer was made.
    """

    gate: int = 0
    volume: int = 0
    adapter: int = 0

    def __bool__(self) -> bool:
        return bool(self.gate or self.volume or self.adapter)


@dataclass(frozen=True, slots=True)
class Erased:
    """What a pod says of its own copies, by the processes that these boots name.

    `revision` of `term` is the policy that the cache server enforces, and `acked` what the pod has acknowledged.
    `requests` under these keyspaces are in flight in the gate, `operations` in the cache server's tiers. `elsewhere`
    names tiers that were meant and are not this pod's to erase.
    """

    gate_boot: str
    cache_boot: str
    revision: int
    term: int
    acked: int
    outcome: EraseOutcome
    requests: int = 0
    operations: int = 0
    keys: LeftKeys = field(default_factory=LeftKeys)
    tiers: tuple[ErasedTier, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def held_by(self) -> tuple[str, ...]:
        """What keeps the erasure from being complete, for people; empty when it is, and when nothing was erased."""
        counted = (
            (self.requests, "requests are in flight in the gate"),
            (self.operations, "operations of tiers are under way"),
            (self.keys.gate, "data keys are held by the gate"),
            (self.keys.volume, "data keys are files in the policy volume"),
            (self.keys.adapter, "data keys are held by the cache server"),
        )
        told = [f"{count} {what}" for count, what in counted if count]
        return (*told, *(reason for tier in self.tiers for reason in tier.held_by))

    @classmethod
    def of(cls, gate_boot: str, acked: int, said: AdapterErased, requests: int, keys: LeftKeys) -> Erased:
        """Return what the pod says as one: complete if the cache server is and the gate holds nothing either."""
        outcome = said.outcome
        left = requests or keys or not said.nothing_left
        if outcome is EraseOutcome.COMPLETE and left:
            outcome = EraseOutcome.REMAINING
        return cls(
            gate_boot, said.boot, said.revision, said.term, acked, outcome,
            requests, said.operations, keys, said.tiers, said.elsewhere,
        )  # fmt: skip

    def encode(self) -> bytes:
        """Return the body."""
        plain = {name: getattr(self, name) for name in (*_TEXTS, *_FIGURES)}
        keys = {name: getattr(self.keys, name) for name in LeftKeys.__dataclass_fields__}
        rows = {"tiers": [tier.to_json() for tier in self.tiers], "elsewhere": list(self.elsewhere)}
        return canonical_json(
            {"contract": CONTRACT_VERSION, "outcome": str(self.outcome), "keys": keys, **plain, **rows}
        )

    @classmethod
    def decode(cls, data: bytes) -> Erased:
        """Read the body. Raises ContractError for anything malformed, of an unknown version, or that says complete of
        something that is not.
        """
        with contract_errors("an erasure"):
            raw = json.loads(data)
            require_version(raw, "an erasure")
            plain: dict[str, Any] = {name: text(raw[name]) for name in _TEXTS}
            plain |= {name: _figure(raw[name]) for name in _FIGURES}
            said = cls(
                outcome=EraseOutcome(raw["outcome"]),
                keys=LeftKeys(**{name: _figure(raw["keys"][name]) for name in LeftKeys.__dataclass_fields__}),
                tiers=tuple(ErasedTier.from_json(tier) for tier in raw["tiers"]),
                elsewhere=tiers_of(raw["elsewhere"]),
                **plain,
            )
            if said.outcome is EraseOutcome.COMPLETE and (said.held_by or not said.cache_boot):
                raise ContractError("a pod says that an erasure is complete and that something is left")
            return said


_TEXTS = ("gate_boot", "cache_boot")
_FIGURES = ("revision", "term", "acked", "requests", "operations")


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Look for blocks under a keyspace: for the chunks of these names, 32 bytes each, or for those that the cache
    server remembers having erased.
    """

    keyspace: str = field(repr=False)
    chunks: bytes | None = field(default=None, repr=False)

    def encode(self) -> bytes:
        """Return the body. Raises ContractError for what no gate would take."""
        chunks = None if self.chunks is None else base64.b64encode(self.chunks).decode()
        body = canonical_json({"contract": CONTRACT_VERSION, "keyspace": self.keyspace, "chunks": chunks})
        VerifyRequest.decode(body)
        return body

    @classmethod
    def decode(cls, data: bytes) -> VerifyRequest:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("a request to verify"):
            raw = json.loads(data)
            require_version(raw, "a request to verify")
            question = VerifyQuestion.from_json(raw)
            return cls(question.keyspace, question.chunks)


@dataclass(frozen=True, slots=True)
class Verified:
    """What a pod's tiers find, by the gate of this boot and what its cache server says."""

    gate_boot: str
    acked: int
    in_force: bool
    found: AdapterVerified

    @property
    def asked(self) -> int:
        """How many blocks each tier was asked for."""
        return max((tier.asked for tier in self.found.tiers), default=0)

    @property
    def all_missed(self) -> bool:
        """Whether blocks were asked for, and no tier found any; nothing that was not asked is a proof."""
        return self.found.known and self.asked > 0 and not any(tier.found for tier in self.found.tiers)

    def encode(self) -> bytes:
        """Return the body."""
        plain = {"gate_boot": self.gate_boot, "acked": self.acked, "in_force": self.in_force}
        return canonical_json({"contract": CONTRACT_VERSION, **plain, "found": self.found.to_json()})

    @classmethod
    def decode(cls, data: bytes) -> Verified:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("a verification"):
            raw = json.loads(data)
            require_version(raw, "a verification")
            found = AdapterVerified.from_json(raw["found"])
            return cls(text(raw["gate_boot"]), _figure(raw["acked"]), flag(raw["in_force"]), found)


def _figure(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw <= _MOST:
        raise ContractError("something is no count")
    return raw
