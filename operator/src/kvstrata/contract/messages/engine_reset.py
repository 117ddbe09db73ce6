"""What the operator asks gates about their engines' own memory, at the port on which they tell their state.

`POST /v1/reset` has the engine empty its prefix cache; it is answered when the engine has forgotten its blocks, or
after `wait_ms`, with the header `Kvstrata-Ack-Token`. A gate of the version before does not know the path.

What is emptied is the table by which blocks are found, for all tenants. Their bytes stay in the engine's memory until
it computes others in their place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.contract import CONTRACT_VERSION, ContractError, contract_errors, require_version
from kvstrata.contract.messages.erase_2 import text
from kvstrata.contract.wire import canonical_json

RESET_PATH = "/v1/reset"
MAX_WAIT_S = 120.0
MAX_RESET_BYTES = 4096
"""How large an answer may be."""


class ResetOutcome(StrEnum):
    """What became of a request to reset."""

    RESET = "Reset"
    """The engine says that no block of before is found any more."""

    BUSY = "Busy"
    """Requests or transfers hold blocks, so nothing was forgotten."""

    AWAY = "EngineAway"
    """The engine did not answer, or failed: whether it forgot anything is not known."""

    CANNOT = "CannotReset"
    """This engine has no way to forget its blocks."""


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """Empty the engine's prefix cache; wait for it so long."""

    wait_s: float = 0.0

    def encode(self) -> bytes:
        """Return the body. Raises ContractError for what no gate would take."""
        body = canonical_json({"contract": CONTRACT_VERSION, "wait_ms": round(self.wait_s * 1000)})
        ResetRequest.decode(body)
        return body

    @classmethod
    def decode(cls, data: bytes) -> ResetRequest:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("a request to reset"):
            raw = json.loads(data)
            require_version(raw, "a request to reset")
            wait_ms = raw["wait_ms"]
            if type(wait_ms) is not int or not 0 <= wait_ms <= MAX_WAIT_S * 1000:
                raise ContractError(f"a request to reset waits {MAX_WAIT_S:g} s at most")
            return cls(wait_ms / 1000)


@dataclass(frozen=True, slots=True)
class EngineSaid:
    """What a pod says of its engine, by the gate of this boot."""

    gate_boot: str
    outcome: ResetOutcome

    def encode(self) -> bytes:
        """Return the body."""
        said = {"gate_boot": self.gate_boot, "outcome": str(self.outcome)}
        return canonical_json({"contract": CONTRACT_VERSION, **said})

    @classmethod
    def decode(cls, data: bytes) -> EngineSaid:
        """Read the body. Raises ContractError for anything malformed or of an unknown version."""
        with contract_errors("a reset"):
            raw = json.loads(data)
            require_version(raw, "a reset")
            return cls(text(raw["gate_boot"]), ResetOutcome(raw["outcome"]))
