"""What the operator asks gates about their engines' own memory, at the port on which they tell their state.

`POST /v1/reset` has the engine empty its prefix cache; it is answered when the engine has forgotten its blocks, or
after `wait_ms`, with the header `Kvstrata-Ack-Token`. A gate of the version before does not know the path.

What is emptied is the table by which blocks are found, for all tenants. Their bytes stay in the engine's memory until
it computes others in their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from kvstrata.contract.wire import Message, Range, Request, Text, Wire

RESET_PATH = "/v1/reset"
MAX_WAIT_MS = 120_000
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
class ResetRequest(Request):
    """Empty the engine's prefix cache; wait for it so long."""

    WIRE: ClassVar[Wire] = Wire("a request to reset", versioned=True, complete=True)

    wait_ms: Annotated[int, Range(0, MAX_WAIT_MS)] = 0

    @property
    def wait_s(self) -> float:
        """How long the gate waits."""
        return self.wait_ms / 1000


@dataclass(frozen=True, slots=True)
class EngineSaid(Message):
    """What a pod says of its engine, by the gate of this boot."""

    WIRE: ClassVar[Wire] = Wire("a reset", versioned=True, complete=True)

    gate_boot: Text
    outcome: ResetOutcome
