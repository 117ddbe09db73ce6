"""Requests from the operator that an engine empties its prefix cache.

`POST /v1/reset` is answered when the engine has forgotten its blocks, or after `wait_ms`, with the header
`Kvstrata-Ack-Token`.

The reset empties the table by which blocks are found, for all tenants. Their bytes stay in the engine's memory until
other blocks take their place.
"""

from __future__ import annotations

from typing import Annotated

from kvstrata.contract import Meaningful
from kvstrata.contract.wire import Message, Range, Request, Text, wired

RESET_PATH = "/v1/reset"
MAX_WAIT_MS = 120_000
MAX_RESET_BYTES = 4096


class ResetOutcome(Meaningful):
    RESET = "Reset", "The engine finds none of its earlier blocks any more."
    BUSY = "Busy", "Requests or transfers hold blocks, so nothing was forgotten."
    AWAY = "EngineAway", "The engine did not answer, or failed: whether it forgot anything is unknown."
    CANNOT = "CannotReset", "The engine has no request for it."


@wired("a request to reset", versioned=True, complete=True)
class ResetRequest(Request):
    wait_ms: Annotated[int, Range(0, MAX_WAIT_MS)] = 0

    @property
    def wait_s(self) -> float:
        return self.wait_ms / 1000


@wired("a reset", versioned=True, complete=True)
class EngineResetAnswer(Message):
    gate_boot: Text
    outcome: ResetOutcome
